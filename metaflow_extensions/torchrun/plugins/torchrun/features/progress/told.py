"""The message with which a node reports its ranks' progress. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

# This many keys of rank 0 are kept: the first ones.
MAX_KEYS = 20


@dataclass(frozen=True)
class Point:
    """A value of rank 0."""

    step: int
    value: float | None  # None: a number that is not finite


@dataclass(frozen=True)
class Pace:
    """The speed of one rank."""

    step: int  # the last one that it has reported
    steps_per_s: float | None = None  # over the last seconds; None if not known yet
    seconds: float | None = None  # duration of a step without waiting for others, if the script reports it


@dataclass(frozen=True)
class Metrics:
    """The progress of one node's scripts. It is sent every 5 s if they report any, and at the end."""

    paces: dict[int, Pace] = field(default_factory=dict)  # by global rank; only ranks that still run
    points: dict[str, tuple[Point, ...]] = field(default_factory=dict)  # new values of rank 0, by key
    step: int | None = None  # rank 0's last
    total: float | None = None  # rank 0's number of steps

    @property
    def has_rank_0(self) -> bool:
        """Whether rank 0 is on this node, and has reported anything."""
        return 0 in self.paces or bool(self.points) or self.step is not None
