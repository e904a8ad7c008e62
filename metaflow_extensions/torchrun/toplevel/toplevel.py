"""The names this extension offers as ``from metaflow import ...``."""

from ..plugins.torchrun.errors import (
    EntrypointError,
    GangError,
    GangStartTimeout,
    LaunchFailed,
    LaunchTimeout,
    TorchNotFoundError,
    TorchrunConfigError,
    TorchrunError,
    TorchrunTerminated,
)
from ..plugins.torchrun.executor import TorchrunSingleNodeMultiGPU
from ..plugins.torchrun.result import TorchrunResult

__mf_extensions__ = "torchrun"

__all__ = [
    "EntrypointError",
    "GangError",
    "GangStartTimeout",
    "LaunchFailed",
    "LaunchTimeout",
    "TorchNotFoundError",
    "TorchrunConfigError",
    "TorchrunError",
    "TorchrunResult",
    "TorchrunSingleNodeMultiGPU",
    "TorchrunTerminated",
]
