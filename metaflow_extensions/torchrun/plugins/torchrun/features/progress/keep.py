"""Keeps the progress of a launch and the speed of each rank, on the control node."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ...errors import TorchrunError
from ...gang.keepers import Happened, Keeper, Plain, Remarks, Where
from ...gang.messages import Report
from ...gang.wire import from_plain
from ...records.series import Series
from .said import said, step
from .stragglers import Speeds, Stragglers, lines
from .told import MAX_KEYS, Metrics, Pace, Point

# How many points of a key are kept.
MAX_POINTS = 200
_LOOKS_EVERY_S = 5.0
# The log gets its first line this long after the first report, when the speed is known, and then at most one a minute.
FIRST_LINE_S, LINES_EVERY_S = 10.0, 60.0
# The ranks of a node are not compared after this long without a message from it.
_STALE_S = 20.0


@dataclass
class _Kept:
    """The values of rank 0 in one launch."""

    launch: int
    node: int | None = None  # that has rank 0
    step: int | None = None
    total: float | None = None
    steps_per_s: float | None = None
    has_ended_well: bool = False
    has_news: bool = False  # since the last line in the log
    place_in_log: str | None = None  # the step in the last line, as `said.step` has it
    last: dict[str, float | None] = field(default_factory=dict)  # value of each key
    series: dict[str, Series] = field(default_factory=dict)
    speeds: Series = field(default_factory=lambda: Series(MAX_POINTS, 5.0, "mean"))  # over the gang's seconds

    def add(self, key: str, point: Point) -> None:
        if key in self.series or len(self.series) < MAX_KEYS:
            self.series.setdefault(key, Series(MAX_POINTS, 1.0, "last")).add(point.step, point.value)
            self.last[key] = point.value

    def take(self, metrics: Metrics, at_s: float) -> None:
        """Keep what the node of rank 0 has reported."""
        pace = metrics.paces.get(0)
        self.steps_per_s = None if pace is None else pace.steps_per_s
        self.speeds.add(at_s, self.steps_per_s)
        self.has_news |= bool(metrics.points) or metrics.step not in (None, self.step)
        if metrics.step is not None:
            self.step = metrics.step
        self.total = self.total if metrics.total is None else metrics.total
        for key, points in metrics.points.items():
            for point in points:
                self.add(key, point)

    @property
    def history(self) -> dict[str, list[tuple[int, float | None]]]:
        """The points of each key, as (step, value)."""
        return {key: [(int(x), value) for x, value in each.points] for key, each in self.series.items()}

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

    @classmethod
    def of(cls, num_nodes: int) -> Keeper:
        """Return the keeper of a gang."""
        return cls(is_alone=num_nodes == 1)

    def __init__(self, is_alone: bool = False) -> None:
        self._is_alone = is_alone  # whether the gang has one node
        self._kept: _Kept | None = None
        self._paces: dict[int, tuple[float, Mapping[int, Pace]]] = {}  # node -> time of its report, and its ranks
        self._stragglers = Stragglers()
        self._looked_at = float("-inf")
        self._says_at = 0.0  # when the log gets its next line
        self._rates: dict[str, Any] | None = None

    def begin(self, launch: int, policy: Plain, at_s: float) -> None:
        """Forget the ranks' speeds, the stragglers, and what is not said yet."""
        self._paces, self._stragglers = {}, Stragglers()
        if self._kept is not None:
            self._kept.has_news, self._kept.steps_per_s = False, None
            if launch != self._kept.launch:
                self._kept.node = None  # what ends from now on is not its launch
            else:
                self._kept.has_ended_well, self._rates = False, None

    def handle(self, node: int, told: Report, at_s: float) -> Remarks | None:
        """Keep a node's report on its ranks; rank 0's first one of a launch is an event, so that all who look see it soon."""
        metrics = from_plain(Metrics, told.data, "progress")
        if self._kept is None or told.launch != self._kept.launch:
            self._kept, self._rates = _Kept(told.launch), None
        self._paces[node] = at_s, metrics.paces
        kept = self._kept
        is_first = metrics.has_rank_0 and kept.node is None
        if metrics.has_rank_0:
            kept.node = node
        if node == kept.node:
            kept.take(metrics, at_s)
        if not is_first:
            return None
        self._says_at = at_s + FIRST_LINE_S
        return Remarks(happened=(Happened("progress", node, said(self.record() or {}), rank=0),))

    def ended(self, node: int, ok: bool) -> Remarks | None:
        """Stop comparing the node's ranks. A log that has told of the progress ends with the last step."""
        self._paces.pop(node, None)
        kept = self._kept
        if kept is None or node != kept.node:
            return None
        kept.steps_per_s, kept.has_ended_well = None, ok
        is_told = kept.place_in_log in (None, step(self.record() or {}))
        return None if is_told else Remarks((self._line(kept),))

    def tick(self, at_s: float, where: Callable[[int], Where]) -> Remarks:
        """Say once a minute how far rank 0 is, and what `_compare` finds."""
        found, kept = self._compare(at_s, where), self._kept
        if kept is None or not kept.has_news or at_s < self._says_at:
            return found
        self._says_at = at_s + LINES_EVERY_S
        return replace(found, lines=(self._line(kept), *found.lines))

    def _line(self, kept: _Kept) -> str:
        """Return a line for the log."""
        progress = self.record() or {}
        kept.has_news, kept.place_in_log = False, step(progress)
        return said(progress)

    def _compare(self, at_s: float, where: Callable[[int], Where]) -> Remarks:
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
        return Remarks(tuple(lines(changes, where, self._is_alone)), tuple(happened))

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
            "series": kept.history,
            "speeds": [(round(x, 1), value) for x, value in kept.speeds.points],
            "rates": self._rates,
        }

    def verdict(self, launch: int, to_control: bool, error: TorchrunError | None) -> Plain:
        """Return what rank 0 has reported last, and to the control node all points that are kept."""
        kept = self._kept
        if kept is None or kept.launch != launch:
            return {}
        total = int(kept.total) if kept.total is not None and kept.total.is_integer() else kept.total
        place = {key: value for key, value in (("step", kept.step), ("total", total)) if value is not None}
        return {"last": {**place, **kept.last}, "history": kept.history if to_control else {}}


PART = ProgressKeeper
