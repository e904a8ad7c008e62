"""What is known of one attempt of a gang, as data: what ``show``, the card, ``--json`` and ``logs`` are made from.

The machine changes it where it changes its own state. It is stored as it is; ``docs/seeing.md`` lists the fields. Times are
seconds since the gang's begin, by the control node's clock.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ..machine.frames import begin_of
from .cause import Cause
from .goodput import Goodput
from .wire import from_plain

VERSION = 2  # of the stored form
State = Literal[
    "not joined yet",
    "step code",  # the step's code runs, outside of `run`
    "waiting",  # has called `run`; not all others have, or it is a spare
    "preparing",  # its commands of before_run run
    "starting",  # its agent starts the workers
    "running",  # the processes of all its workers run
    "stopping",
    "stopped",  # its workers have ended; the launch has no verdict yet
    "restarting",
    "storing",  # its step has ended well; its results are being stored
    "finished",
    "failed",
    "lost",
]
Outcome = Literal["waiting", "starting", "running", "stopping", "restarting", "done", "failed"]
_GONE = frozenset({"not joined yet", "storing", "finished", "failed", "lost"})  # no launch changes these
# How much is kept of what grows: the last ones.
_EVENTS, _SPANS, _PLACES, _REPORTS = 1000, 60, 200, 20
_OUTPUTS = 4000  # for so many nodes, over all launches, the places of outputs are kept: some hundred kilobytes
_SILENT_S = 300.0  # a view that is older than this, though workers ran, may be the last one
_REPORT_CHARS = 128 * 1024  # of each report: stacks of many ranks are long


class Presence(enum.Enum):
    """What the control node knows of a node's task."""

    ABSENT = "none is there, and one may come"
    HERE = "it is a member"
    GONE = "it has left, or is lost; nobody takes its place"
    OUT = "the gang goes on without it; a task that comes late is a spare"


@dataclass
class Happened:
    """One event: of the gang, or the same of some nodes or ranks, one after the other."""

    kind: str
    at_s: float
    time: float  # the same moment in seconds since 1970
    text: str  # a sentence; of nodes or ranks, what follows their names
    launch: int | None = None
    generation: int | None = None
    nodes: list[int] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)  # global
    exit_code: int | None = None  # of a worker or a command; negative for a signal
    until_s: float | None = None  # of the last of several
    seconds: float | None = None  # how long a command took, of several the longest


@dataclass
class NodeView:
    """One node."""

    host: str = ""
    task: str | None = None  # as run, step and task
    state: State = "not joined yet"
    takes_part: bool = True  # whether it has ranks in this generation; a spare has none
    was_lost: bool = False  # whether a task of it was: its log may lack the end, or begin anew with another task
    has_written: bool = False  # whether its workers have, in this generation
    exit_codes: dict[int, int] = field(default_factory=dict)  # by rank, of this generation
    since: list[tuple[State, float]] = field(default_factory=lambda: [("not joined yet", 0.0)])  # each with its begin


@dataclass
class Placed:
    """Which nodes have ranks from a moment on."""

    since: float  # seconds since 1970
    nodes: tuple[int, ...] = ()  # in the order of their ranks; none: no launch runs, or its nodes are unknown
    nproc: int = 1  # ranks on each


@dataclass
class FailureReport:
    """The full report of one failure."""

    at_s: float
    text: str  # with the traceback
    launch: int | None = None
    generation: int | None = None
    error: str | None = None  # the class of what all nodes raise; None where the workers start again
    cause: dict[str, Any] | None = None  # as `Cause.as_dict` has it


@dataclass
class GangView:
    """One attempt of a gang."""

    version: int = VERSION
    began: float = 0.0  # seconds since 1970
    now_s: float = 0.0  # when this was known
    is_over: bool = False  # whether the control node has left
    is_silent: bool = False  # whether nothing was stored for a while though workers ran; only `at` knows
    ended_s: float | None = None  # when the step's code had ended on all nodes
    outcome: Outcome = "waiting"
    since_s: float = 0.0  # of the outcome
    why: str = ""  # the cause of the outcome, in one line
    waits_for: str = ""  # what the gang waits for, in words
    nproc: int | None = None  # processes on each node in the last launch
    launch: int | None = None  # number of the last one that was called
    generation: int | None = None  # how often its workers were started again
    began_s: float | None = None  # when the workers of the last launch first started
    restarts_s: list[float] = field(default_factory=list)  # when workers were started again, in all launches
    restarts_left: int | None = None  # of the last launch
    error: str | None = None  # the message of the last launch's error, or of what broke the gang
    cause: dict[str, Any] | None = None  # of that, from `Cause.as_dict`
    facts: dict[str, str] = field(default_factory=dict)  # versions and devices of the control node
    command: str | None = None  # of torchrun, on the control node
    nodes: list[NodeView] = field(default_factory=list)
    events: list[Happened] = field(default_factory=list)
    left_out: int = 0  # so many events before these
    reports: list[FailureReport] = field(default_factory=list)
    placed: list[Placed] = field(default_factory=list)
    progress: dict[str, Any] | None = None  # what rank 0 has reported; see `gang.progress`
    goodput: Goodput = field(default_factory=Goodput)  # where its time went
    hangs: dict[str, Any] | None = None  # the stacks of the last hang; see `gang.stacks`
    outputs: dict[int, dict[int, Any]] = field(default_factory=dict)  # by launch and node, see `StoredOutputs`
    usage: dict[int, Any] = field(default_factory=dict)  # by node

    # --- what the machine changes -------------------------------------------------------------------

    def enter(self, state: State, nodes: Collection[int]) -> None:
        """Note that nodes are in a state now."""
        for node in (self.nodes[each] for each in nodes):
            if node.state != state:
                node.state = state
                if node.since[-1][1] >= self.now_s:  # a state that nobody sees
                    node.since.pop()
                node.since.append((state, self.now_s))
                del node.since[:-_SPANS]
                node.was_lost |= state == "lost"

    def turn(self, outcome: Outcome, why: str = "") -> None:
        """Note the outcome from now on."""
        self.outcome, self.why, self.since_s, self.waits_for = outcome, why, self.now_s, ""

    def place(self, nodes: Sequence[int], late_s: float = 0.0) -> None:
        """Note where the ranks are from now on; what was to begin later does not."""
        since = round(self.began + self.now_s, 3) + late_s
        self.placed = [each for each in self.placed if each.since < since][1 - _PLACES :]
        self.placed.append(Placed(since, tuple(nodes), self.nproc or 1))

    def add(self, kind: str, text: str, node: int | None = None, rank: int | None = None, **more: Any) -> None:
        """Add an event. One of a node or a rank joins the same of others, if nothing has happened to the gang since."""
        now = round(more.pop("at_s", self.now_s), 3)
        for each in reversed(self.events if node is not None else ()):
            if not each.nodes:
                break
            if (each.kind, each.text, each.launch) == (kind, text, more.get("launch", self.launch)):
                each.nodes += [node] if node not in each.nodes[-1:] else []  # type: ignore[list-item]
                each.ranks += [] if rank is None else [rank]
                each.until_s = now
                each.seconds = max(each.seconds or 0.0, more["seconds"]) if "seconds" in more else each.seconds
                return
        nodes, ranks = ([] if each is None else [each] for each in (node, rank))
        about = {"launch": self.launch, "generation": self.generation, "nodes": nodes, "ranks": ranks}
        self.events.append(Happened(kind, now, round(self.began + now, 3), text, **{**about, **more}))
        if len(self.events) > _EVENTS:
            del self.events[0]
            self.left_out += 1

    def report(self, text: str, error: str | None, cause: Mapping[str, Any] | None, at_s: float) -> None:
        """Keep the whole report of a failure; one of a generation is not kept twice."""
        kept = begin_of(text, _REPORT_CHARS)
        here = kept, self.launch, self.generation
        if not self.reports or here != (self.reports[-1].text, self.reports[-1].launch, self.reports[-1].generation):
            about = self.launch, self.generation, error, None if cause is None else dict(cause)
            self.reports = [*self.reports, FailureReport(round(at_s, 3), kept, *about)][-_REPORTS:]

    def take_usage(self, node: int, used: Mapping[str, Any]) -> None:
        """Keep a node's usage: the last and the highest value of each kind."""
        values = {kind: float(f"{value:.3g}") for kind, value in used["values"].items()}
        before = self.usage.get(node, {"last": {}, "highest": {}})
        highest = {kind: max(value, before["highest"].get(kind, value)) for kind, value in values.items()}
        last = {**before["last"], **values}
        self.usage[node] = {**used, "values": None, "last": last, "highest": {**before["highest"], **highest}}

    def take_outputs(self, launch: int, node: int, kept: Any) -> None:
        """Keep where a node's files of a launch are: of the last launches, as many as fit. The files stay."""
        self.outputs.setdefault(launch, {})[node] = kept
        while len(self.outputs) > 1 and sum(map(len, self.outputs.values())) > _OUTPUTS:
            del self.outputs[next(iter(self.outputs))]

    # --- what pages read ----------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        """How long the attempt has taken until now, or until the step's code had ended on all nodes."""
        return self.now_s if self.ended_s is None else self.ended_s

    def at(self, now_s: float) -> GangView:
        """Return the view for a later moment of a gang that runs; while workers do, it is stored at least each minute."""
        if self.is_over:
            return self
        if self.outcome in ("starting", "running", "stopping") and now_s - self.now_s > _SILENT_S:
            return replace(self, is_silent=True)
        return replace(self, now_s=max(now_s, self.now_s))

    @staticmethod
    def read(stored: Mapping[str, Any]) -> GangView:
        """Return what was stored by `to_plain`; raise ValueError if it is none, or of another version."""
        if stored.get("version") != VERSION:
            raise ValueError(
                f"what is stored of the gang is of another version of metaflow-torchrun: {stored.get('version')}"
            )
        found: GangView = from_plain(GangView, stored, "the view of the gang")
        return found


# --- what others say of a gang's end ------------------------------------------------------------------


@dataclass(frozen=True)
class Word:
    """A report of a gang's end that the control node has not written itself.

    The task that replaces it writes one, or the submitting process. None of them changes what the control node stored.
    """

    text: str  # its first line is how the control node has ended, if that node has not recorded it
    time: float  # in seconds since 1970
    num_nodes: int
    error: str = "TorchrunPreempted"  # the class of the error with this text


def told_by_others(view: GangView | None, words: Iterable[Word]) -> GangView | None:
    """Return the view with `words` added. The first is the gang's end if the control node has recorded none."""
    for word in words:
        missing = GangView(began=word.time, nodes=[NodeView() for _ in range(word.num_nodes)])
        view = deepcopy(view or missing)
        headline = word.text.partition("\n")[0]
        if view.is_over:
            view.add("told", "; ".join(word.text.splitlines()))
            continue
        view.now_s = max(view.now_s, round(word.time - view.began, 3))
        cause = Cause("lost", 0, view.nodes[0].host, exception=headline).as_dict()
        view.enter("lost", [0])
        # The others stop. What became of them after that is not recorded.
        view.enter("stopped", [each for each, node in enumerate(view.nodes) if each and node.state not in _GONE])
        view.add("lost", f"lost: {headline}", node=0)
        view.turn("failed", headline)
        view.report(word.text, word.error, cause, view.now_s)
        view.error, view.cause, view.is_over = word.text, cause, True
    return view
