"""A turn at pipes that several nodes write to, and waits for their reader, which may be slow or paused.

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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

_LOOK_S = 0.001  # the longest pause between two looks at a reader
_FIRST_LOOK_S = 0.00005  # at a reader, who may be fast; each pause is twice as long as the one before
_OTHERS_S = 0.001  # in which another node can take its turn


class SharedPipes:
    """The locks of the pipes among a process's stdout and stderr; they exclude other processes, not threads.

    A write of more than ``PIPE_BUF`` bytes is not atomic, so without a lock lines of two nodes could mix.
    The turn is the locks of all pipes that this process has: another one may have one of them alone. A lock alone is not
    fair, since who releases it takes it again before the kernel has woken another. So who has had its turn
    pauses for a moment.
    """

    def __init__(self) -> None:
        self._held: list[tuple[int, tuple[int, int]]] = []  # descriptors of our own, with their pipes
        self._opens: tuple[int, int] | None = None  # the pipe that is being opened, perhaps while another thread forks

    @contextmanager
    def turn(self, fds: Iterable[int]) -> Iterator[None]:
        """Wait until no other node writes to these descriptors, as long as it takes, and keep others waiting meanwhile."""
        try:
            locks = self._open(fds)
            for lock in locks:
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            self.release(unlock=True)
        if locks:
            time.sleep(_OTHERS_S)

    def _open(self, fds: Iterable[int]) -> list[int]:
        """Return descriptors to lock, in the same order on all nodes."""
        pipes = {_identity(fd): fd for fd in fds if is_pipe(fd)}
        for pipe in sorted(pipes):
            # A descriptor of our own: a lock belongs to the open file, which others may have inherited.
            with suppress(OSError):  # no /proc (macOS), or a pipe without reader: the write tells
                self._opens = pipe
                own = os.open(f"/proc/self/fd/{pipes[pipe]}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                self._held.append((own, pipe))
            self._opens = None
        return [own for own, _ in self._held]

    def forget(self) -> None:
        """Close what a fork of the process shares, and leave the locks to the process."""
        self.release(unlock=False)
        for fd in map(int, os.listdir("/proc/self/fd")) if self._opens is not None else ():
            with suppress(OSError):  # that of the listing itself
                flags = fcntl.fcntl(fd, fcntl.F_GETFL)
                if _identity(fd) == self._opens and flags & os.O_NONBLOCK and fcntl.fcntl(fd, fcntl.F_GETFD):
                    os.close(fd)

    def release(self, unlock: bool) -> None:
        """Let others write."""
        while self._held:
            fd, pipe = self._held.pop()
            with suppress(OSError):  # the step's code has closed all descriptors; that releases the lock, too
                if _identity(fd) == pipe:  # else the number belongs to another file by now
                    if unlock:
                        fcntl.flock(fd, fcntl.LOCK_UN)
                    os.close(fd)


def is_pipe(fd: int) -> bool:
    """Return whether a descriptor is open, and a pipe."""
    with suppress(OSError):
        return stat.S_ISFIFO(os.fstat(fd).st_mode)
    return False


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def await_room(fd: int) -> None:
    """Wait until a descriptor that must not block takes more, as long as it takes."""
    room = select.poll()
    room.register(fd, select.POLLOUT)
    room.poll()


def await_reader(fd: int, patience_s: float) -> int:
    """Wait until the pipe is empty, as long as its reader goes on reading; return how much it has not taken.

    `patience_s` is for a reader that takes nothing.
    """
    least, deadline, pause_s = sys.maxsize, 0.0, _FIRST_LOOK_S
    while unread := unread_bytes(fd):
        if unread < least:
            least, deadline = unread, time.monotonic() + patience_s
        if time.monotonic() >= deadline:
            break
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LOOK_S)
    return unread


def unread_bytes(fd: int) -> int:
    """Return how much is in the pipe that its reader has not taken."""
    try:
        count: int = struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, b"\0\0\0\0"))[0]
    except OSError:  # closed meanwhile
        return 0
    return count
