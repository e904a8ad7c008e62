"""Open files: which one a descriptor refers to, and the limit of how many, for the connections of a gang."""

from __future__ import annotations

import os
import resource
import socket
from contextlib import suppress

from ..errors import GangError

_OWN = 128  # what a supervisor may open besides
_FEW_OTHERS, _MANY_OTHERS = 256, 2048  # other connections than those of the nodes: at least, and if the limit is raised


def file_of(fd: int) -> tuple[int, int] | None:
    """Return which file a descriptor refers to; None for one that is closed."""
    with suppress(OSError):
        status = os.fstat(fd)
        return status.st_dev, status.st_ino
    return None


def room_for_connections(needed: int, more: int) -> int:
    """Return how many connections there is room for: the needed, for which GangError is raised, and up to `more`.

    The soft limit of open files is raised if it is too low for them, at most to the hard one. For a small gang it stays.
    """
    used = len(os.listdir("/dev/fd"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = used + _OWN
    if soft < taken + needed + _FEW_OTHERS:
        with suppress(ValueError, OSError):  # the kernel refuses; then fewer files can be open
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, taken + needed + _MANY_OTHERS), hard))
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    places = min(soft - taken, needed + more)
    if places < needed:
        raise GangError(
            f"The control node (host {socket.gethostname()}) needs {needed} connections, one for each other node, but "
            f"its supervisor process may open {hard} files only (the hard limit, ulimit -Hn), of which {used} are open "
            f"and {_OWN} kept for its own. Raise it where the task's container or service is set up."
        )
    return places
