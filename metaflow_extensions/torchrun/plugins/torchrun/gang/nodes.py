"""The state of each node, as the control node knows it: a part of the gang's state. Pure."""

from __future__ import annotations

import enum
from collections import Counter

from .protocol import CONTROL, Join


class NodeState(enum.Enum):
    """What the control node knows of one node."""

    ABSENT = "has not joined yet"
    JOINED = "is a member; its step's code runs"
    DONE = "its step's code has ended well; its results are being stored"
    LEFT = "has left: it sends nothing more"
    LOST = "its task has ended unexpectedly, or nothing arrives from it"
    AWAITED = "it was lost or told to end, and another task is to take its place"
    OUT = "it was lost or told to end, and the gang goes on without it; another task may come late"


WITHOUT = {NodeState.AWAITED, NodeState.OUT}
"""The states of nodes that are gone, and without which the gang goes on or waits."""
NEXT = {
    NodeState.ABSENT: {NodeState.JOINED, NodeState.LOST, *WITHOUT},
    # JOINED to JOINED: a node that lost its connection before *welcome* arrived joins again.
    NodeState.JOINED: {NodeState.JOINED, NodeState.DONE, NodeState.LEFT, NodeState.LOST, *WITHOUT},
    NodeState.DONE: {NodeState.LEFT, NodeState.LOST, *WITHOUT},
    NodeState.LEFT: WITHOUT,
    NodeState.LOST: WITHOUT,
    NodeState.AWAITED: {NodeState.JOINED, NodeState.OUT},
    NodeState.OUT: {NodeState.JOINED},
}


class Nodes:
    """The nodes of a gang."""

    def __init__(self, num_nodes: int, takes_late: bool = False) -> None:
        self.size = num_nodes
        self.takes_late = takes_late  # whether a task may come when the gang goes on without its node
        self._states = dict.fromkeys(range(num_nodes), NodeState.ABSENT)
        # Nodes per state, kept up to date: counting thousands anew at each message would be slow.
        self._count: Counter[NodeState] = Counter(self._states.values())
        self._joins: dict[int, Join] = {}
        self._count_of_joins: Counter[int] = Counter()
        self._came: dict[int, list[str]] = {}  # the tasks of nodes that other tasks had come before or after, in order
        self.replaced: set[int] = set()  # nodes that know that another task has come in their place

    def __getitem__(self, node: int) -> NodeState | None:
        return self._states.get(node)

    def enter(self, node: int, state: NodeState) -> None:
        """Change the state of a node."""
        before = self._states[node]
        assert state in NEXT[before], f"node {node} can't go from {before.name} to {state.name}"
        self._count[before] -= 1
        self._count[state] += 1
        self._states[node] = state

    def may_join(self, join: Join) -> bool:
        """Return whether a task may join: no task is that node, or this task is, and has not got *welcome*."""
        before = self._joins.get(join.node)
        if self[join.node] is NodeState.AWAITED or (self.takes_late and self[join.node] is NodeState.OUT):
            return before is None or (join.task != before.task and not self.is_older(join))  # not one that is gone
        return self[join.node] is NodeState.ABSENT or (self[join.node] is NodeState.JOINED and join == before)

    def see(self, join: Join) -> None:
        """Record that a task has come that can't be its node now; it may try again."""
        member = self._joins.get(join.node)
        came = self._came.setdefault(join.node, [] if member is None else [member.task])
        if join.task not in came:
            came.append(join.task)

    def is_older(self, join: Join) -> bool:
        """Return whether a task came before the one that was its node's member last: that one has taken its place."""
        came, member = self._came.get(join.node, []), self._joins.get(join.node)
        if member is None or join.task not in came:
            return False
        return member.task in came[came.index(join.task) + 1 :]

    def join(self, join: Join) -> None:
        """Record that a task is now this node's member."""
        self.enter(join.node, NodeState.JOINED)
        self.replaced.discard(join.node)
        self._count_of_joins[join.node] += join != self._joins.get(join.node)
        self._joins[join.node] = join
        if join.node in self._came:
            self.see(join)

    def is_same_place(self, join: Join) -> bool:
        """Return whether a task runs in the same container as the node whose place it wants."""
        return self._joins.get(join.node, Join(join.node)).place == join.place

    def has_joined(self, node: int) -> bool:
        """Return whether a task has ever been this node's member."""
        return node in self._joins

    def joins(self, node: int) -> int:
        """Return how many tasks have been this node's member, one after the other."""
        return self._count_of_joins[node]

    def host(self, node: int) -> str:
        """Return a node's host name."""
        return self._joins.get(node, Join(node)).host

    def count(self, *states: NodeState) -> int:
        """Return how many nodes are in one of `states`."""
        return sum(self._count[state] for state in states)

    def which(self, *states: NodeState) -> list[int]:
        """Return the indexes of the nodes in one of `states`."""
        return [node for node, state in self._states.items() if state in states]

    @property
    def expected(self) -> int:
        """How many nodes the gang counts on: all that are not out."""
        return self.size - self._count[NodeState.OUT]

    @property
    def absent(self) -> list[int]:
        """Indexes of the nodes that have not arrived."""
        return self.which(NodeState.ABSENT)

    @property
    def joined(self) -> list[int]:
        """Indexes of the nodes whose step's code runs."""
        return self.which(NodeState.JOINED)

    @property
    def members(self) -> list[int]:
        """Indexes of the nodes, besides the control node, that have joined and not yet left."""
        return [node for node in self.which(NodeState.JOINED, NodeState.DONE) if node != CONTROL]
