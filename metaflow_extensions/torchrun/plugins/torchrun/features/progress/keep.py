"""Keeps the progress of a launch and the speed of each rank, on the control node."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...errors import TorchrunError
from ...gang.keepers import Happened, Keeper, Plain, Remarks, Where
from ...gang.protocol import Told
from ...gang.wire import from_plain
from ...records.series import Series
from .stragglers import Speeds, Stragglers, lines
from .told import MAX_KEYS, Metrics, Pace, Point

# How many points of a key are kept.
MAX_POINTS = 200
_LOOKS_EVERY_S = 5.0
# The ranks of a node are not compared after this long without a message from it.
_STALE_S = 20.0


@dataclass
class _Kept:
    """The values of rank 0 in one launch."""

    launch: int
    step: int | None = None
    farthest: int | None = None  # the highest step, before restarts as well
    total: float | None = None
    steps_per_s: float | None = None
    has_ended_well: bool = False
    last: dict[str, float | None] = field(default_factory=dict)  # value of each key
    series: dict[str, Series] = field(default_factory=dict)
    speeds: Series = field(default_factory=lambda: Series(MAX_POINTS, 5.0, "mean"))  # over the gang's seconds

    def add(self, key: str, point: Point) -> None:
        if key in self.series or len(self.series) < MAX_KEYS:
            self.series.setdefault(key, Series(MAX_POINTS, 1.0, "last")).add(point.step, point.value)
            self.last[key] = point.value

    @property
    def done(self) -> int | None:
        """The number of steps done. If steps count from 0, the last one is `total` - 1."""
        if self.has_ended_well and self.step is not None and self.step + 1 == self.total:
            return self.step + 1
        return self.step

    @property
    def left_s(self) -> float | None:
        """The estimated remaining seconds; None if unknown."""
        if self.total is None or self.step is None or not self.steps_per_s:
            return None
        return max(0.0, self.total - self.step) / self.steps_per_s


class ProgressKeeper(Keeper):
    """Keeps the progress of the last launch whose scripts have reported any."""

    def __init__(self) -> None:
        self._kept: _Kept | None = None
        self._paces: dict[int, tuple[float, Mapping[int, Pace]]] = {}  # node -> time of its report, and its ranks
        self._stragglers = Stragglers()
        self._looked_at = float("-inf")
        self._rates: dict[str, Any] | None = None

    def begin(self, launch: int, policy: Plain, at_s: float) -> None:
        """Forget the ranks' speeds and the stragglers."""
        self._paces, self._stragglers = {}, Stragglers()

    def handle(self, node: int, told: Told, at_s: float) -> None:
        """Keep a node's report on its ranks."""
        metrics = from_plain(Metrics, told.data, "progress")
        if self._kept is None or told.launch != self._kept.launch:
            self._kept, self._rates = _Kept(told.launch), None
        self._paces[node] = at_s, metrics.paces
        if node != 0:
            return
        kept, pace = self._kept, metrics.paces.get(0)
        kept.steps_per_s = None if pace is None else pace.steps_per_s
        kept.speeds.add(at_s, kept.steps_per_s)
        if metrics.step is not None:
            kept.step, kept.farthest = metrics.step, max(metrics.step, kept.farthest or 0)
        kept.total = kept.total if metrics.total is None else metrics.total
        for key, points in metrics.points.items():
            for point in points:
                kept.add(key, point)

    def done(self, launch: int) -> float | None:
        """Return the highest step that a script has reported."""
        return None if self._kept is None or self._kept.launch != launch else self._kept.farthest

    def ended(self, node: int, ok: bool) -> None:
        """Stop comparing the node's ranks."""
        self._paces.pop(node, None)
        if node == 0 and self._kept is not None:
            self._kept.steps_per_s, self._kept.has_ended_well = None, ok

    def tick(self, at_s: float, where: Callable[[int], Where]) -> Remarks:
        """Compare the ranks every 5 s; return those that have become slow or have recovered."""
        if at_s - self._looked_at < _LOOKS_EVERY_S:
            return Remarks()
        self._looked_at = at_s
        fresh = [paces for told_at, paces in self._paces.values() if at_s - told_at < _STALE_S]
        found = Speeds.of({rank: pace for paces in fresh for rank, pace in paces.items()})
        if not found.by_rank:
            return Remarks()
        changes = self._stragglers.judge(found, at_s)
        self._rates = self._stragglers.as_data(found, where)
        happened = [
            Happened("straggler" if each.is_slow else "recovered", where(each.rank).node, each.text, each.rank)
            for each in changes
        ]
        return Remarks(tuple(lines(changes, where)), tuple(happened))

    def record(self) -> Plain | None:
        """Return the progress, or None if no script has reported any."""
        kept = self._kept
        if kept is None:
            return None
        return {
            "launch": kept.launch,
            "step": kept.step,
            "done": kept.done,
            "total": kept.total,
            "steps_per_s": kept.steps_per_s,
            "left_s": kept.left_s,
            "last": dict(kept.last),
            "series": {key: [(int(x), value) for x, value in each.points] for key, each in kept.series.items()},
            "speeds": [(round(x, 1), value) for x, value in kept.speeds.points],
            "rates": self._rates,
        }

    def verdict(self, launch: int, to_control: bool, error: TorchrunError | None) -> Plain:
        """Return rank 0's last values."""
        return dict(self._kept.last) if self._kept is not None and self._kept.launch == launch else {}


PART = ProgressKeeper
