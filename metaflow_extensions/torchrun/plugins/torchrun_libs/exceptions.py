"""Where metaflow-torchrun 0.2 had its exceptions: its names for today's classes, for flows that catch them."""

from ..torchrun.errors import GangError, GangStartTimeout, TorchNotFoundError, TorchrunError

TorchrunException = TorchrunError
TorchNotInstalledException = TorchNotFoundError
BarrierTimeoutException = GangError
AllNodesStartupTimeoutException = GangStartTimeout

__all__ = [
    "AllNodesStartupTimeoutException",
    "BarrierTimeoutException",
    "TorchNotInstalledException",
    "TorchrunException",
]
