"""The message with which a node reports its ranks' progress. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

# How many keys of rank 0 are kept, those that came first.
MAX_KEYS = 20


@dataclass(frozen=True)
class Point:
    """A value of rank 0."""

    step: int
    value: float | None  # None: a number that is not finite


@dataclass(frozen=True)
class Pace:
    """How fast one rank is."""

    step: int  # the last one that it has told of
    steps_per_s: float | None = None  # over the last part of a minute; None where that is not known yet
    seconds: float | None = None  # that a step takes without waiting for others, where the script says so


@dataclass(frozen=True)
class Metrics:
    """The progress of one node's scripts; sent every 5 s if they report any, and at the end."""

    paces: dict[int, Pace] = field(default_factory=dict)  # global rank -> how fast it is; only those that still run
    points: dict[str, tuple[Point, ...]] = field(default_factory=dict)  # what is new of rank 0, by key
    step: int | None = None  # rank 0's last
    total: float | None = None  # at which step rank 0 will be done
