"""Which ranks are much slower than the others, and since when. Pure.

A rank is a straggler when it was slower than half the median of all ranks for a minute, and none any more when it was
not for a minute. Two ranks are not compared: of those nobody could say which one is normal.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ...gang.keepers import Where
from ...gang.texts import names
from .told import Pace

# So much slower than the median, and for so long, is a straggler.
SLOW = 0.5
SLOW_S = 60.0
_FEWEST = 3
# Of more ranks at once a line names them only.
_LINES = 4

By = Literal["steps_per_s", "seconds"]


@dataclass(frozen=True)
class Speeds:
    """How fast all ranks are."""

    by: By  # what was compared
    by_rank: Mapping[int, float]  # steps a second; of `seconds` how many steps that would be without waiting

    @staticmethod
    def of(paces: Mapping[int, Pace]) -> Speeds:
        """Return the speeds of ranks: by their own seconds for a step, where all say them, else by steps a second."""
        known = [pace for pace in paces.values() if pace.seconds or pace.steps_per_s is not None]
        seconds = {rank: 1 / pace.seconds for rank, pace in paces.items() if pace.seconds}
        if seconds and len(seconds) == len(known):
            return Speeds("seconds", seconds)
        return Speeds("steps_per_s", {r: pace.steps_per_s for r, pace in paces.items() if pace.steps_per_s is not None})

    @property
    def median(self) -> float:
        """The speed of the rank in the middle."""
        return statistics.median(self.by_rank.values())

    def as_dict(self, where: Callable[[int], Where]) -> dict[str, Any]:
        """Return it as plain data."""
        slowest = min(self.by_rank, key=lambda rank: self.by_rank[rank])
        return {
            "by": self.by,
            "ranks": len(self.by_rank),
            "median": self.median,
            "slowest": {"rank": slowest, "node": where(slowest).node, "speed": self.by_rank[slowest]},
        }


@dataclass(frozen=True)
class Change:
    """A rank has become a straggler, or is none any more."""

    rank: int
    is_slow: bool
    speed: float
    median: float
    by: By

    @property
    def text(self) -> str:
        """The same in words, after the rank's name."""
        if self.by == "steps_per_s":
            own, of_all = f"{self.speed:.2g} steps/s", f"{self.median:.2g}"
        else:
            own, of_all = f"{1 / self.speed:.2g} s for a step without waiting", f"{1 / self.median:.2g} s"
        return f"is {'slow' if self.is_slow else 'no longer slow'}: {own}, the median is {of_all}"


def lines(changes: Iterable[Change], where: Callable[[int], Where]) -> list[str]:
    """Return what the log says of changes."""

    def line(change: Change) -> str:
        place = where(change.rank)
        return f"rank {change.rank} (node {place.node}, host {place.host}) {change.text}"

    found: list[str] = []
    changes = list(changes)
    for is_slow in (True, False):
        alike = [change for change in changes if change.is_slow is is_slow]
        if len(alike) <= _LINES:
            found += map(line, alike)
        else:
            what = "have become slow: under half of the median" if is_slow else "are no longer slow"
            found.append(f"{names((change.rank for change in alike), 'rank')} {what}")
    return found


class Stragglers:
    """Follows the speeds of all ranks."""

    def __init__(self) -> None:
        self._turned_at: dict[int, float] = {}  # rank -> since when it is otherwise than was said of it
        self._slow: dict[int, Change] = {}
        self._by: By = "steps_per_s"

    def forget(self) -> None:
        """Begin anew, as when all workers start again; nothing is said of those that were slow."""
        self._turned_at.clear()
        self._slow = {}

    def judge(self, speeds: Speeds, now: float) -> list[Change]:
        """Take the speeds of now; return what has to be said."""
        if speeds.by != self._by:
            self._by = speeds.by
            self.forget()
        self._slow = {rank: change for rank, change in self._slow.items() if rank in speeds.by_rank}
        self._turned_at = {rank: at for rank, at in self._turned_at.items() if rank in speeds.by_rank}
        if len(speeds.by_rank) < _FEWEST:
            self._turned_at.clear()
            return []
        limit, changes = speeds.median * SLOW, []
        for rank, speed in speeds.by_rank.items():
            is_slow = speed < limit
            if is_slow == (rank in self._slow):
                self._turned_at.pop(rank, None)
            elif now - self._turned_at.setdefault(rank, now) >= SLOW_S:
                changes.append(Change(rank, is_slow, speed, speeds.median, speeds.by))
        self._apply(changes)
        return changes

    def _apply(self, changes: list[Change]) -> None:
        slow = dict(self._slow)  # anew, since other threads read it
        for change in changes:
            del self._turned_at[change.rank]
            if change.is_slow:
                slow[change.rank] = change
            else:
                del slow[change.rank]
        self._slow = slow

    def as_list(self, where: Callable[[int], Where]) -> list[dict[str, Any]]:
        """Return those that are slow now as plain data."""
        return [
            {"rank": rank, "node": where(rank).node, "speed": change.speed, "text": change.text}
            for rank, change in self._slow.items()
        ]
