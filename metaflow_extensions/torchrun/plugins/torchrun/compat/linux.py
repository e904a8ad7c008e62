"""prctl(2) of Linux, which Python does not offer."""

from __future__ import annotations

_PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>


def adopt_orphans() -> bool:
    """Make this process the parent of every descendant whose own parent ends; return whether that worked.

    Without it, detached processes that have lost their parent are never ended. A Python built without libffi has no
    ctypes.
    """
    try:
        import ctypes

        return bool(ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, *map(ctypes.c_long, (1, 0, 0, 0))) == 0)
    except (ImportError, OSError, AttributeError, TypeError):
        return False
