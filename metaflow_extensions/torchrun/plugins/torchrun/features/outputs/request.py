"""What ``run(outputs=..., outputs_from=...)`` asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import TorchrunConfigError
from ...gang.protocol import CONTROL
from ...settings import argument


@dataclass(frozen=True)
class OutputRequest:
    """Which files of which nodes are to be stored when the workers have ended."""

    patterns: tuple[str, ...]  # relative to the workers' working directory
    whose: str  # out of `parsing.OUTPUTS_FROM`

    def is_of(self, node: int) -> bool:
        """Tell whether files of a node are stored."""
        return self.whose == "all" or node == CONTROL


def output_request(given: Mapping[str, Any]) -> OutputRequest | None:
    """Return what the arguments of `run` ask for; None where that is nothing."""
    whose = given.get("outputs_from")
    if given.get("outputs") is not None:
        return OutputRequest(argument("outputs", given), argument("outputs_from", given) or "control")
    if whose is not None:
        raise TorchrunConfigError(f"run(outputs_from={whose!r}) says whose outputs to store, but outputs names none.")
    return None
