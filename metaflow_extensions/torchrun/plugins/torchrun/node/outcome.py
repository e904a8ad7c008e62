"""How a launch has ended on this node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..gang.messages import Verdict


@dataclass(frozen=True)
class Outcome:
    """How a launch has ended on this node: plain data, from the supervisor to its task."""

    verdict: Verdict
    command: str  # of the last generation, quoted for a shell
    exit_codes: dict[int, int]  # of its workers, by global rank
    restarts: tuple[dict[str, Any], ...]
    duration_s: float
