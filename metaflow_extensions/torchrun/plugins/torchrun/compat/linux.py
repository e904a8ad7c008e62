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


def require_linux(what: str) -> None:
    """Raise `TorchrunConfigError` on another system; `what` can't run there. Submitting to a cluster works from macOS."""
    import platform

    from ..errors import TorchrunConfigError

    if (system := platform.system()) != "Linux":
        raise TorchrunConfigError(
            f"{what} needs Linux, but this machine has {system}: run the step on a cluster (--with kubernetes, "
            "--with batch), or run the flow in a Linux container."
        )
