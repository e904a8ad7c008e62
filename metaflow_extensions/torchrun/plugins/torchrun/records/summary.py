"""Summarizes a gang's records: the outcome, each node with its times, each rank. Pure.

All pages and commands use this summary, while the gang runs and later.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from ..gang.history import Record
from ..gang.messages import CONTROL
from ..gang.texts import counted, duration, names
from .placement import LATE_S, Placed, Placement

NodeState = Literal[
    "not joined yet",
    "step code",  # the step's code runs, outside of `run`
    "waiting",  # has called `run`; not all others have
    "preparing",  # its commands of before_run run
    "starting",  # its workers start, and no rank of the gang has shown a sign of life yet
    "running",
    "stopping",
    "stopped",  # its workers have ended; the launch has no verdict yet
    "restarting",
    "finished",  # its step has ended well; its results are being stored
    "left",
    "lost",
]
RankState = Literal["waiting", "starting", "running", "stopping", "restarting", "done", "failed", "stopped", "lost"]
Outcome = Literal["waiting", "starting", "running", "stopping", "restarting", "done", "failed"]

# The state of a node after a record of its own, and of all nodes after a record of the gang.
_OF_NODE: dict[str, NodeState] = {
    "joined": "step code",
    "before_run": "preparing",
    "ready": "waiting",
    "stopped": "stopped",
    "finished": "finished",
    "left": "left",
    "lost": "lost",
    "spare": "waiting",
    "left_out": "lost",
    "awaited": "lost",
}
_OF_ALL: dict[str, NodeState] = {
    "go": "starting",
    "restart": "restarting",
    "done": "step code",
    "failed": "step code",
}
_OF_SPARES_TOO: tuple[NodeState, ...] = ("step code", "lost")
_OUT_OF_IT: tuple[NodeState, ...] = ("not joined yet", "finished", "left", "lost")  # no launch changes these
_WITH_WORKERS: tuple[NodeState, ...] = ("starting", "running")
# The exit codes of a worker that the gang has stopped: SIGTERM, or SIGKILL if it did not end.
_STOPPED_BY = (-15, -9)
_RANK_STATES: dict[NodeState, RankState] = {
    "preparing": "waiting",
    "starting": "starting",
    "running": "running",
    "stopping": "stopping",
    "restarting": "restarting",
    "lost": "lost",
}
_WORDS: dict[NodeState, str] = {"finished": "storing", "left": "finished"}


@dataclass(frozen=True)
class Span:
    """A time in which a node was in one state; seconds since the gang's start."""

    state: NodeState
    begin_s: float
    end_s: float


@dataclass
class Node:
    """One node of the gang."""

    index: int
    host: str = ""
    state: NodeState = "not joined yet"
    since_s: float = 0.0
    ended_well: bool = False  # its step
    has_failed: bool = False  # its step
    command_failed: bool = False  # one of before_run, in this launch
    is_out: bool = False  # whether the gang goes on without it
    is_awaited: bool = False  # whether another task is to come in its place
    has_workers: bool = False  # whether all its workers have begun, in this generation
    takes_part: bool = True  # whether it has ranks in this generation; a spare has none
    was_lost: bool = False  # whether a task of it was: its log may lack the end, or begin anew with another task
    # From the gang's start to now; they have a gap only where records were omitted.
    spans: list[Span] = field(default_factory=list)
    exits: dict[int, Record] = field(default_factory=dict)  # rank -> how it has ended in this generation

    @property
    def word(self) -> str:
        """The state, or how the node has ended, for people."""
        return "failed" if self.state == "left" and self.has_failed else _WORDS.get(self.state, self.state)

    @property
    def seconds(self) -> float | None:
        """How long the node was in the gang; None if it has not joined."""
        spans = [span for span in self.spans if span.state != "not joined yet"]
        return round(sum(span.end_s - span.begin_s for span in spans), 3) if spans else None

    def enter(self, state: NodeState, at_s: float) -> None:
        """Change the state."""
        if state != self.state:
            self.close(at_s)
            self.state = state

    def close(self, at_s: float) -> None:
        """Record the time in the current state as a span."""
        if at_s > self.since_s:
            self.spans.append(Span(self.state, self.since_s, at_s))
            self.since_s = at_s

    def cut(self, at_s: float) -> None:
        """Forget what was after the step's end."""
        self.spans = [replace(span, end_s=min(span.end_s, at_s)) for span in self.spans if span.begin_s < at_s]


@dataclass(frozen=True)
class Rank:
    """One rank of the last launch, in its last generation."""

    rank: int
    node: int
    state: RankState
    exit_code: int | None = None  # None: unknown, or the rank has not ended


@dataclass(frozen=True)
class Summary:
    """The state or outcome of a gang, of its nodes and of its ranks."""

    outcome: Outcome
    sentence: str  # the outcome for people
    seconds: float  # of the whole attempt until now, or until the step's code has ended on all nodes
    trained_s: float | None  # of the last launch, from its start to now or its end; None before that
    nodes: tuple[Node, ...]
    ranks: tuple[Rank, ...]  # empty before the first launch
    launch: int | None  # number of the last launch
    has_started: bool  # whether its workers have started
    restarts_s: tuple[float, ...]  # when the workers were started again, in all launches
    is_over: bool  # whether no more records can come
    nproc: int | None  # ranks on each node
    placed: tuple[Placed, ...]  # where the ranks of all launches and generations were

    @property
    def is_alone(self) -> bool:
        """Whether the gang has one node, whose number says nothing."""
        return len(self.nodes) == 1

    @cached_property
    def by_node(self) -> dict[int, list[Rank]]:
        """The ranks of each node."""
        found: dict[int, list[Rank]] = {node.index: [] for node in self.nodes}
        for rank in self.ranks:
            found[rank.node].append(rank)
        return found

    @cached_property
    def placement(self) -> Placement:
        """Which node had a rank at a time."""
        return Placement(self.placed)


def summarize(records: Iterable[Record], num_nodes: int, nproc: int | None, until_s: float | None = None) -> Summary:
    """Return the summary of the records of a gang.

    `nproc` is None if it is unknown, as before the first launch. For a running gang, `until_s` is the current time in
    seconds since its start.
    """
    fold = _Fold(num_nodes, nproc)
    for record in records:
        fold.add(record)
    return fold.summary(fold.at_s if until_s is None else max(until_s, fold.at_s))


class _Fold:
    """The state of the gang after the last record."""

    def __init__(self, num_nodes: int, nproc: int | None) -> None:
        self.known = {index: Node(index) for index in range(num_nodes)}
        self.nodes, self.nproc = tuple(self.known.values()), nproc
        self.at_s = 0.0
        self.launch: int | None = None
        self.went_s: float | None = None  # when the workers first started in this launch
        self.is_alive = False  # whether a rank has shown a sign of life in this generation
        self.ended_s: float | None = None  # when the step's code had ended on all nodes
        self.phase = "joined"  # the kind of the last record that concerns the gang as a whole
        self.phase_text, self.phase_s = "", 0.0  # text and time of that record
        self.cause: Record | None = None
        self.failures: list[Record] = []  # of launches, and of the gang
        self.restarts = 0  # of this launch
        self.restarts_s: list[float] = []
        self.placed: list[Placed] = []
        self.last_go = (0, 0)  # launch and generation

    def add(self, record: Record) -> None:
        """Add the next record; an unknown kind (of a later version) or an unknown node changes nothing."""
        self.at_s = max(self.at_s, record.at_s)
        if record.node is None:
            self._add_of_gang(record)
        elif record.kind == "cause":
            self.cause = record
        elif record.node in self.known:
            self._add_of_node(record, self.known[record.node])

    def _add_of_node(self, record: Record, node: Node) -> None:
        match record.kind:
            case "joined":
                node.host, node.is_awaited, node.is_out = record.text, False, False
            case "before_run" | "ready":
                self._call(record)
                node.command_failed = False
            case "command":
                node.command_failed = record.exit_code != 0
            case "started" | "output":
                self._hear_of_workers(record, node)
            case "exited":
                self._hear_of_workers(record, node)
                if record.rank is not None:
                    node.exits[record.rank] = record
            case "finished":
                node.ended_well = True
            case "left":
                node.has_failed = bool(record.text)
            case "spare" | "taken_in":
                node.takes_part = record.kind == "taken_in"
            case "left_out":
                node.is_out = node.was_lost = True
            case "dismissed":
                node.is_out = True
            case "awaited":
                node.is_awaited = node.was_lost = True
            case "lost" if record.node != CONTROL:
                node.was_lost = True
            case _ if record.rank is not None:  # a feature's, such as the first step that rank 0 reports
                self._hear_of_workers(record, node)
            case "lost" if record.node == CONTROL:
                # Reported by others. The fate of the other nodes after that is not recorded.
                self.cause = record
                self._fail(record, "lost")
        if record.kind in _OF_NODE and (record.kind, node.state) != ("stopped", "lost"):
            node.enter(_OF_NODE[record.kind], record.at_s)
        if record.kind == "finished" and all(each.ended_well or each.is_out for each in self.nodes):
            self.ended_s = record.at_s

    def _hear_of_workers(self, record: Record, node: Node) -> None:
        """Let nodes run. Often rank 0 alone writes, so one sign of life counts for all nodes whose workers have begun."""
        node.has_workers = True
        self.is_alive |= record.kind != "started"
        for each in self.nodes if self.is_alive else ():
            if each.state == "starting" and each.has_workers:
                each.enter("running", record.at_s)

    def _call(self, record: Record) -> None:
        """Handle that a node has called `run`; the first call of a launch resets its state."""
        if record.launch != self.launch:
            self.launch, self.restarts, self.went_s, self.cause = record.launch, 0, None, None
            self._forget_workers()
            for node in self.nodes:
                node.takes_part = not node.is_out
        elif self.went_s is not None:
            return  # of a task in the place of a lost node, while the others train
        self.phase = "ready"

    def _add_of_gang(self, record: Record) -> None:
        match record.kind:
            case "go":
                self.launch = record.launch
                members = None if record.group is None else set(record.group.nodes)  # older versions have none
                for node in self.nodes:
                    takes_part = node.takes_part and not node.is_out and not node.is_awaited
                    node.takes_part = takes_part if members is None else node.index in members
                self.went_s = record.at_s if self.went_s is None else self.went_s
                self._forget_workers()
                nodes = tuple(node.index for node in self._taking_part)
                start = (record.launch or 0, record.generation or 0)
                if self.placed and start not in ((self.last_go[0], self.last_go[1] + 1), (self.last_go[0] + 1, 0)):
                    self._place(Placed(self.placed[-1].since))  # *go* between were dropped
                self.last_go = start
                self._place(Placed(record.time, nodes, record.nproc or self.nproc or 1))
            case "stopping":
                self._enter_phase(record, "stopping", [node for node in self.nodes if node.state in _WITH_WORKERS])
            case "cause":
                self.cause = record
            case "restart":
                self.restarts += 1
                self.restarts_s.append(record.at_s)
            case "failed":
                self.failures.append(record)
            case "broken":
                # The failed launch may be the reason; then this is the same failure.
                if not self.failures or self.failures[-1].text != record.text:
                    self._fail(record, "step code")
            case "omitted":
                for node in self.nodes:  # their states until then are unknown
                    node.since_s = max(node.since_s, record.at_s)
        if record.kind in _OF_ALL:
            self._enter_phase(record, _OF_ALL[record.kind])
        if record.kind in ("done", "failed", "broken"):
            self._place(Placed(record.time + LATE_S))

    def _place(self, placed: Placed) -> None:
        """Note where the ranks are from now on; what was to begin later does not."""
        while self.placed and self.placed[-1].since >= placed.since:
            self.placed.pop()
        self.placed.append(placed)

    def _enter_phase(self, record: Record, state: NodeState, nodes: Iterable[Node] | None = None) -> None:
        self.phase, self.phase_text, self.phase_s = record.kind, record.text, record.at_s
        for node in self.nodes if nodes is None else nodes:
            if node.state not in _OUT_OF_IT and (node.takes_part or state in _OF_SPARES_TOO):
                node.enter(state, record.at_s)

    def _fail(self, record: Record, state: NodeState) -> None:
        """End the gang."""
        self.failures.append(record)
        self._enter_phase(record, state)
        self.phase = "broken"

    def _forget_workers(self) -> None:
        self.is_alive = False
        for node in self.nodes:
            node.has_workers = False
            node.exits.clear()

    # --- the result

    def summary(self, until_s: float) -> Summary:
        """Return the summary, `until_s` seconds after the gang's start."""
        is_over = self._is_over
        for node in self.nodes:
            if not is_over and node.state not in ("left", "lost"):
                node.close(until_s)
        if self.ended_s is not None:
            until_s = self.ended_s
            for node in self.nodes:
                node.cut(until_s)
        outcome, sentence = self._told(until_s)
        nproc = self.nproc or 0
        ranks = tuple(
            self._rank(first * nproc + local, node)
            for first, node in enumerate(self._taking_part)
            for local in range(nproc)
        )
        return Summary(
            outcome=outcome,
            sentence=sentence,
            seconds=until_s,
            trained_s=self._trained_s(until_s),
            nodes=self.nodes,
            ranks=ranks,
            launch=self.launch,
            has_started=self.went_s is not None,
            restarts_s=tuple(self.restarts_s),
            is_over=is_over,
            nproc=self.nproc,
            placed=tuple(self.placed),
        )

    def _rank(self, rank: int, node: Node) -> Rank:
        end = node.exits.get(rank)
        if end is None or end.exit_code is None:
            has_begun = self.went_s is not None and node.state != "waiting"
            return Rank(rank, node.index, _RANK_STATES.get(node.state, "stopped" if has_begun else "waiting"))
        cause = self.cause
        is_cause = cause is not None and (cause.rank, cause.generation) == (rank, end.generation)
        was_told = end.exit_code in _STOPPED_BY and not is_cause
        state: RankState = "done" if end.exit_code == 0 else "stopped" if was_told else "failed"
        return Rank(rank, node.index, state, end.exit_code)

    def _trained_s(self, until_s: float) -> float | None:
        """Return how long the last launch has taken, or takes until now."""
        if self.went_s is None:
            return None
        if self.phase in ("failed", "broken"):
            until_s = self.failures[-1].at_s
        return (self.phase_s if self.phase == "done" else until_s) - self.went_s

    def _took(self, until_s: float) -> str:
        """Return the durations that a page tells: of the last launch, and with the start, where that was for it alone."""
        trained = f"trained {duration(self._trained_s(until_s) or 0.0)}"
        is_last = self.launch == 0 and (self.phase == "go" or self._is_over or self.ended_s is not None)
        return f"{trained}, with start {duration(until_s)}" if is_last else trained

    def _told(self, until_s: float) -> tuple[Outcome, str]:
        """Return the outcome, and a sentence for people."""
        took = self._took(until_s)
        match self.phase:
            case "failed" | "broken":
                return self._told_failure(until_s)
            case "go" if not any(node.state == "running" for node in self._taking_part):
                since = duration(until_s - self.phase_s)
                return "starting", f"{self._workers()} {self._are} starting, for {since}{self._after_restarts()}."
            case "go":
                return "running", f"{self._workers()} {self._have} {took}{self._after_restarts()}."
            case "stopping":
                return "stopping", _sentence("All nodes are told to stop", self.phase_text)
            case "restart":
                why = self.cause.text if self.cause else ""
                return "restarting", _sentence(f"All workers start again ({self.phase_text})", why)
            case "done":
                return "done", f"{self._workers()} {self._have} ended well{self._after_restarts()}: {took}."
        if failed := [node.index for node in self.nodes if node.command_failed]:
            return (
                "waiting",
                f"before_run has failed{self._on(failed)}; the launch ends when all nodes have called run.",
            )
        if prepare := [node.index for node in self.nodes if node.state == "preparing"]:
            return "running", f"The commands of before_run run{self._on(prepare)}."
        return "waiting", self._told_waiting()

    def _on(self, nodes: list[int]) -> str:
        return f" on {names(nodes)}" if len(self.nodes) > 1 else ""

    def _told_failure(self, until_s: float) -> tuple[Outcome, str]:
        last = self.failures[-1]
        text = self.cause.text if self.cause is not None else last.text
        if all(node.ended_well for node in self.nodes if not node.is_out) and self.phase == "failed":
            return "done", _sentence(f"The step has ended well, though launch {last.launch} had failed", text)
        took = f"after {duration(last.at_s)}" if self.went_s is None else f"({self._took(until_s)})"
        return "failed", _sentence(f"Failed {took}{self._after_restarts()}", text)

    def _told_waiting(self) -> str:
        nodes = [node for node in self.nodes if not node.is_out]
        missing = [node.index for node in nodes if node.state == "not joined yet"]
        if missing:
            return f"{len(nodes) - len(missing)} of {len(nodes)} nodes have joined; not joined yet: {names(missing)}."
        late = [node.index for node in nodes if node.state != "waiting"]
        if self.phase == "ready" and late:
            called = len(nodes) - len(late)
            return f"{called} of {len(nodes)} nodes have called run; still in the step's code: {names(late)}."
        return f"{counted(len(nodes), 'node')} joined; the step's code runs."

    @property
    def _is_over(self) -> bool:
        return bool(self.nodes) and self.nodes[0].state == "left"

    @property
    def _taking_part(self) -> list[Node]:
        return [node for node in self.nodes if node.takes_part]

    def _workers(self) -> str:
        count = len(self._taking_part)
        ranks = "The workers" if self.nproc is None else counted(self.nproc * count, "rank")
        return f"{ranks} on {counted(count, 'node')}"

    @property
    def _is_one(self) -> bool:
        return self.nproc is not None and self.nproc * len(self._taking_part) == 1

    @property
    def _have(self) -> str:
        return "has" if self._is_one else "have"

    @property
    def _are(self) -> str:
        return "is" if self._is_one else "are"

    def _after_restarts(self) -> str:
        return f", after {counted(self.restarts, 'restart')}" if self.restarts else ""


def _sentence(what: str, why: str) -> str:
    text = f"{what}: {why}" if why else what
    return text if text.endswith((".", "…", "!", "?")) else f"{text}."
