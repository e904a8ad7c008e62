"""A lock for a pipe that several nodes write to, and waits for the pipe's reader, which may be slow or paused.

Only one thread at a time may use a `PipeLock`: in `console`, the one that holds `_turn`.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import sys
import termios
import time
from contextlib import suppress

_LOOK_S = 0.001  # between two checks of a lock or a reader
_FIRST_LOOK_S = 0.00005  # at a reader, who may be fast; each pause is twice as long as the one before, up to that
_READER_PATIENCE_S = 0.05  # with a reader that has taken nothing, before the last line of a text


class PipeLock:
    """The lock of a pipe that nodes share.

    A write of more than ``PIPE_BUF`` bytes is not atomic, so without it lines of two nodes could mix.
    """

    def __init__(self) -> None:
        self._fd: int | None = None
        self._pipe = (0, 0)  # which one it is, as `_identity` says

    def acquire(self, pipe_fd: int, patience_s: float) -> bool:
        """Return whether to write now; False: another node still holds it after `patience_s`, and may wait for the reader."""
        pipe = _identity(pipe_fd)
        if self._fd is not None and pipe == self._pipe:
            return True
        self.release()
        try:  # a descriptor of our own: locks of one that others have, too, would be shared with them
            self._fd = os.open(f"/proc/self/fd/{pipe_fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:  # no /proc: then lines of two nodes can mix, as any programs' can
            return True
        self._pipe = pipe
        deadline = time.monotonic() + patience_s
        while True:
            with suppress(OSError):  # another node holds it
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            if time.monotonic() >= deadline:
                self.release()
                return False
            time.sleep(_LOOK_S)

    def release(self) -> None:
        """Let others write; does nothing if it is not held."""
        if self._fd is None:
            return
        fd, self._fd = self._fd, None
        with suppress(OSError):  # the step's code has closed all descriptors, including ours
            if _identity(fd) == self._pipe:
                fcntl.flock(fd, fcntl.LOCK_UN)  # a child that was forked meanwhile holds it, too
                os.close(fd)


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def await_room(fd: int, patience_s: float) -> bool:
    """Return whether the pipe, or what it is, takes more, at once or within `patience_s`."""
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(patience_s * 1000))


def await_reader(fd: int, patience_s: float = _READER_PATIENCE_S) -> int:
    """Wait until the pipe is empty, as long as its reader goes on reading; return how much it has not taken.

    The last line of a text waits for that.

    Metaflow's local runtime (``Worker.read_logline`` in ``metaflow/runtime.py``, 2.19) takes as much out of the pipe
    at once as its buffer holds, but shows one line each time the pipe has something to read. When the pipe is empty it
    stops, whatever it has not shown. While the last line is in the pipe, it goes on; it takes that line after all others.
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
    except OSError:  # not on this system: then lines come when they come
        return 0
    return count
