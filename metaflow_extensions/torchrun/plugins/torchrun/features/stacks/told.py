"""What the workers of a gang were doing at one moment, as nodes send it and as the datastore keeps it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ...gang.wire import from_plain
from ...machine.frames import Found

WORKERS_S = 4.0  # the time for the workers of a node to answer; most take less than a second


@dataclass(frozen=True)
class NodeStacks:
    """The workers of one node."""

    host: str
    ranks: dict[int, Found]  # by global rank; long texts are shortened


@dataclass(frozen=True)
class GangStacks:
    """An answer: all that the nodes have sent in time."""

    launch: int | None = None  # None: no worker runs
    generation: int | None = None
    nodes: dict[int, NodeStacks] = field(default_factory=dict)
    missing: dict[int, str] = field(default_factory=dict)  # node -> why it has sent nothing

    @staticmethod
    def read(plain: Mapping[str, Any]) -> GangStacks:
        """Return what the datastore has; raise ValueError where it is no such answer."""
        found: GangStacks = from_plain(GangStacks, plain, "the answer")
        return found

    @property
    def ranks(self) -> dict[int, Found]:
        """All workers, by global rank."""
        return {rank: found for node in self.nodes.values() for rank, found in sorted(node.ranks.items())}

    def node_of(self, rank: int) -> int:
        """Return the node of a rank that is in `ranks`."""
        return self._nodes_of[rank]

    @cached_property
    def _nodes_of(self) -> dict[int, int]:
        return {rank: node for node, found in self.nodes.items() for rank in found.ranks}

    def has_moved(self, before: GangStacks) -> tuple[list[int], list[int]]:
        """Return the ranks that have moved since an earlier answer, and those that are where they were.

        Ranks whose stacks are not known at both moments are in neither list. Stacks of another generation can't be
        compared.
        """
        moved: list[int] = []
        same: list[int] = []
        if (self.launch, self.generation) == (before.launch, before.generation):
            former = before.ranks
            for rank, found in self.ranks.items():
                if found.mark and rank in former and former[rank].mark:
                    (same if found.mark == former[rank].mark else moved).append(rank)
        return moved, same
