"""The one fold of a gang's records: its outcome, every node and its times, every rank. Pure.

Whatever shows a gang is made of it, while the gang runs or years later.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from ..gang.history import Record
from ..gang.protocol import CONTROL
from ..gang.texts import counted, duration, names

NodeState = Literal[
    "missing",  # has not joined
    "own code",  # the step's code runs, outside of `run`
    "waiting",  # has called `run`; not all others have
    "preparing",  # its commands of before_run run
    "starting",  # its workers are to start; not all of them run
    "running",  # its workers do
    "stopping",
    "stopped",  # its workers are gone; the launch is not decided
    "restarting",
    "finished",  # its step has ended well; its results are being stored
    "left",
    "lost",
]
RankState = Literal["waiting", "starting", "running", "stopping", "restarting", "done", "failed", "stopped", "lost"]
Outcome = Literal["waiting", "running", "stopping", "restarting", "done", "failed"]

_GONE = ("missing", "left", "lost")
_WITH_WORKERS: tuple[NodeState, ...] = ("preparing", "starting", "running")
# How a worker ends that is told to stop: by SIGTERM, or by SIGKILL if it does not listen.
_STOPPED_BY = (-15, -9)
_RANK_STATES: dict[str, RankState] = {
    "preparing": "waiting",
    "starting": "starting",
    "running": "running",
    "stopping": "stopping",
    "restarting": "restarting",
    "lost": "lost",
}

_WORDS: dict[NodeState, str] = {"missing": "not joined", "finished": "storing", "left": "finished"}
# What a node does by itself while no launch runs.
_ALONE: dict[NodeState, str] = {
    "missing": "has not joined yet",
    "waiting": "waits until all nodes have called run",
    "finished": "has ended its step; its results are being stored",
    "left": "has ended its step",
}


@dataclass(frozen=True)
class Span:
    """A time in which a node was in one state; seconds since the gang's begin."""

    state: NodeState
    begin_s: float
    end_s: float


@dataclass
class Node:
    """One node of the gang."""

    index: int
    host: str = ""
    state: NodeState = "missing"
    since_s: float = 0.0
    ended_well: bool = False  # its step
    has_failed: bool = False  # its step
    # From the gang's begin to now; with a gap only where records are left out.
    spans: list[Span] = field(default_factory=list)
    exits: dict[int, Record] = field(default_factory=dict)  # how its ranks have ended, in this generation

    @property
    def word(self) -> str:
        """What it does, or how it has ended, for people."""
        return "failed" if self.state == "left" and self.has_failed else _WORDS.get(self.state, self.state)

    @property
    def seconds(self) -> float | None:
        """How long it was in the gang; None if it has not joined."""
        spans = [span for span in self.spans if span.state != "missing"]
        return round(sum(span.end_s - span.begin_s for span in spans), 3) if spans else None

    def enter(self, state: NodeState, at_s: float) -> None:
        """Go to another state."""
        if state != self.state:
            self.close(at_s)
            self.state = state

    def close(self, at_s: float) -> None:
        """End the time that the node has been in its state."""
        if at_s > self.since_s:
            self.spans.append(Span(self.state, self.since_s, at_s))
            self.since_s = at_s


@dataclass(frozen=True)
class Rank:
    """One rank of the last launch, in its last generation."""

    rank: int
    node: int
    state: RankState
    exit_code: int | None = None  # None: it is not known, or has not ended


@dataclass(frozen=True)
class Summary:
    """What has become of a gang."""

    outcome: Outcome
    sentence: str  # the same for people
    seconds: float  # since the gang's begin
    nodes: tuple[Node, ...]
    ranks: tuple[Rank, ...]  # empty before the first launch
    cause: Record | None  # why the last launch failed, or why it restarted last
    launch: int | None  # number of the last launch
    has_started: bool  # whether its workers have, or its commands
    restarts: int  # in the last launch
    all_restarts: int  # in all launches
    is_over: bool  # whether nothing more can come
    nproc: int | None  # ranks on each node

    @cached_property
    def by_node(self) -> dict[int, list[Rank]]:
        """The ranks of each node."""
        found: dict[int, list[Rank]] = {node.index: [] for node in self.nodes}
        for rank in self.ranks:
            found[rank.node].append(rank)
        return found

    @cached_property
    def _nodes_of_ranks(self) -> dict[int, int]:
        return {rank.rank: rank.node for rank in self.ranks[::-1]}

    def node_of(self, rank: int) -> int | None:
        """Return the node of a rank; None where that is not known."""
        guess = rank // self.nproc if self.nproc else None
        place = self._nodes_of_ranks.get(rank, guess)
        return place if place in self.by_node else None


def summarize(
    records: Iterable[Record], num_nodes: int, nproc: int | None, until_s: float | None = None, first_node: int = 0
) -> Summary:
    """Return what has become of a gang.

    Parameters
    ----------
    records : Iterable[Record]
        What has happened, in order.
    num_nodes : int
        How many nodes the gang has.
    nproc : int, optional
        Ranks on each node; None: unknown, as before the first launch.
    until_s : float, optional
        Seconds since the gang's begin, for one that still runs. By default the time of the last record.
    first_node : int, default 0
        Number of the first node: that of the one node where a member has recorded itself (``node_records``).
    """
    fold = _Fold(range(first_node, first_node + num_nodes))
    for record in records:
        fold.add(record)
    return fold.summary(nproc, fold.at_s if until_s is None else max(until_s, fold.at_s))


class _Fold:
    """The gang as of the last record."""

    def __init__(self, nodes: range) -> None:
        self.known = {index: Node(index) for index in nodes}
        self.nodes = list(self.known.values())
        self.at_s = 0.0
        self.launch: int | None = None
        self.has_ranks = True  # whether that is no launch of before_run
        self.went_s: float | None = None  # when the workers first started in this launch
        self.phase: str = "joined"  # the kind of the last record that concerns the gang as a whole
        self.why: Record | None = None  # that record
        self.cause: Record | None = None
        self.failures: list[Record] = []  # of launches, and of the gang
        self.restarts = self.all_restarts = 0

    def add(self, record: Record) -> None:
        """Go on with the next record; one of a later version's kind changes nothing."""
        self.at_s = max(self.at_s, record.at_s)
        handler = getattr(self, f"_on_{record.kind}", None)
        if handler is not None and (record.node is None or record.node in self.known):
            handler(record)

    # --- what concerns one node

    def _enter(self, record: Record, state: NodeState) -> None:
        if record.node is not None:
            self.known[record.node].enter(state, record.at_s)

    def _on_joined(self, record: Record) -> None:
        self._enter(record, "own code")
        if record.node is not None:
            self.known[record.node].host = record.text

    def _on_ready(self, record: Record) -> None:
        if record.launch != self.launch:
            self.launch, self.restarts, self.went_s, self.cause = record.launch, 0, None, None
            self._forget_exits()
        self.phase = "ready"
        self._enter(record, "waiting")

    def _on_output(self, record: Record) -> None:
        self._on_started(record)  # in records of before there were `started`

    def _on_started(self, record: Record) -> None:
        if record.node is not None and self.known[record.node].state == "starting":
            self._enter(record, "running")

    def _on_exited(self, record: Record) -> None:
        if record.rank is not None and record.node is not None:
            self.known[record.node].exits[record.rank] = record

    def _forget_exits(self) -> None:
        for node in self.nodes:
            node.exits.clear()

    def _on_stopped(self, record: Record) -> None:
        self._enter(record, "stopped")

    def _on_finished(self, record: Record) -> None:
        self._enter(record, "finished")
        if record.node is not None:
            self.known[record.node].ended_well = True

    def _on_left(self, record: Record) -> None:
        self._enter(record, "left")
        if record.node is not None:
            self.known[record.node].has_failed = bool(record.text)

    def _on_omitted(self, record: Record) -> None:
        for node in self.nodes:  # what they did until then is not known
            node.since_s = max(node.since_s, record.at_s)

    def _on_lost(self, record: Record) -> None:
        self._enter(record, "lost")
        if record.node == CONTROL:
            # Others have told so. What has become of the other nodes without it, nobody has recorded.
            self.failures.append(record)
            self.cause = record
            self._all(record, "lost")
            self.phase = "broken"

    # --- what concerns the gang

    def _all(self, record: Record, state: NodeState, of: tuple[NodeState, ...] | None = None) -> None:
        self.phase, self.why = record.kind, record
        for node in self.nodes:
            if node.state in of if of is not None else node.state not in (*_GONE, "finished"):
                node.enter(state, record.at_s)

    def _on_before_run(self, record: Record) -> None:
        self._begin(record, "preparing", has_ranks=False)

    def _on_go(self, record: Record) -> None:
        self._begin(record, "starting", has_ranks=True)

    def _begin(self, record: Record, state: NodeState, has_ranks: bool) -> None:
        self.has_ranks = has_ranks
        self.launch = record.launch
        self.went_s = record.at_s if self.went_s is None else self.went_s
        self._forget_exits()
        self._all(record, state)

    def _on_stopping(self, record: Record) -> None:
        self._all(record, "stopping", _WITH_WORKERS)

    def _on_cause(self, record: Record) -> None:
        self.cause = record

    def _on_restart(self, record: Record) -> None:
        self.restarts += 1
        self.all_restarts += 1
        self._all(record, "restarting")

    def _on_done(self, record: Record) -> None:
        self._all(record, "own code")
        if not self.has_ranks:
            self.phase = "joined"  # another launch follows at once

    def _on_failed(self, record: Record) -> None:
        self.failures.append(record)
        self._all(record, "own code")

    def _on_broken(self, record: Record) -> None:
        if not self.failures or self.failures[-1].text != record.text:  # not because of the launch that has failed
            self.failures.append(record)
            self._all(record, "own code")

    # --- the end of it

    def summary(self, nproc: int | None, until_s: float) -> Summary:
        """Return what has become of the gang, `until_s` seconds after its begin."""
        is_over = bool(self.nodes) and self.nodes[0].state == "left"
        for node in self.nodes:
            if not is_over and node.state not in ("left", "lost"):
                node.close(until_s)
        outcome, sentence = self._told(until_s, nproc)
        ranks = tuple(self._rank(rank, node) for node in self.nodes for rank in _ranks_of(node, nproc))
        return Summary(
            outcome=outcome,
            sentence=sentence,
            seconds=until_s,
            nodes=tuple(self.nodes),
            ranks=ranks,
            cause=self.cause,
            launch=self.launch,
            has_started=self.went_s is not None,
            restarts=self.restarts,
            all_restarts=self.all_restarts,
            is_over=is_over,
            nproc=nproc,
        )

    def _rank(self, rank: int, node: Node) -> Rank:
        end = node.exits.get(rank)
        if end is None or end.exit_code is None:
            has_begun = self.went_s is not None and self.has_ranks and node.state != "waiting"
            after = "stopped" if has_begun else "waiting"
            return Rank(rank, node.index, _RANK_STATES.get(node.state, after))  # type: ignore[arg-type]
        cause = self.cause
        is_cause = cause is not None and (cause.rank, cause.generation) == (rank, end.generation)
        was_told = end.exit_code in _STOPPED_BY and not is_cause
        state: RankState = "done" if end.exit_code == 0 else "stopped" if was_told else "failed"
        return Rank(rank, node.index, state, end.exit_code)

    def _told(self, until_s: float, nproc: int | None) -> tuple[Outcome, str]:
        """Return the outcome, and the same in one sentence."""
        why, so_long = self.why, until_s - (self.went_s or 0.0)
        if self.phase in ("failed", "broken") and self.failures:
            return self._told_failure()
        if self.phase == "before_run":
            return "running", f"The commands of before_run run for {duration(so_long)}."
        if self.phase == "go":
            return "running", f"{self._workers(nproc)} run for {duration(so_long)}{self._after_restarts()}."
        if self.phase == "stopping" and why is not None:
            who = "workers" if self.has_ranks else "commands"
            return "stopping", _sentence(f"All {who} are told to stop", why.text)
        if self.phase == "restart" and why is not None:
            return "restarting", _sentence(
                f"All workers start again ({why.text})", self.cause.text if self.cause else ""
            )
        if self.phase == "done" and why is not None:
            took = duration(why.at_s - (self.went_s or 0.0))
            return "done", f"{self._workers(nproc)} have ended well after {took}{self._after_restarts()}."
        return "waiting", self._told_waiting()

    def _told_failure(self) -> tuple[Outcome, str]:
        first = self.failures[-1]
        text = self.cause.text if self.cause is not None else first.text
        if all(node.ended_well for node in self.nodes) and self.phase == "failed":
            return "done", _sentence(f"The step has ended well, though launch {first.launch} had failed", text)
        return "failed", _sentence(f"Failed after {duration(first.at_s)}{self._after_restarts()}", text)

    def _told_waiting(self) -> str:
        if self.nodes and self.nodes[0].index > 0:
            return f"Node {self.nodes[0].index} {_ALONE.get(self.nodes[0].state, 'has joined; its own code runs')}."
        missing = [node.index for node in self.nodes if node.state == "missing"]
        if missing:
            return (
                f"{len(self.nodes) - len(missing)} of {len(self.nodes)} nodes have joined; missing: {names(missing)}."
            )
        late = [node.index for node in self.nodes if node.state != "waiting"]
        if self.phase == "ready" and late:
            called = len(self.nodes) - len(late)
            return f"{called} of {len(self.nodes)} nodes have called run; still in their own code: {names(late)}."
        return f"{counted(len(self.nodes), 'node')} joined; the step's own code runs."

    def _workers(self, nproc: int | None) -> str:
        ranks = "The workers" if nproc is None else counted(nproc * len(self.nodes), "rank")
        alone = len(self.nodes) == 1 and self.nodes[0].index > 0
        return f"{ranks} on {names([self.nodes[0].index]) if alone else counted(len(self.nodes), 'node')}"

    def _after_restarts(self) -> str:
        return f", after {counted(self.restarts, 'restart')}" if self.restarts else ""


def _sentence(what: str, why: str) -> str:
    text = f"{what}: {why}" if why else what
    return text if text.endswith((".", "…", "!", "?")) else f"{text}."


def _ranks_of(node: Node, nproc: int | None) -> list[int]:
    """Return the ranks that a node should have; torchrun's own elasticity may have given it others."""
    expected = range(node.index * (nproc or 0), (node.index + 1) * (nproc or 0))
    return list(expected) if set(expected).issuperset(node.exits) else sorted(node.exits)
