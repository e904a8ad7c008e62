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


class SharedPipes:
    """The locks of the pipes among a process's stdout and stderr; they exclude other processes, not threads.

    A write of more than ``PIPE_BUF`` bytes is not atomic, so without a lock lines of two nodes could mix.
    The last pipe's lock is the turn. The first one's is a turnstile before it: who waits there is next. A lock alone is
    not fair, since who releases it takes it again before the kernel has woken another. All waits are in the kernel.
    """

    def __init__(self) -> None:
        self._opened: dict[tuple[int, int], int] = {}  # pipe -> a descriptor of our own

    @contextmanager
    def turn(self, fds: Iterable[int]) -> Iterator[None]:
        """Wait until no other node writes to these descriptors, as long as it takes, and keep others waiting meanwhile."""
        locks = self._locks(fds)
        if not locks:
            yield
            return
        turnstile, turn = locks[0], locks[-1]
        if turnstile != turn:
            fcntl.flock(turnstile, fcntl.LOCK_EX)
        fcntl.flock(turn, fcntl.LOCK_EX)
        if turnstile != turn:
            fcntl.flock(turnstile, fcntl.LOCK_UN)
        try:
            yield
        finally:
            with suppress(OSError):  # the step's code has closed all descriptors; that releases the lock, too
                fcntl.flock(turn, fcntl.LOCK_UN)

    def _locks(self, fds: Iterable[int]) -> list[int]:
        """Return descriptors to lock, in the same order on all nodes."""
        pipes: dict[tuple[int, int], int] = {}
        for fd in fds:
            if is_pipe(fd):
                pipes[_identity(fd)] = fd
        for pipe in list(self._opened):
            if pipe not in pipes or not _is_same(self._opened[pipe], pipe):
                self.close(pipe)
        for pipe, fd in pipes.items():
            if pipe not in self._opened:
                try:  # a descriptor of our own: a lock belongs to the open file, which others may have inherited
                    self._opened[pipe] = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                except OSError:  # no /proc, or a pipe without reader: the write tells
                    return []
        return [self._opened[pipe] for pipe in pipes]

    def close(self, pipe: tuple[int, int]) -> None:
        """Forget a pipe."""
        fd = self._opened.pop(pipe)
        if _is_same(fd, pipe):  # else the step's code has closed it, and the number belongs to another file
            os.close(fd)

    def close_all(self) -> None:
        """Release everything; in a fork of the process, which shares the locks, this keeps them with the parent."""
        for pipe in list(self._opened):
            self.close(pipe)


def is_pipe(fd: int) -> bool:
    """Return whether a descriptor is open, and a pipe."""
    with suppress(OSError):
        return stat.S_ISFIFO(os.fstat(fd).st_mode)
    return False


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _is_same(fd: int, pipe: tuple[int, int]) -> bool:
    with suppress(OSError):
        return _identity(fd) == pipe
    return False


def await_room(fd: int) -> None:
    """Wait until a descriptor that must not block takes more, as long as it takes."""
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    poll.poll()


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
