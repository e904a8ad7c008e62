"""What waits for the kernel, and starts threads, whatever the step's code does.

``gevent.monkey.patch_all()`` there replaces these names in their modules (26.9). What it puts there switches to other
greenlets, which can't be in a signal handler, and does not wait for what a real thread does. These names stay what they were.
"""

from _socket import socket, socketpair
from _thread import LockType, allocate_lock, get_ident, start_new_thread
from select import poll
from time import sleep

__all__ = [
    "Flag",
    "LockType",
    "allocate_lock",
    "get_ident",
    "poll",
    "sleep",
    "socket",
    "socketpair",
    "start_new_thread",
]


class Flag:
    """As `threading.Event`, which is made of locks that may have been replaced; it is set once."""

    def __init__(self) -> None:
        self._lock = allocate_lock()
        self._lock.acquire()

    def set(self) -> None:
        """Set it; any thread may call this."""
        self._lock.release()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it is set, or for so long; return whether it is. One thread waits."""
        return self._lock.acquire(timeout=-1 if seconds is None else max(0.0, seconds))
