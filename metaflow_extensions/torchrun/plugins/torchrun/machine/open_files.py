"""Room for many connections, without taking files from the step's own code.

A file keeps its number when the limit is lowered again. So the soft limit is raised for the moment in
which a connection is accepted, and the connection is moved to a number above the usual limit. The
step's code, its children and the workers see the limit they had; and code that calls ``select``, which
takes no number above 1023, still gets low ones.
"""

from __future__ import annotations

import fcntl
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ..errors import GangError

# What the step's own code may open besides, where the limit can't be raised.
_FOR_THE_STEP = 128


class OpenFiles:
    """Room for the connections that are needed, and for up to `more`. Raises GangError if the needed have no room."""

    def __init__(self, needed: int, more: int) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        endless = resource.RLIM_INFINITY
        most = soft + needed + more
        self._ceiling = soft if soft == endless else most if hard == endless else min(hard, most)
        used = len(os.listdir("/dev/fd"))
        free = most if soft == endless else max(0, soft - used - _FOR_THE_STEP) + self._ceiling - soft
        self.places = min(free, needed + more)  # how many connections there is room for
        if self.places < needed:
            raise GangError(
                f"The control node (host {socket.gethostname()}) needs {needed} connections, one for each other node, but "
                f"its task may open {hard} files only (the hard limit, ulimit -Hn), of which {used} are open and "
                f"{_FOR_THE_STEP} kept for the step's own. Raise it where the task's container or service is set up."
            )

    def accept(self, listening: socket.socket, most: int) -> list[socket.socket]:
        """Return connections that wait to be accepted, `most` at most; none if none waits or the system has no room."""
        accepted: list[socket.socket] = []
        # An error says that nobody waits any more, or that the system has no more files or memory.
        with limit_of_at_least(self._ceiling) as usual, suppress(OSError):
            while len(accepted) < most:
                accepted.append(self._moved(listening.accept()[0], usual))
        return accepted

    def _moved(self, sock: socket.socket, usual: int) -> socket.socket:
        if usual >= self._ceiling:
            return sock
        try:
            number = fcntl.fcntl(sock, fcntl.F_DUPFD_CLOEXEC, usual)
        except OSError:
            return sock  # no number is left up there
        with sock:
            return socket.socket(fileno=number)


@contextmanager
def limit_of_at_least(count: int) -> Iterator[int]:
    """Raise the soft limit of open files to `count` for a moment; yield what it usually is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY in (soft, count) or soft >= count:
        yield soft
        return
    with suppress(ValueError, OSError):  # over the hard limit, or the kernel refuses: then there is less room
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
    try:
        yield soft
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
