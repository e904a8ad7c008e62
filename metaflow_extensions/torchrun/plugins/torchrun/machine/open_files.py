"""Open files: which one a descriptor refers to, and the limit of how many, for the connections of a gang."""

from __future__ import annotations

import math
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


def raise_limit(needed: int) -> None:
    """Raise the soft limit of open files for good if it is too low for so many connections, at most to the hard one.

    The limit is that of the supervisor alone. For a small gang it stays as it is. Can be repeated.
    """
    soft, hard = _limits()
    taken = _open_files() + _OWN
    if soft < taken + needed + _FEW_OTHERS:
        new = int(min(hard, taken + needed + _MANY_OTHERS))
        with suppress(ValueError, OSError):  # the kernel refuses; then fewer files can be open
            resource.setrlimit(resource.RLIMIT_NOFILE, (new, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def room_for_connections(needed: int, more: int) -> int:
    """Return how many connections there is room for: the needed, for which GangError is raised, and up to `more`."""
    raise_limit(needed)
    soft, hard = _limits()
    used = _open_files()
    places = min(soft - used - _OWN, needed + more)
    if places < needed:
        what = "1 connection" if needed == 1 else f"{needed} connections"
        raise GangError(
            f"The control node (host {socket.gethostname()}) needs {what}, one for each other node, but "
            f"its supervisor process may open {hard} files only (the hard limit, ulimit -Hn), of which {used} are open "
            f"and {_OWN} kept for its own. Raise it where the task's container or service is set up."
        )
    return int(places)


def _open_files() -> int:
    return len(os.listdir("/dev/fd"))


def _limits() -> tuple[float, float]:
    """Return the soft and the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    endless = resource.RLIM_INFINITY
    return math.inf if soft == endless else soft, math.inf if hard == endless else hard
