"""The signal that tells a task to read what its supervisor says while the step's own code runs."""

from __future__ import annotations

import fcntl
import select
import signal
import struct
import termios

from .processes import send_signal, status

# A real-time signal, beside that of `stacks`; see there. macOS has none, and commands import this there.
SIGNAL = int(getattr(signal, "SIGRTMAX", 64)) - 6
LONGEST_PAUSE_S = 2.0
"""Between two signals of a task that does not read."""


def unread_bytes(link: int) -> int:
    """Return how much the other end of a Unix socket has not read, as the kernel counts it (``unix_ioctl``)."""
    try:
        (count,) = struct.unpack("i", fcntl.ioctl(link, termios.TIOCOUTQ, b"\0\0\0\0"))
    except OSError:  # its end is gone
        return 0
    return int(count)


def is_closed(link: int) -> bool:
    """Return whether the other end of a socket is closed, or shut down while forks hold it."""
    poll = select.poll()
    poll.register(link, 0)
    return bool(poll.poll(0))


def wake(task: int) -> None:
    """Signal a task's process, unless that would end it, as where the step's code has reset all handlers."""
    about = status(task)
    caught, pending = (int(about.get(name, "0"), 16) >> (SIGNAL - 1) & 1 for name in ("SigCgt", "ShdPnd"))
    if caught and not pending:  # a pending one is blocked in all threads, and the kernel would keep each
        send_signal(task, SIGNAL)
