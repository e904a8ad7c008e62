"""Keeps the usage of all nodes, on the control node: the last and the highest value of each kind and node."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...gang.keepers import Keeper, Plain
from ...gang.messages import Report
from ...gang.wire import from_plain, to_plain
from .told import Used

KINDS = (
    "cpus",  # cores used
    "memory_mib",
    "gpu_percent",  # of the time in which a kernel ran, over all GPUs of the node
    "gpu_memory_mib",  # of all GPUs of the node
    "received_kib_s",  # from the network
    "sent_kib_s",
    "output_bytes_s",  # written by the workers to stdout and stderr
)


@dataclass
class _Node:
    of: str  # see `Used.of`
    limits: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)  # by kind, if measured
    highest: dict[str, float] = field(default_factory=dict)


class UsageKeeper(Keeper):
    """Keeps the usage of the nodes since the gang's start."""

    @classmethod
    def of(cls, num_nodes: int) -> Keeper:
        """Return the keeper of a gang."""
        return cls()

    def __init__(self) -> None:
        self._nodes: dict[int, _Node] = {}

    def handle(self, node: int, told: Report, at_s: float) -> None:
        """Keep the usage of a node."""
        used = from_plain(Used, told.data, "usage")
        kept = self._nodes.setdefault(node, _Node(used.of))
        kept.of, kept.limits = used.of, used.limits
        for kind in KINDS:
            if kind in used.values:
                value = float(f"{used.values[kind]:.3g}")
                kept.last[kind] = value
                kept.highest[kind] = max(value, kept.highest.get(kind, value))

    def record(self) -> Plain:
        """Return the values of all nodes."""
        return {"nodes": {str(number): to_plain(self._nodes[number]) for number in sorted(self._nodes)}}


PART = UsageKeeper
