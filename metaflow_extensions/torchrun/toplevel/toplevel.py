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
from ..plugins.torchrun.executor import TorchrunSingleNodeMultiGPU
from ..plugins.torchrun.result import TorchrunResult

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
