"""What the guardian needs of Linux and Python does not offer; elsewhere it does nothing."""

from __future__ import annotations

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_PR_SET_CHILD_SUBREAPER = 36
_IS_LINUX = sys.platform == "linux"


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """Become the parent of every descendant of this process whose own parent ends."""
    if _IS_LINUX:
        _libc().prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent() -> None:
    """Have the kernel send SIGTERM to this process when its parent ends."""
    if _IS_LINUX:
        _libc().prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
