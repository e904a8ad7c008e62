"""What every rank does now: ``python flow.py torchrun stacks`` asks, and the machine itself where a launch hangs. Pure.

The command stores a request beside the gang's view. The control node's task finds it and hands it to the machine, which
asks all nodes. When all have answered, or their time is up, the answer is stored.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..machine.frames import Found
from .limits import NODES_MARGIN_S, WORKERS_S
from .wire import from_plain

NO_WORKERS = "it has no workers"


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
        if (self.launch, self.generation) != (before.launch, before.generation):
            return [], []
        former = {rank: found.mark for rank, found in before.ranks.items() if found.mark}
        known = {rank: found.mark for rank, found in self.ranks.items() if found.mark and rank in former}
        moved = [rank for rank, mark in known.items() if mark != former[rank]]
        return moved, [rank for rank in known if rank not in moved]


class Stacks:
    """One question at a time: the newest."""

    def __init__(self) -> None:
        self.asked: Any = None  # the question
        self._due_at_s = 0.0
        self._about: tuple[int, int] | None = None  # launch and generation; None: no worker runs
        self._open: set[int] = set()  # nodes that have not answered
        self._found: dict[int, NodeStacks] = {}
        self._missing: dict[int, str] = {}

    def ask(
        self, asked: Any, about: tuple[int, int], running: Collection[int], others: Collection[int], at_s: float
    ) -> None:
        """Begin a question to the nodes whose workers run."""
        self.asked, self._about, self._due_at_s = asked, about if running else None, at_s + WORKERS_S + NODES_MARGIN_S
        self._open, self._found = set(running), {}
        self._missing = dict.fromkeys(others if running else (), NO_WORKERS)

    def take(self, node: int, data: Mapping[str, Any]) -> None:
        """Keep what a node has answered, if it is not too late."""
        if data["id"] == self.asked and node in self._open:
            self._found[node] = from_plain(NodeStacks, data["found"], "stacks")
            self._open.discard(node)

    def gone(self, node: int, why: str) -> None:
        """Expect nothing more of a node."""
        if node in self._open:
            self._missing[node] = why
            self._open.discard(node)

    def answer(self, asked: Any, at_s: float) -> GangStacks | None:
        """Return the answer when all nodes have answered, or their time is up; else None."""
        if asked != self.asked or (self._open and at_s < self._due_at_s):
            return None
        for node in sorted(self._open):
            self.gone(node, "it has not answered in time")
        launch, generation = self._about or (None, None)
        found, missing = dict(sorted(self._found.items())), dict(sorted(self._missing.items()))
        return GangStacks(launch, generation, found, missing)
