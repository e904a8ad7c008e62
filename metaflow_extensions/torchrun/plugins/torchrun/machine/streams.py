"""Whole lines for a stdout or stderr that others write to as well, and whose reader may be slow or paused.

On a local run all nodes write to the two pipes of the control task. The supervisors take turns, by a lock. What a task
writes itself has no turn: a piece of at most ``PIPE_BUF`` bytes is not mixed with others.

Metaflow's local runtime (``Worker.read_logline`` in ``metaflow/runtime.py``, 2.19) takes as much out of a pipe at once as
its buffer holds, but shows one line each time the pipe has something to read. When the pipe is empty it stops, whatever
it has not shown. So the last line of a text waits until the others are taken, and makes the runtime go on: it shows all.
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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

_READER_PATIENCE_S = 0.05  # for a reader that takes nothing, before the last line of a text
_LOOK_S = 0.0003  # between two looks at a reader, who may be fast
_OTHERS_S = 0.001  # in which another node can take its turn: the kernel alone gives none to who waits


def file_of(fd: int) -> tuple[int, int] | None:
    """Return which file a descriptor refers to; None for one that is closed."""
    with suppress(OSError):
        status = os.fstat(fd)
        return status.st_dev, status.st_ino
    return None


def is_pipe(fd: int) -> bool:
    """Return whether a descriptor is open, and a pipe."""
    with suppress(OSError):
        return stat.S_ISFIFO(os.fstat(fd).st_mode)
    return False


def unread_bytes(fd: int) -> int:
    """Return how much is in the pipe that its reader has not taken."""
    with suppress(OSError):  # closed meanwhile
        return int(struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, b"\0\0\0\0"))[0])
    return 0


def await_room(fd: int, timeout_s: float | None = None) -> bool:
    """Wait until a descriptor takes more, or for so long; return whether it does."""
    room = select.poll()
    room.register(fd, select.POLLOUT)
    return bool(room.poll(None if timeout_s is None else 1000 * timeout_s))


@contextmanager
def turn(fd: int) -> Iterator[None]:
    """Wait until no other supervisor writes to this pipe, as long as it takes, and keep others waiting meanwhile."""
    with ExitStack() as held:
        if is_pipe(fd):
            held.callback(time.sleep, _OTHERS_S)
            with suppress(OSError):  # a pipe without reader: the write tells
                # A lock belongs to the open file, which the nodes share: so this opens the pipe once more.
                own = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                held.callback(os.close, own)
                fcntl.flock(own, fcntl.LOCK_EX)
        yield


def write_lines(fd: int, lines: bytes, wait: Callable[[int], object] = await_room, more_follows: bool = False) -> None:
    """Write whole lines, and wait for their reader; `wait` is called with a descriptor that takes nothing now."""
    last = lines.rfind(b"\n", 0, -1) + 1
    if last and not more_follows and is_pipe(fd):
        _write_all(fd, lines[:last], wait)
        _await_reader(fd)
        lines = lines[last:]
    _write_all(fd, lines, wait)


def _write_all(fd: int, data: bytes, wait: Callable[[int], object]) -> None:
    """Write in pieces that the kernel does not mix with what others write, if no line is longer than that.

    This goes past Python's own layers: unbuffered, they drop the rest of a write that a signal cuts short.
    """
    at = 0
    while at < len(data):
        end = at + select.PIPE_BUF
        if end < len(data):
            end = data.rfind(b"\n", at, end) + 1 or end
        wait(fd)
        with suppress(BlockingIOError):  # some program has made it non-blocking, for all that share it
            at += os.write(fd, memoryview(data)[at:end])


def _await_reader(fd: int) -> None:
    """Wait until the pipe is empty, as long as its reader goes on reading."""
    least, deadline = sys.maxsize, 0.0
    while unread := unread_bytes(fd):
        if unread < least:
            least, deadline = unread, time.monotonic() + _READER_PATIENCE_S
        if time.monotonic() >= deadline:
            return
        time.sleep(_LOOK_S)
