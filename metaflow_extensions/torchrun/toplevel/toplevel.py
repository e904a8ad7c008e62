"""The names this extension offers as ``from metaflow import ...``."""

from ..plugins.torchrun.errors import (
    EntrypointError,
    GangError,
    GangStartTimeout,
    LaunchFailed,
    LaunchHung,
    LaunchTimeout,
    TorchNotFoundError,
    TorchrunConfigError,
    TorchrunError,
    TorchrunPreempted,
    WorkerFailed,
)
from ..plugins.torchrun.result import TorchrunResult
from ..plugins.torchrun.single_node import TorchrunSingleNodeMultiGPU

# Metaflow shows both in its own version.
__mf_extensions__ = "torchrun"
__version__ = "0.3.0"

__all__ = [
    "EntrypointError",
    "GangError",
    "GangStartTimeout",
    "LaunchFailed",
    "LaunchHung",
    "LaunchTimeout",
    "TorchNotFoundError",
    "TorchrunConfigError",
    "TorchrunError",
    "TorchrunPreempted",
    "TorchrunResult",
    "TorchrunSingleNodeMultiGPU",
    "WorkerFailed",
]
