"""Which node had a rank at a time. Pure.

A rank moves to another node when a spare takes a lost node's place.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

LATE_S = 10.0
"""So long after its launch or generation has ended, a line may still be captured."""


@dataclass(frozen=True)
class Placed:
    """Which nodes have ranks from a moment on."""

    since: float  # seconds since 1970
    nodes: tuple[int, ...] = ()  # in the order of their ranks; none: no launch runs, or its nodes are unknown
    nproc: int = 1  # ranks on each

    def node_of(self, rank: int) -> int | None:
        """Return the node of a rank; None if it has none."""
        return self.nodes[rank // self.nproc] if 0 <= rank < len(self.nodes) * self.nproc else None


class Placement:
    """Where the ranks were; `placed` is in the order of its times."""

    def __init__(self, placed: Sequence[Placed]) -> None:
        self._placed = placed
        self._begins = [_stamp(each.since) for each in placed]
        self._late = [_stamp(each.since + LATE_S) for each in placed]

    def node_at(self, rank: int, stamp: str) -> int | None:
        """Return the node that had a rank at a time (UTC, ISO 8601); None if that is unknown."""
        return self._placed[max(0, bisect_right(self._begins, stamp) - 1)].node_of(rank) if self._placed else None

    def nodes_at(self, rank: int, stamp: str) -> set[int | None]:
        """Return the nodes from which a line of a rank can be that was captured at a time; None stands for unknown."""
        if not self._placed:
            return {None}
        first, last = (max(0, bisect_right(times, stamp) - 1) for times in (self._late, self._begins))
        return {each.node_of(rank) for each in self._placed[first : last + 1]}

    @property
    def ranks(self) -> range:
        """The ranks that there have been."""
        return range(max((len(each.nodes) * each.nproc for each in self._placed), default=0))

    def nodes_of(self, rank: int) -> set[int]:
        """Return all nodes that have had a rank."""
        return {node for each in self._placed if (node := each.node_of(rank)) is not None}


def _stamp(seconds: float) -> str:
    """Return a time as the stored logs have it."""
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%f") if seconds > 0 else ""
