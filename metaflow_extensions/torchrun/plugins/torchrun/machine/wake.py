"""The signal that tells a task to read what its supervisor says while the step's own code runs."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import termios
from contextlib import suppress

from . import native
from .processes import send_signal

# By default it is ignored, so it harms no process whose handlers the step's code has reset; and it needs no room in a queue.
SIGNAL = int(signal.SIGURG)
LONGEST_PAUSE_S = 2.0
"""Between two signals of a task that does not read."""


def unread_bytes(link: int) -> int:
    """Return how much the other end of a Unix socket has not read, as the kernel counts it (``unix_ioctl``)."""
    try:
        (count,) = struct.unpack("i", fcntl.ioctl(link, termios.TIOCOUTQ, b"\0\0\0\0"))
    except (OSError, ValueError):  # its end is gone, or another thread has closed it
        return 0
    return int(count)


def wake(task: int) -> None:
    """Signal a task's process."""
    send_signal(task, SIGNAL)


class EndSignal:
    """A pipe to which nobody writes: at the end of the process that has its other end the kernel signals this one.

    So a task hears of its supervisor's end even if no process of ours is left. Forks of the task share the pipe, and the
    setting with it, so only the task may change that.
    """

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        self._file = os.fstat(pipe).st_ino  # the step's code may close it, and get its number for another file

    def set(self, is_on: bool) -> None:
        """Have the signal sent, or not."""
        with suppress(OSError):  # the step's code has closed it, or the system has no such signals
            if os.fstat(self._pipe).st_ino == self._file:
                if is_on:
                    fcntl.fcntl(self._pipe, fcntl.F_SETOWN, os.getpid())
                    fcntl.fcntl(self._pipe, fcntl.F_SETSIG, SIGNAL)  # see fcntl(2)
                flags = fcntl.fcntl(self._pipe, fcntl.F_GETFL) & ~os.O_ASYNC
                fcntl.fcntl(self._pipe, fcntl.F_SETFL, flags | (os.O_ASYNC if is_on else 0))

    @property
    def has_come(self) -> bool:
        """Whether that process has ended; its other files may close a moment later."""
        with suppress(OSError):
            if os.fstat(self._pipe).st_ino == self._file:
                poll = native.poll()
                poll.register(self._pipe, 0)
                return bool(poll.poll(0))
        return False

    def close(self) -> None:
        """Have it sent no more, and close the pipe."""
        self.set(False)
        with suppress(OSError):
            if os.fstat(self._pipe).st_ino == self._file:
                os.close(self._pipe)
