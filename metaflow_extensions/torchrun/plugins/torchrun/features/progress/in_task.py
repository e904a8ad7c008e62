"""``result.metrics`` and ``result.history``: what rank 0 has reported."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ...gang.wire import Plain
from ...launch.services import InTask, RunCall, Service


class Progress(InTask):
    """The progress of every launch."""

    def service(self, call: RunCall) -> Service:
        """Return what makes the field of the result."""
        return Metrics()


class Metrics(Service):
    """Rank 0's last values, and their curves."""

    def result(self, told: Plain, say: Callable[[str], None]) -> Mapping[str, Any]:
        """Return them."""
        last, history = told.get("last", {}), told.get("history", {})
        curves = {key: [(step, _number(value)) for step, value in points] for key, points in history.items()}
        return {"metrics": {key: _number(value) for key, value in last.items()}, "history": curves}


def _number(value: float | None) -> float:
    """Return a number that was reported; JSON has no NaN, so it came as None."""
    return math.nan if value is None else value


PART = Progress()
