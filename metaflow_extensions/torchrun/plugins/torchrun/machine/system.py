"""Which systems nodes run on."""

import platform

from ..errors import TorchrunConfigError


def require_linux(what: str) -> None:
    """Raise `TorchrunConfigError` on another system; `what` can't run there. Submitting to a cluster works from macOS."""
    if (system := platform.system()) != "Linux":
        raise TorchrunConfigError(
            f"{what} needs Linux, but this machine has {system}: run the step on a cluster (--with kubernetes, "
            "--with batch), or run the flow in a Linux container."
        )
