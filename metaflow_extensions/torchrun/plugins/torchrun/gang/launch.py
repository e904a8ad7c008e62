"""The state of one launch on the control node, and the error with which it ends.

A launch is in one `Phase` at a time, and `Launch.enter` is the only way to another.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import LaunchFailed, LaunchHung, LaunchTimeout, TorchrunError, TorchrunPreempted
from .cause import CATEGORY_TEXTS, Cause, Failure, FailureText, cause_of, failed, first_failure
from .group import Group
from .history import Record, of_the_gang
from .policy import LaunchPolicy
from .protocol import CONTROL, Ended, Prepares, Ready, Verdict
from .texts import REMIND_S, counted, headline, names, shortened

BACKOFF_LIMIT_S = 30.0
"""The longest pause before a restart."""
# What an agent prints when its store can't listen (TCPStore, torch 2.13).
_PORT_TAKEN = re.compile("EADDRINUSE|address already in use", re.IGNORECASE)
_MAX_MOVES = 3
GONE = frozenset({"node_lost", "preempted"})
"""The classes of causes with which a node is gone, or about to go."""
_NODES_SAID = 3
# Kinds of causes that no node reports as its failure.
_FOUND_BY_CONTROL = ("timeout", "hang", "unreachable")


class Phase(enum.Enum):
    """Where a launch stands."""

    GATHERING = "waits until all nodes are ready"
    RUNNING = "the workers run"
    STORING = "all ended well; what the workers left is stored"
    STOPPING = "the workers are told to stop"
    PAUSING = "no worker is left; a restart follows after a pause"
    SAVING = "it has failed; what its workers left is stored"
    OVER = "every node knows how it ended"


NEXT = {
    Phase.GATHERING: {Phase.RUNNING, Phase.OVER},
    Phase.RUNNING: {Phase.STORING, Phase.STOPPING, Phase.SAVING, Phase.OVER},
    Phase.STORING: {Phase.STOPPING, Phase.OVER},
    Phase.STOPPING: {Phase.PAUSING, Phase.RUNNING, Phase.STORING, Phase.SAVING, Phase.OVER},
    Phase.PAUSING: {Phase.RUNNING, Phase.SAVING, Phase.OVER},
    Phase.SAVING: {Phase.OVER},
    Phase.OVER: set[Phase](),
}


@dataclass
class Launch:
    """One launch as the control node knows it; all times are seconds of the gang's clock."""

    number: int
    phase: Phase = Phase.GATHERING
    is_alone: bool = False  # whether the gang has one node
    mark: int = 0  # how many records of the gang's history are older than it
    preparing: dict[int, Prepares] = field(default_factory=dict)  # nodes whose commands of before_run run
    without_commands: set[int] = field(default_factory=set)  # those of them whose commands have failed
    ready: dict[int, Ready] = field(default_factory=dict)
    generation: int = 0
    group: Group = field(default_factory=lambda: Group(0))  # the nodes of this generation; before the first, none
    moves: int = 0  # generations that began because the rendezvous' port was taken
    uncounted: int = 0  # restarts that `max_restarts` does not count, such as after a node was told to end
    ended: dict[int, Ended] = field(default_factory=dict)  # without what failed, which is in `failures`
    failures: list[Failure] = field(default_factory=list)  # ages as of the clock's zero, so that they compare
    alike: dict[int, set[int]] = field(default_factory=dict)  # hash of the way in which ranks failed -> those ranks
    announced: Group | None = None  # the nodes that the last *restart* has named, and
    left: tuple[int, ...] = ()  # those that it has named as gone
    ending: set[int] = field(default_factory=set)  # lost nodes whose supervisor still ends the workers
    lost: set[int] = field(default_factory=set)  # nodes of this generation that were left out, or wait for another task
    restarts_for: Cause | None = None  # why the last restart follows
    verdict: TorchrunError | None = None  # the error at its end; None while it runs, or if it succeeded
    given_up: set[int] = field(default_factory=set)  # nodes whose own code has ended their call of `run`
    leaving: dict[int, Cause] = field(default_factory=dict)  # nodes that were told to end
    policy: LaunchPolicy = field(default_factory=LaunchPolicy)
    went_at: float = 0.0
    deadline: float = float("inf")  # of the step, and
    longer: str = ""  # how it is told: see `Rules`
    until: float = float("inf")  # deadline of STOPPING, PAUSING or SAVING
    remind_at: float = float("inf")  # when to log next what the launch waits for
    stores: dict[int, str] = field(default_factory=dict)  # while STORING or SAVING: node -> what it still stores
    stores_since: float = 0.0
    failing_with: TorchrunError | None = None  # while SAVING: the error it will end with

    def enter(self, phase: Phase) -> None:
        """Go to another phase."""
        assert phase in NEXT[self.phase], f"a launch can't go from {self.phase.name} to {phase.name}"
        self.phase = phase

    def begin_generation(self, now: float, group: Group) -> None:
        """Begin a generation: forget the ends and failures of the one before."""
        self.enter(Phase.RUNNING)
        self.went_at, self.group = now, group
        for each in (self.ended, self.stores, self.failures, self.alike, self.lost, self.ending):
            each.clear()

    def begin_pause(self, now: float, pause_s: float) -> float:
        """All workers are gone; they start again `pause_s` seconds after the failure. Return how much of it is left.

        The seconds in which the workers were stopped count, so that a restart waits no longer than it has to.
        """
        first = first_failure(self.failures)
        left_s = pause_s if first is None else min(max(pause_s - (first.age_s + now), 0.0), pause_s)
        self.enter(Phase.PAUSING)
        self.restarts_for = self.first_cause()
        self.failures.clear()  # they are dealt with; what fails in the pause is another cause
        self.generation += 1
        self.until = now + left_s
        return round(left_s, 1)

    def begin_storing(self, nodes: Iterable[int], error: TorchrunError | None, now: float, until: float) -> None:
        """Wait until `nodes` have stored what there is; if the launch fails with `error`, until the time `until`."""
        self.enter(Phase.STORING if error is None else Phase.SAVING)
        self.failing_with, self.until = error, until
        self.stores = dict.fromkeys(nodes, "what its workers have left")
        self.stores_since, self.remind_at = now, now + REMIND_S

    @property
    def nproc(self) -> int | None:
        """Processes on each node; None before the control node has called `run`."""
        call = self.call_of(CONTROL)
        return None if call is None else call.nproc

    @property
    def restarts(self) -> int:
        """How often the gang was restarted because of a failure; a move to another port does not count."""
        return self.generation - self.moves

    @property
    def restarts_left(self) -> int | None:
        """How many restarts are left; None before the control node is ready."""
        ready = self.ready.get(CONTROL)
        policy = None if ready is None else ready.policy
        return None if policy is None else policy.max_restarts + self.uncounted - self.restarts

    @property
    def limit(self) -> int:
        """How many restarts there may be, with those that do not count."""
        return self.policy.max_restarts + self.uncounted

    @property
    def backoff_s(self) -> float:
        """How long to wait before a restart: twice as long as before the last one that counts."""
        return min(2.0 ** min(self.restarts - self.uncounted, 10), BACKOFF_LIMIT_S)

    def takes_part(self, node: int) -> bool:
        """Return whether a node belongs to this generation."""
        return self.group.rank_of(node) is not None

    def call_of(self, node: int) -> Ready | Prepares | None:
        """Return what a node has sent last of its call of `run`; None if it has not called it."""
        return self.ready.get(node) or self.preparing.get(node)

    def add_ready(self, node: int, ready: Ready) -> None:
        """Keep a node's *ready*. Equal messages share one object, since thousands of nodes send the same."""
        self.preparing.pop(node, None)
        last = next(reversed(self.ready.values()), None)
        self.ready[node] = last if last is not None and last == ready else ready

    def add_failures(self, failures: Iterable[Failure], now: float) -> None:
        """Keep the first failure and the first preemption only: thousands of texts would take hundreds of megabytes."""
        failures = list(failures)
        self.leaving.update({each.cause.node: each.cause for each in failures if each.cause.category == "preempted"})
        self.failures += [Failure(each.cause, each.age_s - now) for each in failures]
        for each in failures:
            self.alike.setdefault(hash(each.cause.way), set()).update(each.ranks)
        preempted = first_failure(each for each in self.failures if each.cause.category == "preempted")
        kept = (first_failure(self.failures), preempted)
        self.failures = [each for each in dict.fromkeys(kept) if each is not None]

    @property
    def preempted(self) -> Cause | None:
        """A preemption of a node in this generation, even if it was not the first failure: that node will not come back."""
        return next((each.cause for each in self.failures if each.cause.category == "preempted"), None)

    def cause_of(self, node: int) -> Cause | None:
        """Return the failure of one node, or None."""
        first = first_failure(each for each in self.failures if each.cause.node == node)
        return None if first is None else first.cause

    def storing_nodes(self, error: TorchrunError | None) -> list[int]:
        """Return the nodes that may have something to store when the launch ends with `error`, or well."""
        cause = cause_of(error)
        if cause is not None and cause.kind == "store":  # the datastore itself has failed
            return []
        able = self.ended.keys() - self.given_up
        return sorted(node for node in able if self.ended[node].stores)

    def signal_for(self, cause: Cause | None) -> int | None:
        """Return the signal that tells workers to save, if `cause` leaves time for that; else None."""
        is_preempted = cause is not None and cause.category == "preempted"
        return self.policy.preemption_signal if is_preempted else None

    def overrun(self, now: float) -> str | None:
        """Return in words which time limit the workers, or the storing after them, have passed; else None."""
        policy = self.policy
        if self.phase not in (Phase.RUNNING, Phase.STORING):
            return None
        if now > self.deadline:
            stores = self.who_stores(now) if self.phase is Phase.STORING else ""
            return self.longer + (f"; {stores}" if stores else "")
        if self.phase is Phase.STORING:
            return None  # no worker runs any more
        if policy.timeout_s is not None and now - self.went_at > policy.timeout_s:
            return f"longer than {policy.timeout_s:g} s"
        return None

    def first_cause(self) -> Cause | None:
        """Return the first failure, or None."""
        first = first_failure(self.failures)
        return None if first is None else first.cause

    def who_stores(self, now: float, besides: int | None = None) -> str:
        """Return in words which nodes store what, except node `besides`; empty if none does."""
        said = [f"node {node} stores {what}" for node, what in sorted(self.stores.items()) if node != besides]
        more = f"; so do {len(said) - _NODES_SAID} other nodes" if len(said) > _NODES_SAID else ""
        since = f" (for {now - self.stores_since:.0f} s so far)"
        return "; ".join(said[:_NODES_SAID]) + more + since if said else ""

    @property
    def alone(self) -> bool:
        """Whether every rank has trained by itself, without a process group."""
        return bool(self.ended) and all(ended.alone for ended in self.ended.values())

    # --- what becomes an error ------------------------------------------------------------------

    def error(self, cause: Cause | None, silent: list[int], more: str = "") -> LaunchFailed:
        """Return what every node raises after a failed launch; `silent` nodes did not report their end."""
        quiet = (
            f"\n{names(silent).capitalize()} did not report in time that the workers there had ended." if silent else ""
        )
        if self.phase is Phase.PAUSING and self.restarts_for not in (None, cause):
            earlier = summary(self.restarts_for, self.is_alone)
            quiet += f"\nAll workers were about to start again after an earlier failure: {earlier}."
        if cause is None:
            return LaunchFailed(f"Launch {self.number} failed.{quiet}")
        others = self.alike.get(hash(cause.way), set()) - {cause.rank}
        cls, failure = self._class_and_text(replace(cause, also=names(sorted(others), "rank") if others else ""))
        return failed(cls, replace(failure, after=failure.after + quiet + more, is_alone=self.is_alone))

    def _class_and_text(self, cause: Cause) -> tuple[type[LaunchFailed], FailureText]:
        stopped, everywhere = f"Launch {self.number} was stopped", "" if self.is_alone else " on all nodes"
        if cause.kind == "timeout":
            remedy = "run(timeout_s=...) and the step's @timeout change how long it may run."
            return LaunchTimeout, FailureText(cause, instead=f"{stopped}: it ran {cause.exception}. {remedy}")
        if cause.kind == "step_timeout":
            return LaunchTimeout, FailureText(cause, after=f"\n{stopped}{everywhere}.")
        if cause.kind == "hang":
            return LaunchHung, FailureText(
                cause, instead=f"{stopped}: {cause.exception}. {cause.advice}\n{cause.detail}"
            )
        if cause.kind == "store":
            remedy = (
                "If the datastore is well, return less, or name less as outputs: a script can store results itself."
            )
            more = f"\n{stopped}{everywhere}; its workers had ended well. {remedy}"
            return LaunchFailed, FailureText(cause, after=more)
        if cause.category == "preempted":
            codes = [pair for ended in self.ended.values() for pair in ended.exit_codes.items()]
            saved = sorted(rank for rank, code in codes if code == 0)
            ended = f"Ranks that exited with code 0 in time: {shortened(saved) or 'none'}."
            more = f"\n{stopped}{everywhere}. {ended}\n{TorchrunPreempted.remedy}"
            return TorchrunPreempted, FailureText(cause, after=more)
        restarts = self.restarts - (self.phase is Phase.PAUSING)
        count = f" after {counted(restarts, 'restart')}" if restarts else ""
        # The classes are those of `restart_on`, which matters only with restarts.
        kind = f" (class {cause.category})" if self.policy.max_restarts else ""
        also = f"\n{cause.also.capitalize()} failed in the same way." if cause.also else ""
        more = f"{also}\n{stopped}{everywhere}{count}. The reason: {CATEGORY_TEXTS[cause.category]}{kind}."
        more += self._restart_hint(cause)
        if self.preempted is not None:
            # Named by its host: `rename_node` changes the node index in the cause, but not in this text.
            more += f" Meanwhile host {self.preempted.host} {self.preempted.what}."
        return LaunchFailed, FailureText(cause, before=self._early_hint(cause), after=more)

    def _early_hint(self, cause: Cause) -> str:
        """Name the ranks that had ended well, if a lost connection is the cause: the others may have waited for them."""
        early = sorted(
            rank for ended in self.ended.values() for rank in (ended.exit_codes if ended.ok else ended.early)
        )
        if not early or not cause.is_consequence:
            return ""
        who = f"Rank {early[0]}" if len(early) == 1 else f"Ranks {shortened(early)}"
        return f"{who} had ended with code 0. Do all ranks make the same number of steps?\n"

    def _restart_hint(self, cause: Cause) -> str:
        """Say how to have such a failure restarted, where no restart was asked for and one could have helped."""
        # An error in the user's code, as a rule, comes again.
        is_possible = cause.category in self.policy.restart_on - GONE - {"user"}
        if self.policy.max_restarts or not is_possible or self.given_up or self.preempted is not None:
            return ""
        return "\nWith max_restarts=N, all workers start again after such a failure, up to N times."


def error_of(cause: Cause, more: str) -> LaunchFailed:
    """Return the error for a node's failure that did not end a launch of all nodes; `more` goes on after the report."""
    cls = {"preempted": TorchrunPreempted, "timeout": LaunchTimeout}.get(cause.category, LaunchFailed)
    return failed(cls, FailureText(cause, after=f"\n{more}"))


def told_to_end(cause: Cause, is_replaced: bool) -> LaunchFailed:
    """Return what `run` raises on a node that was told to end, where the others go on."""
    then = "Another task takes its place." if is_replaced else "The other nodes go on without it."
    cls = TorchrunPreempted if cause.category == "preempted" else LaunchFailed
    return failed(cls, FailureText(cause, after=f" {then}"))


def change_of_nodes(left: tuple[int, ...], came: tuple[int, ...], size: int) -> str:
    """Return in words which nodes take part in a restart; empty if they are the same. One may have left and come again."""
    again, gone, new = (sorted(each) for each in ({*left} & {*came}, {*left} - {*came}, {*came} - {*left}))
    said = [f"{names(again)} {'is' if len(again) == 1 else 'are'} started again"] if again else []
    spares = f"{names(new)}, {'a spare' if len(new) == 1 else 'spares'},"
    if len(new) == len(gone) > 0:
        said.append(f"{spares} {'takes the place' if len(new) == 1 else 'take the places'} of {names(gone)}")
    elif new:
        said.append(f"{spares} {'takes' if len(new) == 1 else 'take'} part")
    if gone and len(new) != len(gone):
        said.append(f"the launch goes on without {names(gone)}, on {counted(size, 'node')}")
    return "; ".join(said)


def teller(cause: Cause | None) -> int:
    """Return the node whose log has the full report: the failed one, unless it is lost or the control node found out."""
    if cause is not None and (cause.kind, cause.node) == ("lost", CONTROL):
        return CONTROL + 1  # the control node itself can't tell any more
    return CONTROL if cause is None or cause.kind in ("lost", *_FOUND_BY_CONTROL) else cause.node


def reason(cause: Cause | None) -> str:
    """Return who failed and how in one line, for the logs; empty if the control node has logged it already."""
    if cause is None or (cause.node == CONTROL and cause.kind not in _FOUND_BY_CONTROL):
        return ""
    return summary(cause)


def summary(cause: Cause, is_alone: bool = False) -> str:
    """Return who failed and how in one line, of a gang that may have one node."""
    return headline(f"{cause.who_in(is_alone)} {cause.what}")


def within(cause: Cause) -> str:
    """Return who failed and how in one line, for the middle of a sentence."""
    text = summary(cause)
    return text[:1].lower() + text[1:]


# --- what follows --------------------------------------------------------------------------------


class Next(enum.Enum):
    """What follows when all nodes have reported the end of their workers."""

    FINISH = "the launch has ended well"
    MOVE = "all workers start again at once, with another port"
    RESTART = "all workers start again after a pause"
    FAIL = "the launch has failed"


def decide(launch: Launch, cause: Cause | None, silent: list[int], has_group: bool, now: float) -> Next:
    """Return what follows when all nodes have ended, or their time is up.

    `cause` is the first failure. `silent` nodes have not reported their end. `has_group`: whether there are nodes for
    another generation.
    """
    if cause is None and not silent and all(ended.ok for ended in launch.ended.values()):
        return Next.FINISH
    # A node whose own code has left `run` would not obey another *go*. Of one that was told to end, that is no failure.
    if cause is None or silent or not has_group or launch.given_up - launch.leaving.keys():
        return Next.FAIL
    if _may_move(launch, cause):
        return Next.MOVE
    return Next.RESTART if _may_restart(launch, cause, now) else Next.FAIL


def _may_move(launch: Launch, cause: Cause) -> bool:
    """Return whether another program took the chosen port before the agent did, and another port may be chosen."""
    taken = cause.kind == "agent" and _PORT_TAKEN.search(cause.detail) is not None
    return taken and launch.ready[CONTROL].master_port is None and launch.moves < _MAX_MOVES


def _may_restart(launch: Launch, cause: Cause, now: float) -> bool:
    policy = launch.policy
    over = cause.kind == "step_timeout" or now >= launch.deadline  # by one node's clock
    # A node that was told to end does not use up a restart; but there must be some at all.
    is_left = launch.restarts < launch.limit or (cause.category == "preempted" and policy.max_restarts > 0)
    return cause.category in policy.restart_on and is_left and not over


# --- the messages that tell its end -------------------------------------------------------------


def verdicts(
    launch: Launch,
    nodes: Iterable[int],
    error: TorchrunError | None,
    records: tuple[Record, ...],
    features: Callable[[bool], dict[str, dict[str, Any]]],
) -> Iterator[tuple[int, Verdict]]:
    """Yield each node's verdict; nodes that get the same share one object.

    `features` takes whether the control node is meant, and returns the data of each feature.
    """
    made: dict[tuple[int, bool], Verdict] = {}
    for node in nodes:
        if (call := launch.call_of(node)) is not None:  # with the node's own number, which may be what differs
            number = call.launch
            key = (number, node == CONTROL)
            if key not in made:
                alone, is_control = error is None and launch.alone, node == CONTROL
                group = launch.group if launch.group.size else None
                made[key] = Verdict(number, error, events_for(node, records), features(is_control), alone, group)
            yield node, made[key]


def events_for(node: int, records: tuple[Record, ...]) -> tuple[Record, ...]:
    """Return the records for a node: all of them for the control node, those about the whole gang for others."""
    return records if node == CONTROL else of_the_gang(records)
