"""prctl(2) and fallocate(2) of Linux, of which Python does not offer what is needed here.

Nothing here raises: without ctypes (a Python built without libffi) or the function, a call does nothing and returns False.
"""

from __future__ import annotations

_PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>
_PUNCH_HOLE_KEEP_SIZE = 3  # <linux/falloc.h>


def adopt_orphans() -> bool:
    """Make this process the parent of every descendant whose own parent ends; return whether that worked.

    Without it, detached processes that have lost their parent are never ended.
    """
    return _call("prctl", _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def free_begin(file: int, size: int) -> bool:
    """Give the disk back so many first bytes of an open file, which then are zeros; return whether that worked.

    Size and offsets of the file stay, so who writes it notices nothing.
    """
    return _call("fallocate", file, _PUNCH_HOLE_KEEP_SIZE, 0, size)


def _call(name: str, first: int, *numbers: int) -> bool:
    try:
        import ctypes

        return bool(getattr(ctypes.CDLL(None), name)(first, *map(ctypes.c_long, numbers)) == 0)
    except (ImportError, OSError, AttributeError, TypeError):
        return False


def require_linux(what: str) -> None:
    """Raise `TorchrunConfigError` on another system; `what` can't run there. Submitting to a cluster works from macOS."""
    import platform

    from ..errors import TorchrunConfigError

    if (system := platform.system()) != "Linux":
        raise TorchrunConfigError(
            f"{what} needs Linux, but this machine has {system}: run the step on a cluster (--with kubernetes, "
            "--with batch), or run the flow in a Linux container."
        )
