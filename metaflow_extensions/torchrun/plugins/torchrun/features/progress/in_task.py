"""``result.metrics``: what rank 0 has reported last."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ...gang.keepers import Plain
from ...launch.services import InTask, RunCall, Service


class Progress(InTask):
    """The progress of every launch."""

    def service(self, call: RunCall) -> Service:
        """Return what makes the field of the result."""
        return Metrics()


class Metrics(Service):
    """Rank 0's last values."""

    def result(self, told: Plain, say: Callable[[str], None]) -> Mapping[str, Any]:
        """Return them; JSON has no NaN, so it came as None."""
        return {"metrics": {key: math.nan if value is None else value for key, value in told.items()}}


PART = Progress()
