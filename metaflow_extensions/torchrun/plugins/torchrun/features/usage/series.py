"""What the nodes have used over time: one series for each node, bounded however long a gang lives. Pure.

Time is cut into equal parts, from the gang's begin. Of each part and node one value of each kind is kept. When a series
is full, each two neighbours become one, and the parts are twice as long. So the whole life is kept, and it gets coarser.
"""

from __future__ import annotations

import math
import threading
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

# What can be measured, and whether two values become their mean or their maximum.
_MERGE = {
    "cpus": "mean",  # cores used
    "memory_mib": "max",
    "gpu_percent": "mean",  # of the time in which a kernel ran, over all GPUs of the node
    "gpu_memory_mib": "max",  # of all GPUs of the node
    "received_kib_s": "mean",  # by the network
    "sent_kib_s": "mean",
    "output_bytes_s": "mean",  # what the workers write to stdout and stderr
    "output_lines_s": "mean",
}
KINDS = tuple(_MERGE)
LIMITS = ("cpus", "memory_mib", "gpu_memory_mib", "gpus")
"""What a node may use of some of it, and how many GPUs it has."""

STEP_S = 5.0
"""How often a node of a small gang is asked."""
# What is told wakes the control node's task. So of all nodes together come so many samples in a second at most.
_SAMPLES_PER_S = 10

# How many values of one kind a node's series has at most, and all nodes together.
_MOST_POINTS, _LEAST_POINTS, _POINTS_OF_ALL = 240, 24, 16_384
_NONE = math.nan


def step_s(num_nodes: int) -> float:
    """Return how often each node of a gang is asked, and the length of a part of time at first."""
    return max(STEP_S, num_nodes / _SAMPLES_PER_S)


def most_points(num_nodes: int) -> int:
    """Return how many values of one kind are kept of each node, an even number."""
    return max(_LEAST_POINTS, min(_MOST_POINTS, _POINTS_OF_ALL // num_nodes // 2 * 2))


class Series:
    """What one node has used; one thread adds to it, and any thread may ask."""

    def __init__(self, most: int, step_s: float = STEP_S) -> None:
        self._most = most
        self._lock = threading.Lock()
        # All below is under the lock.
        self._step_s = step_s
        self._values = {kind: array("f") for kind in KINDS}
        self._last = (-1, 0)  # the number of the last part that has values, and of how many samples
        self.of = ""  # whose CPU and memory it is
        self.limits: dict[str, float] = {}

    def note(self, at_s: float, values: Mapping[str, float]) -> None:
        """Take what was used until `at_s`; time does not go back."""
        with self._lock:
            while (number := int(at_s / self._step_s)) >= self._most:
                self._halve()
            last, count = self._last
            count = count if number == last else 0
            for kind, series in self._values.items():
                series.extend([_NONE] * (number + 1 - len(series)))
                value = values.get(kind)
                if value is not None and math.isfinite(value):
                    series[number] = _with_one_more(kind, series[number], value, count)
            self._last = number, count + 1

    def _halve(self) -> None:
        self._step_s *= 2
        self._values = {kind: array("f", _halved(kind, series)) for kind, series in self._values.items()}
        last, count = self._last
        self._last = last // 2, count

    def as_data(self, step_s: float | None = None) -> dict[str, Any]:
        """Return it as plain data, in parts of `step_s` seconds; kinds of which nothing is known are left out."""
        with self._lock:
            own_s, values = self._step_s, {kind: list(series) for kind, series in self._values.items()}
        while own_s < (step_s or own_s):
            own_s, values = own_s * 2, {kind: _halved(kind, series) for kind, series in values.items()}
        known = {kind: [_rounded(value) for value in series] for kind, series in values.items()}
        known = {kind: series for kind, series in known.items() if any(value is not None for value in series)}
        return {"of": self.of, "limits": dict(self.limits), **known}

    @property
    def step_s(self) -> float:
        """How long one part of time is."""
        return self._step_s


class UsageHistory:
    """What all nodes have used; one thread adds to it, and any thread may ask for `as_data`."""

    def __init__(self, num_nodes: int, step_s: float = STEP_S) -> None:
        self._most, self._step_s = most_points(num_nodes), step_s
        self._nodes: dict[int, Series] = {}

    def note(self, node: int, at_s: float, of: str, values: Mapping[str, float], limits: Mapping[str, float]) -> None:
        """Take what a node has used until `at_s`, in seconds since the gang's begin."""
        series = self._nodes.get(node)
        if series is None:
            series = self._nodes[node] = Series(self._most, self._step_s)
        series.of, series.limits = of, {name: limits[name] for name in LIMITS if name in limits}
        series.note(at_s, values)

    def as_data(self) -> dict[str, Any]:
        """Return it as plain data: the length of a part of time, and the series of each node that has one."""
        nodes = sorted(dict(self._nodes).items())
        step_s = max((series.step_s for _, series in nodes), default=self._step_s)
        return {"step_s": step_s, "nodes": {str(node): series.as_data(step_s) for node, series in nodes}}


def _halved(kind: str, values: Sequence[float]) -> list[float]:
    pairs = zip(values[::2], [*values[1::2], _NONE], strict=False)
    return [_merged(kind, first, second) for first, second in pairs]


def _merged(kind: str, first: float, second: float) -> float:
    if math.isnan(first) or math.isnan(second):
        return first if math.isnan(second) else second
    return max(first, second) if _MERGE[kind] == "max" else (first + second) / 2


def _with_one_more(kind: str, before: float, value: float, count: int) -> float:
    """Return the value of a part of time that has `count` samples already."""
    if math.isnan(before):
        return value
    return max(before, value) if _MERGE[kind] == "max" else before + (value - before) / (count + 1)


def _rounded(value: float) -> float | int | None:
    """Return a number short enough to be stored many times: three digits, or a whole number; None for none."""
    if not math.isfinite(value):  # beyond what an array of floats holds
        return None
    return round(value) if value >= 100 else float(f"{value:.3g}")
