"""Stacks on demand: what every rank of a gang does now. ``python flow.py torchrun stacks`` asks; nothing is stopped.

The way of a question: the command stores a request beside the gang's records (`task/gang_store`). The control node finds
it and hands it to the `StacksKeeper`, which asks all nodes. On each node the `StacksWatcher` asks the workers. When all
nodes have answered, or their time is up, the keeper gives the answer to be stored.
"""

from __future__ import annotations

from ...gang.keepers import Keeper, Plain, Remarks
from ...gang.messages import Report
from ...gang.wire import from_plain, to_plain
from .told import WORKERS_S, GangStacks, NodeStacks

# What a node has besides `WORKERS_S`, until its answer must have come to the control node.
_NODES_MARGIN_S = 4.0


class StacksKeeper(Keeper):
    """Asks all nodes, and keeps what they have answered until it is whole. One question at a time: the newest."""

    has_record = False

    @classmethod
    def of(cls, num_nodes: int) -> Keeper:
        """Return what asks the nodes."""
        return cls(num_nodes)

    def __init__(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes
        self._running: set[int] = set()  # nodes whose workers run
        self._without: dict[int, str] = {}  # all other nodes of the launch, and why they can't be asked
        self._launch: int | None = None
        self._generation: int | None = None  # of the last answer
        self._asked: Plain | None = None  # the open question
        self._due_at_s = 0.0
        self._found: dict[int, NodeStacks] = {}
        self._missing: dict[int, str] = {}

    def begin(self, launch: int, policy: Plain, at_s: float) -> None:
        """Remember that workers run now, on all nodes."""
        self._launch, self._generation = launch, None
        self._running, self._without = set(range(self._num_nodes)), {}

    def request(self, data: Plain, at_s: float) -> Remarks:
        """Ask all nodes whose workers run."""
        if not self._running:
            return Remarks(answer={"id": data["id"], "found": to_plain(GangStacks())})
        self._asked = {"id": data["id"]}
        self._due_at_s = at_s + WORKERS_S + _NODES_MARGIN_S
        self._found, self._missing = {}, dict(sorted(self._without.items()))
        return Remarks(ask=self._asked)

    def handle(self, node: int, told: Report, at_s: float) -> Remarks:
        """Keep what a node has answered."""
        if self._asked is None or told.data["id"] != self._asked["id"]:
            return Remarks()  # an answer that comes too late
        self._found[node] = from_plain(NodeStacks, told.data["found"], "stacks")
        self._generation = told.generation
        return self._answer_if_whole()

    def ended(self, node: int, ok: bool) -> Remarks:
        """Expect nothing more of a node whose workers have ended."""
        return self._go_on_without(node, "it has no workers")

    def gone(self, node: int) -> Remarks:
        """Expect nothing more of a node that is no longer in the gang."""
        return self._go_on_without(node, "it is no longer in the gang")

    def _go_on_without(self, node: int, why: str) -> Remarks:
        self._running.discard(node)
        self._without[node] = why
        if self._asked is None or node in self._found:
            return Remarks()
        self._missing.setdefault(node, why)
        return self._answer_if_whole()

    def overdue(self, at_s: float) -> Remarks:
        """Answer without the nodes that are late."""
        if self._asked is None or at_s < self._due_at_s:
            return Remarks()
        for node in range(self._num_nodes):
            if node not in self._found:
                self._missing.setdefault(node, "it has not answered in time")
        return self._answer_if_whole()

    def _answer_if_whole(self) -> Remarks:
        if self._asked is None or len(self._found.keys() | self._missing.keys()) < self._num_nodes:
            return Remarks()
        found, missing = dict(sorted(self._found.items())), dict(sorted(self._missing.items()))
        whole = GangStacks(self._launch, self._generation, found, missing)
        answer = {"id": self._asked["id"], "found": to_plain(whole)}
        self._asked, self._found, self._missing = None, {}, {}
        return Remarks(answer=answer)


PART = StacksKeeper
