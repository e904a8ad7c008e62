"""Waits for spares; flows of tests have a copy beside them."""

import os
import time

# A variable of this flow alone, where flows of tests share a machine.
_OWN = f"GANG_OUT={os.environ['GANG_OUT']}".encode() if "GANG_OUT" in os.environ else b""


def await_spares(count: int, within_s: float = 120.0) -> None:
    """Wait until so many spares of this container have imported what they are to, and wait themselves."""
    deadline = time.monotonic() + within_s
    while (found := sum(map(_waits, filter(str.isdigit, os.listdir("/proc"))))) < count:
        assert time.monotonic() < deadline, f"{found} spares wait, not {count}"
        time.sleep(0.1)


def _waits(pid: str) -> bool:
    try:
        if os.readlink(f"/proc/{pid}/ns/mnt") != os.readlink("/proc/self/ns/mnt"):  # another container's
            return False
        with open(f"/proc/{pid}/cmdline", "rb") as command, open(f"/proc/{pid}/environ", "rb") as env:
            if b"/worker/spare.py\0" not in command.read() or _OWN not in env.read():
                return False
        with open(f"/proc/{pid}/wchan") as channel:
            return "skb_wait" in channel.read()  # it is in recvmsg(2)
    except OSError:  # it has ended, or is another user's
        return False
