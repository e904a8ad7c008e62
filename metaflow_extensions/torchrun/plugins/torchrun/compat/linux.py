"""prctl(2) of Linux, which Python does not offer.

A guardian imports this without Metaflow, and in a child between fork and exec. So nothing here raises: without ctypes
(a Python built without libffi), or without prctl, a call returns that nothing was done.
"""

from __future__ import annotations

import os
import signal
from typing import Any

_call: Any = None  # stays so on a system that is not Linux
try:
    import ctypes

    _call = ctypes.CDLL(None).prctl
except (ImportError, OSError, AttributeError, TypeError):
    pass

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37


def adopt_orphans() -> bool:
    """Become the parent of every descendant of this process whose own parent ends; return whether that was done.

    Without it nobody ends a process that has detached itself and lost its parent.
    """
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def adopts_orphans() -> bool:
    """Return whether this process is the parent of every descendant whose own parent ends."""
    if _call is None:
        return os.getpid() == 1
    is_subreaper = ctypes.c_int()
    return os.getpid() == 1 or (
        _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.addressof(is_subreaper)) and bool(is_subreaper.value)
    )


def die_with_parent() -> None:
    """Have the kernel send SIGTERM to this process when its parent ends; without it, it outlives a killed parent."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _prctl(option: int, value: int) -> bool:
    return _call is not None and bool(_call(option, ctypes.c_ulong(value), 0, 0, 0) == 0)
