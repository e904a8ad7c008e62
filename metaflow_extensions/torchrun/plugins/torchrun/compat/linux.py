"""prctl(2) and fallocate(2) of Linux, of which Python does not offer what is needed here.

Nothing here raises: without ctypes (a Python built without libffi) or the function, a call does nothing and returns False.
"""

from __future__ import annotations

from typing import Any

_call: Any = None  # remains None on other systems than Linux
_allocate: Any = None
try:
    import ctypes

    _libc = ctypes.CDLL(None)
    _call = _libc.prctl
    _allocate = getattr(_libc, "fallocate", None)  # without it, prctl must still be there
except (ImportError, OSError, AttributeError, TypeError):
    pass

_PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>
_PUNCH_HOLE_KEEP_SIZE = 3  # <linux/falloc.h>


def adopt_orphans() -> bool:
    """Make this process the parent of every descendant whose own parent ends; return whether that worked.

    Without it, detached processes that have lost their parent are never ended.
    """
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> bool:
    return _call is not None and bool(_call(option, ctypes.c_ulong(value), 0, 0, 0) == 0)


def free_begin(file: int, size: int) -> bool:
    """Give the disk back so many first bytes of an open file, which then are zeros; return whether that worked.

    Size and offsets of the file stay, so who writes it notices nothing.
    """
    if _allocate is None:
        return False
    return bool(_allocate(file, _PUNCH_HOLE_KEEP_SIZE, ctypes.c_long(0), ctypes.c_long(size)) == 0)
