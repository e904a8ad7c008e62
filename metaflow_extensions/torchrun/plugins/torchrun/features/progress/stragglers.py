"""Finds the ranks that are much slower than the others. Pure.

A rank becomes a straggler after a minute below half the median speed of all ranks. It recovers after a minute above
that. At least three ranks are needed: of two, neither is the normal one.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ...gang.keepers import Where
from ...gang.texts import names
from .told import Pace

# A straggler is slower than this share of the median speed, for this long.
SLOW = 0.5
SLOW_S = 60.0
_FEWEST = 3
# If more ranks change at once, one line lists them.
_LINES = 4

By = Literal["steps_per_s", "seconds"]


def speed_text(speed: float, by: str) -> str:
    """Return a speed in words; all are steps a second."""
    if by == "seconds":
        return f"{1 / speed:.2g} s of own work a step"
    return f"{speed:.2g} steps/s" if speed < 100 else f"{speed:.0f} steps/s"


@dataclass(frozen=True)
class Speeds:
    """The speeds of all ranks."""

    by: By  # what was compared
    by_rank: Mapping[int, float]  # steps a second; by `seconds`: as if the rank never waited

    @staticmethod
    def of(paces: Mapping[int, Pace]) -> Speeds:
        """Return the speeds of ranks: from their `seconds` if all ranks report these, else in steps a second."""
        known = [pace for pace in paces.values() if pace.seconds or pace.steps_per_s is not None]
        seconds = {rank: 1 / pace.seconds for rank, pace in paces.items() if pace.seconds}
        if seconds and len(seconds) == len(known):
            return Speeds("seconds", seconds)
        return Speeds("steps_per_s", {r: pace.steps_per_s for r, pace in paces.items() if pace.steps_per_s is not None})

    @property
    def median(self) -> float:
        """The median speed."""
        return statistics.median(self.by_rank.values())


@dataclass(frozen=True)
class Change:
    """A rank has become a straggler, or has recovered."""

    rank: int
    is_slow: bool
    speed: float
    text: str  # follows the rank's name


def lines(changes: Sequence[Change], where: Callable[[int], Where], is_alone: bool = False) -> list[str]:
    """Return the lines of the log about changes, of a gang that may have one node."""
    found: list[str] = []
    for is_slow, of_many in ((True, "have become slow: under half of the median"), (False, "are no longer slow")):
        alike = [change for change in changes if change.is_slow is is_slow]
        if len(alike) > _LINES:
            found.append(f"{names((change.rank for change in alike), 'rank')} {of_many}")
            continue
        for change in alike:
            place = where(change.rank)
            node = "" if is_alone else f" (node {place.node}, host {place.host})"
            found.append(f"rank {change.rank}{node} {change.text}")
    return found


class Stragglers:
    """The stragglers among all ranks since the last start of the workers."""

    def __init__(self) -> None:
        self._turned_at: dict[int, float] = {}  # rank -> when its state last differed from the reported one
        self._slow: dict[int, Change] = {}
        self._by: By = "steps_per_s"

    def judge(self, speeds: Speeds, now: float) -> list[Change]:
        """Handle the current speeds; return the changes to report."""
        if speeds.by != self._by or len(speeds.by_rank) < _FEWEST:
            self._turned_at = {}
        if speeds.by != self._by:
            self._by, self._slow = speeds.by, {}
        self._slow = {rank: change for rank, change in self._slow.items() if rank in speeds.by_rank}
        self._turned_at = {rank: at for rank, at in self._turned_at.items() if rank in speeds.by_rank}
        if len(speeds.by_rank) < _FEWEST:
            return []
        changes, median = [], speeds.median
        for rank, speed in speeds.by_rank.items():
            is_slow = speed < median * SLOW
            if is_slow == (rank in self._slow):
                self._turned_at.pop(rank, None)
            elif now - self._turned_at.setdefault(rank, now) >= SLOW_S:
                own, of_all = speed_text(speed, speeds.by), speed_text(median, speeds.by)
                said = "slow" if is_slow else "no longer slow"
                changes.append(Change(rank, is_slow, speed, f"is {said}: {own}, the median is {of_all}"))
        for change in changes:
            del self._turned_at[change.rank]
            if change.is_slow:
                self._slow[change.rank] = change
            else:
                del self._slow[change.rank]
        return changes

    def as_data(self, speeds: Speeds, where: Callable[[int], Where]) -> dict[str, Any]:
        """Return the current speeds and the stragglers as plain data."""
        slowest = min(speeds.by_rank, key=lambda rank: speeds.by_rank[rank])
        slow = self._slow.items()
        return {
            "by": speeds.by,
            "ranks": len(speeds.by_rank),
            "median": speeds.median,
            "slowest": {"rank": slowest, "node": where(slowest).node, "speed": speeds.by_rank[slowest]},
            "stragglers": [
                {"rank": rank, "node": where(rank).node, "speed": each.speed, "text": each.text} for rank, each in slow
            ],
        }
