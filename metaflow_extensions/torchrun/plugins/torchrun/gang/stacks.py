"""What every rank does now: ``python flow.py torchrun stacks`` asks, and nothing is stopped. Pure.

The command stores a request beside the gang's view. The control node's task finds it and hands it to the machine, which
asks all nodes. When all have answered, or their time is up, the answer is stored.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..machine.frames import Found
from .limits import NODES_MARGIN_S, WORKERS_S
from .wire import from_plain, to_plain


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

    @property
    def ranks(self) -> dict[int, Found]:
        """All workers, by global rank."""
        return {rank: found for node in self.nodes.values() for rank, found in sorted(node.ranks.items())}

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


class Stacks:
    """One question at a time: the newest."""

    def __init__(self) -> None:
        self.answer: dict[str, Any] | None = None  # the last one, until it is taken
        self._id: Any = None  # of the open question; None without one
        self._due_at_s = 0.0
        self._about: tuple[int, int] = 0, 0  # launch and generation
        self._open: set[int] = set()  # nodes that have not answered
        self._found: dict[int, NodeStacks] = {}
        self._missing: dict[int, str] = {}

    def ask(
        self, asked: Any, about: tuple[int, int], running: Collection[int], others: Collection[int], at_s: float
    ) -> bool:
        """Begin a question to the nodes whose workers run; return whether they are to be asked."""
        self._id, self._about, self._due_at_s = asked, about, at_s + WORKERS_S + NODES_MARGIN_S
        self._open, self._found = set(running), {}
        self._missing = dict.fromkeys(sorted(others), "it has no workers")
        if not running:
            self.answer, self._id = {"id": asked, "found": to_plain(GangStacks())}, None
        return bool(running)

    def take(self, node: int, data: Mapping[str, Any]) -> None:
        """Keep what a node has answered."""
        if self._id is not None and data["id"] == self._id:  # else it comes too late
            self._found[node] = from_plain(NodeStacks, data["found"], "stacks")
            self._close(node)

    def gone(self, node: int, why: str) -> None:
        """Expect nothing more of a node."""
        if node in self._open:
            self._missing[node] = why
            self._close(node)

    def tick(self, at_s: float) -> None:
        """Answer without the nodes that are late."""
        for node in sorted(self._open) if self._id is not None and at_s >= self._due_at_s else ():
            self.gone(node, "it has not answered in time")

    def _close(self, node: int) -> None:
        self._open.discard(node)
        if self._id is not None and not self._open:
            whole = GangStacks(*self._about, dict(sorted(self._found.items())), dict(sorted(self._missing.items())))
            self.answer, self._id = {"id": self._id, "found": to_plain(whole)}, None
