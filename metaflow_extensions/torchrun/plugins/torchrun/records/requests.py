"""What a command asks of a gang that runs, and the answer, as the datastore keeps them. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Request:
    """A question; it lies beside the records of the gang's attempt, and the control node looks for it."""

    id: str  # when it was asked (UTC), by whom, and something random
    time: float  # when, in seconds since 1970, by the clock of the machine that asks
    feature: str  # which feature answers
    data: dict[str, Any] = field(default_factory=dict)  # what it asks, as plain data


@dataclass(frozen=True)
class Answer:
    """What the gang has answered."""

    id: str  # of the request
    time: float  # when it was made, in seconds since 1970, by the control node's clock
    data: dict[str, Any] = field(default_factory=dict)  # of the feature, as plain data
