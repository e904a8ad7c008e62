"""What the guardian needs of Linux and Python does not offer; elsewhere it does nothing."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37


def adopt_orphans() -> None:
    """Become the parent of every descendant of this process whose own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def adopts_orphans() -> bool:
    """Tell whether this process is the parent of every descendant whose own parent ends."""
    is_subreaper = ctypes.c_int()
    _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.addressof(is_subreaper))
    return os.getpid() == 1 or bool(is_subreaper.value)


def die_with_parent() -> None:
    """Have the kernel send SIGTERM to this process when its parent ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def be_killed_with_parent() -> None:
    """As `die_with_parent`, but by SIGKILL."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)
