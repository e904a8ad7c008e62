"""Which node had a rank at a time, and since when a node's stored log is whole. Pure.

A rank moves to another node when a spare takes a lost node's place.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
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
    """Where the ranks were.

    Parameters
    ----------
    placed : sequence of Placed
        In the order of their times.
    whole_since : dict
        By node: since when its log is whole, in seconds since 1970. The log of a lost node may lack its end, and that
        of another task in its place begins anew; infinite if none has come.
    """

    def __init__(self, placed: Sequence[Placed], whole_since: Mapping[int, float]) -> None:
        self._placed = placed
        self._begins = [_stamp(each.since) for each in placed]
        self._late = [_stamp(each.since + LATE_S) for each in placed]
        self._whole = {node: _stamp(since) for node, since in whole_since.items()}

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

    def is_whole(self, node: int, stamp: str) -> bool:
        """Return whether a node's own log has what it printed at a time."""
        return self._whole.get(node, "") <= stamp


def _stamp(seconds: float) -> str:
    """Return a time as the stored logs have it."""
    if seconds == float("inf"):
        return "inf"  # after all digits
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%f") if seconds > 0 else ""
