"""What rank 0 has reported of a launch, how fast the ranks are, and which are slow. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ..texts import duration, names
from .limits import FIRST_LINE_S, LINES_EVERY_S, LOOKS_EVERY_S, SLOW_S, STALE_S
from .wire import from_plain

MAX_KEYS, MAX_POINTS = 20, 200
"""How many keys of rank 0 are kept, the first ones, and how many points of each."""
_VALUES = 4  # in one line of the log
Point: TypeAlias = tuple[int, float | None]
"""A step and a value; None: it is no number, or not finite."""
_SLOW, _FEWEST = 0.5, 3  # a share of the median; of fewer ranks, none is the normal one


class Series:
    """At most `most` points with growing steps, spread over all steps that there were. A value of None is a gap."""

    def __init__(self, most: int) -> None:
        self._most, self._apart = most, 1.0  # the least distance between two points, but for the last
        self.points: list[Point] = []

    def add(self, step: int, value: float | None) -> None:
        """Add a point. It replaces the points at the same step and later: after a restart, steps are done again."""
        points = self.points
        while points and points[-1][0] >= step:
            points.pop()
        if len(points) > 1 and points[-1][0] - points[-2][0] < self._apart:
            points.pop()
        points.append((step, value))
        if len(points) > self._most:
            self._apart = 2 * (step - points[0][0]) / self._most
            del points[1:-1:2]


@dataclass(frozen=True)
class Pace:
    """The speed of one rank."""

    steps_per_s: float | None = None  # over the last seconds; None if not known yet
    seconds: float | None = None  # duration of a step without waiting for others, if the script reports it


@dataclass(frozen=True)
class Metrics:
    """The progress of one node's scripts. It is sent every 5 s if they report any, and at the end."""

    paces: dict[int, Pace] = field(default_factory=dict)  # by global rank; only ranks that still run
    points: dict[str, list[Point]] = field(default_factory=dict)  # new values of rank 0, by key
    step: int | None = None  # rank 0's last
    total: float | None = None  # rank 0's number of steps


class Progress:
    """The progress of the last launch whose scripts have reported any; `name_of` takes a rank."""

    def __init__(self, name_of: Callable[[int], str]) -> None:
        self._name_of = name_of
        self.record: dict[str, Any] = {"launch": None}  # what is known, as plain data; without a launch, nothing
        self._series: dict[str, Series] = {}
        self._paces: dict[int, tuple[float, Mapping[int, Pace]]] = {}  # node -> time of its report, and its ranks
        self._node: int | None = None  # that has rank 0
        self._has_news = False
        self._said = ""  # the step in the last line of the log
        self._looked_at = self._says_at = 0.0
        self._slow: dict[int, float] = {}  # slow rank -> since when
        self._named: set[int] = set()  # the slow ranks that a line has named

    def begin(self, launch: int) -> None:
        """Forget the ranks' speeds, who is slow, and what is not said yet: workers start."""
        self._paces, self._slow, self._named, self._has_news = {}, {}, set(), False
        if launch == self.record["launch"]:
            self._see_speed(None)
        else:
            self._node = None  # what ends from now on is not its launch

    def take(self, node: int, launch: int, data: Mapping[str, Any], at_s: float) -> str:
        """Keep a node's report on its ranks; return rank 0's first one of a launch in words, else nothing."""
        metrics: Metrics = from_plain(Metrics, data, "progress")
        if launch != self.record["launch"]:
            nothing = dict.fromkeys(("step", "done", "total", "steps_per_s", "left_s"))
            self.record = {"launch": launch, **nothing, "from_0": False, "last": {}, "series": {}}
            self._series, self._node, self._has_news, self._said = {}, None, False, ""
        self._paces[node] = at_s, metrics.paces
        has_rank_0 = 0 in metrics.paces or bool(metrics.points) or metrics.step is not None
        is_first = has_rank_0 and self._node is None
        if not has_rank_0 and node != self._node:
            return ""
        self._node, told = node, self.record
        self._has_news |= bool(metrics.points) or metrics.step not in (None, told["step"])
        told["step"] = told["step"] if metrics.step is None else metrics.step
        told["total"] = told["total"] if metrics.total is None else metrics.total
        for key, points in metrics.points.items():
            for step, value in points if key in self._series or len(self._series) < MAX_KEYS else ():
                self._series.setdefault(key, Series(MAX_POINTS)).add(step, value)
                told["last"][key] = value
        # Steps that count from 0: the number of the last one is one less than how many are done.
        counted = [told["step"], *(points[0][0] for points in metrics.points.values() if points)]
        told["from_0"] = told["from_0"] or 0 in counted
        told["series"] = {key: list(each.points) for key, each in self._series.items()}
        self._see_speed(metrics.paces.get(0, Pace()).steps_per_s)
        if is_first:
            self._says_at = at_s + FIRST_LINE_S
        return said(told) if is_first else ""

    def _see_speed(self, steps_per_s: float | None, has_ended_well: bool = False) -> None:
        """Note rank 0's speed, and what follows from it and the step."""
        told, step, total = self.record, self.record["step"], self.record["total"]
        is_known = None not in (step, total)
        told["steps_per_s"] = steps_per_s
        told["done"] = step
        if is_known and (told["from_0"] or (has_ended_well and step + 1 == total)):
            told["done"] = min(step + 1, total)
        told["left_s"] = max(0.0, total - told["done"]) / steps_per_s if is_known and steps_per_s else None

    def ended(self, node: int, ok: bool) -> str:
        """Stop comparing a node's ranks; return the last line of a log that has told of the progress, else nothing."""
        self._paces.pop(node, None)
        if node != self._node:
            return ""
        self._see_speed(None, ok)
        return self._line() if self._said not in ("", step(self.record)) else ""

    def tick(self, at_s: float) -> list[str]:
        """Return the lines for the log: once a minute how far rank 0 is, and which ranks have become slow."""
        lines = []
        if self._has_news and at_s >= self._says_at:
            self._says_at = at_s + LINES_EVERY_S
            lines = [self._line()]
        if at_s - self._looked_at >= LOOKS_EVERY_S:
            self._looked_at = at_s
            lines += self._compare(at_s)
        return lines

    def _line(self) -> str:
        self._has_news, self._said = False, step(self.record)
        return said(self.record)

    def _compare(self, at_s: float) -> list[str]:
        """Return a line on ranks that are slow for a minute, or nothing."""
        fresh = [paces for told_at, paces in self._paces.values() if at_s - told_at < STALE_S]
        paces = {rank: pace for each in fresh for rank, pace in each.items() if pace != Pace()}
        # As if no rank ever waited for others, if all tell how long their own work takes.
        by = "seconds" if all(pace.seconds for pace in paces.values()) else "steps_per_s"
        speeds = {rank: 1 / pace.seconds for rank, pace in paces.items() if pace.seconds}
        if by != "seconds":
            speeds = {rank: pace.steps_per_s for rank, pace in paces.items() if pace.steps_per_s is not None}
        if not speeds:
            return []
        median = statistics.median(speeds.values())
        slow = sorted(rank for rank, speed in speeds.items() if len(speeds) >= _FEWEST and speed < median * _SLOW)
        self._slow = {rank: self._slow.get(rank, at_s) for rank in slow}
        new = [rank for rank, since in self._slow.items() if at_s - since >= SLOW_S and rank not in self._named]
        self._named |= {*new}
        if not new:
            return []
        more = f"; so {'is' if len(new) == 2 else 'are'} {names(new[1:], 'rank')}" if new[1:] else ""
        speed = f"{speed_text(speeds[new[0]], by)}, the median is {speed_text(median, by)}"
        return [f"{self._name_of(new[0])} is slow: {speed}{more}"]

    def verdict(self, launch: int, is_control: bool) -> dict[str, Any]:
        """Return what rank 0 has reported last in a launch, for the control node with all points that are kept."""
        if launch != self.record["launch"]:
            return {}
        step, total = self.record["step"], self.record["total"]
        total = int(total) if total is not None and total.is_integer() else total
        place = {key: value for key, value in (("step", step), ("total", total)) if value is not None}
        return {"last": {**place, **self.record["last"]}, "history": self.record["series"] if is_control else {}}


# --- in words ---------------------------------------------------------------------------------------


def said(progress: Mapping[str, Any]) -> str:
    """Return ``"step 229 of 300 (76 %), 2.1 steps/s, 56 s left, loss 0.044"``, as far as it is known."""
    values = [f"{key} {number(value)}" for key, value in progress["last"].items()]
    more = [f"and {len(values) - _VALUES} more values"] if len(values) > _VALUES else []
    return ", ".join(filter(None, (step(progress), *speed(progress), *values[:_VALUES], *more)))


def speed(progress: Mapping[str, Any]) -> list[str]:
    """Return rank 0's speed and the time left, those that are known."""
    per_s, left_s = progress["steps_per_s"], progress["left_s"]
    found = [] if per_s is None else [speed_text(per_s, "steps_per_s")]
    return found if left_s is None else [*found, f"{duration(left_s)} left"]


def speed_text(speed: float, by: str) -> str:
    """Return a speed in words; all are steps a second."""
    if by == "seconds":
        return f"{1 / speed:.2g} s of own work a step"
    return f"{speed:.2g} steps/s" if speed < 100 else f"{speed:.0f} steps/s"


def number(value: float | None) -> str:
    """Return a number with at most four significant digits."""
    if value is None or not math.isfinite(value):
        return "not finite"
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.4g}"


def step(progress: Mapping[str, Any]) -> str:
    """Return ``"step 120 of 1000 (12 %)"``; the last step is 1000, though it may have the number 999."""
    last, total = progress["step"], progress["total"]
    if last is None:
        return ""
    return f"step {last}" if total is None else f"step {progress['done']} of {number(total)} ({percent(progress)} %)"


def percent(progress: Mapping[str, Any]) -> int:
    """Return the share of the steps that is done."""
    done: float = 100 * (progress["done"] or 0) / progress["total"]
    return math.floor(max(0.0, min(100.0, done)))
