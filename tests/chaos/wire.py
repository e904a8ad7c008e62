"""A cable between two hosts that delays and loses frames, as ``tc netem`` does, for kernels that lack it.

``python wire.py DELAY_S LOSS INTERFACE SPACE SPACE``: each network namespace gets a TAP device, and what leaves
one arrives at the other `DELAY_S` seconds later, but for the share `LOSS`, which vanishes.
"""

import contextlib
import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import sys
import time

CLONE_NEWNET = 0x40000000  # <linux/sched.h>
TUNSETIFF = 0x400454CA  # <linux/if_tun.h>
IFF_TAP, IFF_NO_PI = 0x0002, 0x1000
_FRAME_BYTES = 65536


def open_end(space, interface):
    """Make a TAP device in a network namespace and return its file descriptor."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/var/run/netns/{space}") as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"can't enter {space}")
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH22x", interface.encode(), IFF_TAP | IFF_NO_PI))
    return end


def forward(ends, delay_s, loss):
    """Carry frames until killed."""
    dice, other = random.Random(4), {ends[0]: ends[1], ends[1]: ends[0]}
    waiting = []
    while True:
        pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select(ends, [], [], pause)
        for end in ready:
            frame = os.read(end, _FRAME_BYTES)
            if dice.random() >= loss:
                heapq.heappush(waiting, (time.monotonic() + delay_s, other[end], frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, end, frame = heapq.heappop(waiting)
            with contextlib.suppress(OSError):  # its interface is down: the frame is lost, as on a real cable
                os.write(end, frame)


if __name__ == "__main__":
    opened = [open_end(space, sys.argv[3]) for space in sys.argv[4:]]
    print("open", flush=True)
    forward(opened, float(sys.argv[1]), float(sys.argv[2]))
