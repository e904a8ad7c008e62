"""What the control node knows of one launch, and what it tells of its end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from .errors import GangError, LaunchFailed, LaunchHung, LaunchTimeout, TorchrunError, TorchrunPreempted
from .failure import Cause, DatedCause, first_cause, first_dated
from .policy import LaunchPolicy

Message = dict[str, Any]

CONTROL = 0
"""Index of the control node."""

# Who waits for another node is told so after the first, then each time after the second.
QUIET_S = 10.0
REMIND_S = 30.0

Phase = Literal["gathering", "running", "storing", "stopping", "over"]
"""``storing``: all workers have ended well, and what they have returned is on its way to the datastore."""

# Facts of *ready* that must be the same on every node, and how to call them.
_MUST_AGREE = {
    "launch": "launch number",
    "devices": "kind of accelerators",
    "nproc": "processes per node",
    "torch": "torch version",
    "cuda": "CUDA version that torch was built for",
    "nccl": "NCCL version",
    "python": "Python version",
    "digest": "entrypoint and torchrun options",
    "contents": "contents of the entrypoint",
}
_HEADLINE = 300  # characters
_LISTED = 8  # numbers, ranges of numbers, or values
_EVIDENCE_LINES = 64
_NODES_SAID = 3


@dataclass
class Launch:
    """One launch as the control node knows it."""

    number: int
    phase: Phase = "gathering"
    ready: dict[int, Message] = field(default_factory=dict)
    generation: int = 0
    moves: int = 0
    ended: dict[int, Message] = field(default_factory=dict)
    causes: list[DatedCause] = field(default_factory=list)
    dropped: set[int] = field(default_factory=set)  # nodes that an elastic launch goes on without
    given_up: set[int] = field(default_factory=set)  # nodes whose own code has ended their call of `run`
    policy: LaunchPolicy = field(default_factory=LaunchPolicy)
    went_at: float = 0.0
    active_at: float = 0.0
    deadline: float = float("inf")
    stop_by: float = float("inf")
    restart_at: float | None = None
    remind_at: float = float("inf")
    stores: dict[int, str] = field(default_factory=dict)  # nodes whose workers have ended -> what they store
    stores_since: float = 0.0
    say_stores_at: float = float("inf")
    uploaded: dict[str, str] = field(default_factory=dict)  # global rank -> key

    @property
    def restarts(self) -> int:
        """How often the gang was restarted because of a failure; a move to another port is none."""
        return self.generation - self.moves

    def note_ready(self, node: int, message: Message) -> None:
        """Take a node's *ready*. Of thousands that say the same, which they should, it is kept once."""
        if node != CONTROL:
            message = {key: value for key, value in message.items() if key != "policy"}  # the control node's counts
        last = next(reversed(self.ready.values()), None)
        self.ready[node] = last if last == message else message

    def note_cause(self, dated: DatedCause) -> None:
        """Take a failure. Of thousands, whose texts take hundreds of megabytes, those are kept that may be wanted."""
        self.causes.append(dated)
        if self.policy.min_nodes is None:  # where the launch may go on, each node's own is wanted
            preempted = first_dated(each for each in self.causes if each.cause.category == "preempted")
            kept = (first_dated(self.causes), preempted)
            self.causes = [each for each in dict.fromkeys(kept) if each is not None]

    @property
    def preempted(self) -> Cause | None:
        """The first preemption of a node in this generation, be it the first cause or not; it will not come back."""
        return first_cause(dated for dated in self.causes if dated.cause.category == "preempted")

    def can_go_on_with(self, nodes: Sequence[int]) -> bool:
        """Tell whether an elastic launch can do with `nodes` alone; the control node hosts its store."""
        wanted = self.policy.min_nodes
        return wanted is not None and self.phase == "running" and CONTROL in nodes and len(nodes) >= wanted

    def cause_of(self, node: int) -> Cause | None:
        """Return the failure of one node, or None."""
        return first_cause(dated for dated in self.causes if dated.cause.node == node)

    def contradiction(self) -> TorchrunError | None:
        """Return what keeps the nodes from working together, naming nodes and values, or None."""
        for key, name in _MUST_AGREE.items():
            values: dict[Any, list[int]] = {}
            for node in sorted(self.ready):
                values.setdefault(self.ready[node].get(key), []).append(node)
            if len(values) > 1:
                said = [f"{names(nodes)}: {value}" for value, nodes in values.items()]
                more = f" and {len(said) - _LISTED} more values" if len(said) > _LISTED else ""
                listed = ", ".join(said[:_LISTED]) + more
                return GangError(
                    f"The nodes differ in the {name} ({listed}). Every node must call current.torch.run in the same order "
                    "with the same settings, on the same software and kind of devices."
                )
        return None

    def overrun(self, now: float) -> tuple[str, str] | None:
        """Return kind and text of the limit that the generation has passed, or None."""
        policy = self.policy
        if now > self.deadline:
            stores = self.who_stores(now) if self.phase == "storing" else ""
            return "timeout", "longer than the step's @timeout allows" + (f"; {stores}" if stores else "")
        if self.phase == "storing":
            return None  # no worker is left that could hang or take too long
        if policy.timeout_s is not None and now - self.went_at > policy.timeout_s:
            return "timeout", f"longer than {policy.timeout_s:g} s"
        if policy.hang_timeout_s is not None and now - self.active_at > policy.hang_timeout_s:
            return "hang", f"no rank wrote anything or exited for {policy.hang_timeout_s:g} s"
        return None

    def first_cause(self) -> Cause | None:
        """Return the failure that started it all; of a hang with what the nodes have found."""
        cause = first_cause(self.causes)
        return replace(cause, detail=self._evidence()) if cause is not None and cause.kind == "hang" else cause

    def _evidence(self) -> str:
        """Return where every rank was when the launch hung, and where the evidence lies."""
        found = {node: message["evidence"] for node, message in sorted(self.ended.items()) if message.get("evidence")}
        where = sorted((int(rank), place) for evidence in found.values() for rank, place in evidence["where"].items())
        files = [
            f"Stacks of node {node} (host {evidence['host']}): {evidence['file'] or 'in its log only'}"
            for node, evidence in found.items()
        ]
        return "\n".join(_first_lines(_places(where)) + _first_lines(files))

    def who_stores(self, now: float, besides: int | None = None) -> str:
        """Say which nodes store what."""
        said = [f"node {node} stores {what}" for node, what in sorted(self.stores.items()) if node != besides]
        more = f"; so do {len(said) - _NODES_SAID} other nodes" if len(said) > _NODES_SAID else ""
        since = f" (for {now - self.stores_since:.0f} s so far)"
        return "; ".join(said[:_NODES_SAID]) + more + since if said else ""

    def deposits(self, node: int, error: TorchrunError | None) -> dict[str, str]:
        """Return what `node` needs to find of what a function's ranks have left in the datastore: global rank -> key.

        That is what the cause has raised or, on the control node alone, what all ranks have returned.
        """
        if error is None:
            return self.uploaded if node == CONTROL else {}
        rank = str((error.cause or {}).get("rank"))
        return {rank: self.uploaded[rank]} if rank in self.uploaded else {}

    def error(self, cause: Cause | None, silent: list[int]) -> LaunchFailed:
        """Return what every node raises after a failed launch; `silent` nodes did not report their end."""
        quiet = f"\nNo word came from {names(silent)} about their end." if silent else ""
        if cause is None:
            return LaunchFailed(f"Launch {self.number} failed.{quiet}")
        cls, text = self._class_and_text(cause)
        return cls(f"{text}{quiet}" + (f"\n{cls.remedy}" if cls is TorchrunPreempted else ""), cause.to_wire())

    def dropped_error(self, node: int) -> LaunchFailed:
        """Return what a node raises that an elastic launch goes on without."""
        goes_on = f"Launch {self.number} goes on without it, by torchrun's own elasticity."
        cause = self.cause_of(node)
        if cause is None:
            return LaunchFailed(f"Node {node} failed. {goes_on}")
        return class_of(cause)(f"{cause.describe()}\n{goes_on}", cause.to_wire())

    def _class_and_text(self, cause: Cause) -> tuple[type[LaunchFailed], str]:
        stopped = f"Launch {self.number} was stopped"
        if cause.kind == "timeout":
            remedy = "run(timeout_s=...) and the step's @timeout change how long it may run."
            return LaunchTimeout, f"{stopped}: it ran {cause.exception}. {remedy}"
        if cause.kind == "step_timeout":
            return LaunchTimeout, f"{stopped}: {cause.who} {cause.what}."
        if cause.kind == "hang":
            remedy = "hang_timeout_s changes how long they may be silent."
            return LaunchHung, f"{stopped}: {cause.exception}. {remedy}\n{cause.detail}"
        if cause.kind == "store":
            remedy = (
                "If the datastore is well, return less: a function can store large results itself and return where."
            )
            return LaunchFailed, f"{cause.describe()}\n{stopped} on all nodes; its workers had ended well. {remedy}"
        if cause.category == "preempted":
            saved = sorted(rank for message in self.ended.values() for rank in message.get("ended_well", ()))
            ended = shortened(saved) or "none"
            text = f"{cause.describe()}\n{stopped} on all nodes. Ranks that exited with code 0 in time: {ended}."
            return TorchrunPreempted, text
        count = f" after {self.restarts} restarts" if self.restarts else ""
        text = f"{cause.describe()}\n{stopped} on all nodes{count} (class of the cause: {cause.category})."
        if self.preempted is not None:
            text += f" Meanwhile {self.preempted.who} {self.preempted.what}."
        return LaunchFailed, text


def class_of(cause: Cause) -> type[LaunchFailed]:
    """Return the error's class for a node that failed outside of its workers."""
    return {"preempted": TorchrunPreempted, "timeout": LaunchTimeout}.get(cause.category, LaunchFailed)


def names(numbers: Iterable[int], what: str = "node") -> str:
    """Return ``"node 1"``, ``"nodes 1, 2"``, or of many ``"nodes 1-37, 40 and 12 more"``."""
    given = list(numbers)
    return f"{what} {shortened(given)}" if len(given) == 1 else f"{what}s {shortened(given)}"


def shortened(numbers: Iterable[int]) -> str:
    """Return a list of numbers for people, with those that follow each other as a range if they are many."""
    given = sorted(numbers)
    if len(given) <= _LISTED:
        return ", ".join(map(str, given))
    ranges: list[list[int]] = []
    for number in given:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    said = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges[:_LISTED])
    more = sum(last - first + 1 for first, last in ranges[_LISTED:])
    return f"{said} and {more} more" if more else said


def _places(where: list[tuple[int, str]]) -> list[str]:
    """Say where each rank was; of many, those at the same place together."""
    if len(where) <= _EVIDENCE_LINES:
        return [f"Rank {rank} was at {place}." for rank, place in where]
    at: dict[str, list[int]] = {}
    for rank, place in where:
        at.setdefault(place, []).append(rank)
    return [f"{names(at[place], 'Rank')} {'was' if len(at[place]) == 1 else 'were'} at {place}." for place in at]


def _first_lines(lines: list[str]) -> list[str]:
    more = len(lines) - _EVIDENCE_LINES
    return [*lines[:_EVIDENCE_LINES], f"{more} more such lines are left out."] if more > 0 else lines


def teller(cause: Cause | None) -> int:
    """Return the node whose log tells the most of a failure: its own, unless it can't or all are concerned."""
    return CONTROL if cause is None or cause.kind in ("lost", "timeout", "hang") else cause.node


def headline(cause: Cause | None) -> str:
    """Return who failed and how in one line, for the logs; empty if the control node has said so itself."""
    if cause is None or (cause.node == CONTROL and cause.kind not in ("timeout", "hang")):
        return ""
    line = f"{cause.who} {cause.what}".splitlines()[0]
    return line if len(line) <= _HEADLINE else line[:_HEADLINE] + "…"
