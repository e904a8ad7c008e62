"""A turn at a pipe that several nodes write to, and waits for its reader, which may be slow or paused.

On a local run all nodes write to the two pipes of the control task. Only the writing thread of `console` uses this.
"""

from __future__ import annotations

import fcntl
import os
import select
import stat
import struct
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_LOOK_S = 0.001  # the longest pause between two looks at a reader
_FIRST_LOOK_S = 0.00005  # at a reader, who may be fast; each pause is twice as long as the one before
_OTHERS_S = 0.001  # in which another node can take its turn: the kernel alone gives none to who waits


class SharedPipe:
    """The lock of the pipe that is written to; it excludes other processes, not threads.

    A write of more than ``PIPE_BUF`` bytes is not atomic, so without a lock lines of two nodes could mix.
    """

    def __init__(self) -> None:
        # A descriptor of our own, in the turn: a lock belongs to the open file, which others may have inherited.
        self._own: int | None = None

    @contextmanager
    def turn(self, fd: int) -> Iterator[None]:
        """Wait until no other node writes to this pipe, as long as it takes, and keep others waiting meanwhile."""
        if not is_pipe(fd):
            yield
            return
        try:
            with suppress(OSError):  # no /proc (macOS), or a pipe without reader: the write tells
                self._own = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                fcntl.flock(self._own, fcntl.LOCK_EX)
            yield
        finally:
            if self._own is not None:
                with suppress(OSError):  # the step's code has closed all descriptors; that ends the lock, too
                    fcntl.flock(self._own, fcntl.LOCK_UN)
                self.forget()
        time.sleep(_OTHERS_S)

    def forget(self) -> None:
        """Close what a fork of the process shares, and leave the lock to the process."""
        own, self._own = self._own, None
        if own is not None:
            with suppress(OSError):
                os.close(own)


def is_pipe(fd: int) -> bool:
    """Return whether a descriptor is open, and a pipe."""
    with suppress(OSError):
        return stat.S_ISFIFO(os.fstat(fd).st_mode)
    return False


def await_room(fd: int) -> None:
    """Wait until a descriptor that must not block takes more, as long as it takes."""
    room = select.poll()
    room.register(fd, select.POLLOUT)
    room.poll()


def await_reader(fd: int, patience_s: float) -> None:
    """Wait until the pipe is empty, as long as its reader goes on reading; `patience_s` is for one that takes nothing."""
    least, deadline, pause_s = sys.maxsize, 0.0, _FIRST_LOOK_S
    while unread := unread_bytes(fd):
        if unread < least:
            least, deadline = unread, time.monotonic() + patience_s
        if time.monotonic() >= deadline:
            return
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LOOK_S)


def unread_bytes(fd: int) -> int:
    """Return how much is in the pipe that its reader has not taken."""
    try:
        count: int = struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, b"\0\0\0\0"))[0]
    except OSError:  # closed meanwhile
        return 0
    return count
