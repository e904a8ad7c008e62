"""How far a launch is, and how fast each rank is: what scripts tell of it, as the control node keeps it. Pure.

The gang's thread calls `take` and `look`. Any thread may call `as_dict`: it copies what the gang's thread replaces or
appends to, each in one step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...gang.keepers import Where
from .stragglers import Change, Speeds, Stragglers
from .told import MAX_KEYS, Metrics, Pace

# How many points of a key are kept; when there are more, every second goes.
MAX_POINTS = 400
_LOOKS_EVERY_S = 5.0
# After so long without news, a node's ranks are compared no more.
_STALE_S = 20.0


class Series:
    """The points of one key by step; of a long life fewer, as evenly spread as they came."""

    def __init__(self) -> None:
        self._points: list[tuple[int, float | None]] = []
        self._gap = 0.0  # steps from one point to the next, but for the last

    def add(self, step: int, value: float | None) -> None:
        """Add a point; it takes the place of those at the same step and later, as after a restart."""
        points = self._points
        while points and points[-1][0] >= step:
            points.pop()
        if len(points) > 1 and points[-1][0] - points[-2][0] < self._gap:
            points[-1] = (step, value)
        else:
            points.append((step, value))
        if len(points) > MAX_POINTS:
            self._gap = (step - points[0][0]) / (MAX_POINTS // 2)
            self._points = [*points[:-1:2], points[-1]]

    @property
    def points(self) -> list[tuple[int, float | None]]:
        """All that are kept, in order."""
        return list(self._points)


class Progress:
    """What the scripts of one launch have told; where none tells anything, it stays empty."""

    def __init__(self, launch: int = -1) -> None:
        self.launch = launch
        self.count = 0  # of the messages that were taken
        self.last: dict[str, float | None] = {}  # rank 0's last value of each key
        self._series: dict[str, Series] = {}
        self._step: int | None = None
        self._total: float | None = None
        self._counts_from_0 = False  # known from the first start of the workers on
        self._paces: dict[int, tuple[float, Mapping[int, Pace]]] = {}  # node -> when it told, and its ranks
        self._stragglers = Stragglers()
        self._looked_at = float("-inf")
        self._rates: dict[str, Any] | None = None
        self._rate: float | None = None  # of rank 0

    def begin(self) -> None:
        """Take note that all workers start again."""
        self._paces.clear()
        self._stragglers.forget()

    def take(self, node: int, metrics: Metrics, now: float) -> None:
        """Take what a node tells of its ranks."""
        self.count += 1
        self._paces[node] = (now, metrics.paces)
        if node == 0:
            self._take_points(metrics)
            pace = metrics.paces.get(0)
            self._rate = None if pace is None else pace.steps_per_s
            self._step = self._step if pace is None else pace.step

    def _take_points(self, metrics: Metrics) -> None:
        self._total = self._total if metrics.total is None else metrics.total
        self._counts_from_0 |= metrics.counts_from_0
        for point in metrics.points:
            self._step = point.step
            for key, value in point.values.items():
                if key in self._series or len(self._series) < MAX_KEYS:
                    self._series.setdefault(key, Series()).add(point.step, value)
                    self.last[key] = value

    def forget(self, node: int, ended_well: bool) -> None:
        """Take note that a node's workers have ended: they are compared no more."""
        self._paces.pop(node, None)
        if node == 0:
            self._rate = None
            # A script that has gone on from a checkpoint tells no step 0.
            is_one_short = self._step is not None and self._total is not None and self._step == self._total - 1
            self._counts_from_0 |= ended_well and is_one_short

    def look(self, now: float, where: Callable[[int], Where]) -> list[Change]:
        """Compare the ranks, every 5 s; return which have become stragglers, or are none any more."""
        if not self._paces or now - self._looked_at < _LOOKS_EVERY_S:
            return []
        self._looked_at = now
        found = Speeds.of({rank: pace for at, paces in list(self._paces.values()) if now - at < _STALE_S
                           for rank, pace in paces.items()})  # fmt: skip
        if not found.by_rank:
            return []
        changes = self._stragglers.judge(found, now)
        self._rates = {**found.as_dict(where), "stragglers": self._stragglers.as_list(where)}
        return changes

    @property
    def done(self) -> int | None:
        """How many steps rank 0 has done."""
        if self._step is None:
            return None
        is_last = self._total is not None and self._step >= self._total  # then step 0 came before the first
        return self._step + (self._counts_from_0 and not is_last)

    @property
    def left_s(self) -> float | None:
        """How long it will take at rank 0's speed; None where that can't be told."""
        total, done, rate = self._total, self.done, self._rate  # the gang's thread may change them meanwhile
        return None if total is None or done is None or not rate else max(0.0, total - done) / rate

    def as_dict(self) -> dict[str, Any] | None:
        """Return all of it as plain data; None where no script has told anything."""
        if not self.count:
            return None
        return {
            "launch": self.launch,
            "step": self._step,
            "done": self.done,
            "total": self._total,
            "steps_per_s": self._rate,
            "left_s": self.left_s,
            "last": dict(self.last),
            "series": {key: series.points for key, series in dict(self._series).items()},
            "rates": self._rates,
        }
