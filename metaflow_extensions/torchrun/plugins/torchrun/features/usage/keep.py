"""Keeps the usage of all nodes, on the control node: one series for each kind and node."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...gang.keepers import Keeper, Plain
from ...gang.protocol import Told
from ...gang.wire import from_plain
from ...records.series import Merge, Series
from .told import Used, step_s

KINDS: dict[str, Merge] = {
    "cpus": "mean",  # cores used
    "memory_mib": "max",
    "gpu_percent": "mean",  # of the time in which a kernel ran, over all GPUs of the node
    "gpu_memory_mib": "max",  # of all GPUs of the node
    "received_kib_s": "mean",  # from the network
    "sent_kib_s": "mean",
    "output_bytes_s": "mean",  # written by the workers to stdout and stderr
}
# The maximum number of values of one kind: of a node, of a node in a large gang, of all nodes.
_MOST_POINTS, _LEAST_POINTS, _POINTS_OF_ALL = 120, 24, 16_384


@dataclass
class _Node:
    of: str = ""  # see `Used.of`
    limits: dict[str, float] = field(default_factory=dict)
    series: dict[str, Series] = field(default_factory=dict)  # by kind, if measured


class UsageKeeper(Keeper):
    """Keeps the usage of the nodes since the gang's start."""

    @classmethod
    def of(cls, num_nodes: int) -> Keeper:
        """Return the keeper of a gang."""
        return cls(num_nodes, step_s(num_nodes))

    def __init__(self, num_nodes: int, first_step_s: float) -> None:
        self._most = max(_LEAST_POINTS, min(_MOST_POINTS, _POINTS_OF_ALL // num_nodes))
        self._step_s = first_step_s
        self._nodes: dict[int, _Node] = {}

    def handle(self, node: int, told: Told, at_s: float) -> None:
        """Keep the usage of a node."""
        used = from_plain(Used, told.data, "usage")
        kept = self._nodes.setdefault(node, _Node())
        kept.of, kept.limits = used.of, used.limits
        for kind, value in used.values.items():
            if kind not in kept.series:
                kept.series[kind] = Series(self._most, self._step_s, KINDS[kind], begin=0.0)
            kept.series[kind].add(at_s, value)

    def record(self) -> Plain:
        """Return the series of all nodes, in parts of the same length."""
        all_series = [series for node in self._nodes.values() for series in node.series.values()]
        step_s = max((series.width for series in all_series), default=self._step_s)
        for series in all_series:
            if series.width < step_s:  # its node has reported nothing for long
                series.widen(step_s)
        return {
            "step_s": step_s,
            "nodes": {str(number): _plain(self._nodes[number]) for number in sorted(self._nodes)},
        }


def _plain(node: _Node) -> Plain:
    values = {kind: [_rounded(value) for value in series.parts] for kind, series in node.series.items()}
    return {"of": node.of, "limits": node.limits, **values}


def _rounded(value: float | None) -> float | int | None:
    """Return a number in short form: three significant digits, or a whole number."""
    if value is None:
        return None
    return round(value) if value >= 100 else float(f"{value:.3g}")


PART = UsageKeeper
