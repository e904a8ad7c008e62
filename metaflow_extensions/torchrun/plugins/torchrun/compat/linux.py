"""prctl(2) of Linux, which Python does not offer.

Nothing here raises: without ctypes (a Python built without libffi) or prctl, a call does nothing and returns False.
"""

from __future__ import annotations

from typing import Any

_call: Any = None  # remains None on other systems than Linux
try:
    import ctypes

    _call = ctypes.CDLL(None).prctl
except (ImportError, OSError, AttributeError, TypeError):
    pass

_PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>


def adopt_orphans() -> bool:
    """Make this process the parent of every descendant whose own parent ends; return whether that worked.

    Without it, detached processes that have lost their parent are never ended.
    """
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> bool:
    return _call is not None and bool(_call(option, ctypes.c_ulong(value), 0, 0, 0) == 0)
