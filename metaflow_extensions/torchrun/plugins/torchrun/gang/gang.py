"""The gang's machine on the control node: joining, launches with their restarts, leaving.

`Gang` is pure: messages and the clock go in, messages come out. It starts no thread, opens no socket and never sleeps, so
a test can try every order of messages. One object decides, so every node gets the same decision. A table says what is
done with each message in which `Phase`.

Who takes part in a generation is one rule: who took part stays; the first others that are here fill up to the size. Are
there fewer, those are waited for that may come; then it goes on with at least `min_nodes`, or fails.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from ..errors import TorchrunError
from . import failures
from .agreement import contradiction, devices, without_devices
from .cause import Cause, Failure, FailureText, cause_of, describe_exit, failed, failure_of
from .group import Group, follow
from .hangs import KIND, Hangs
from .launch import GONE, Launch
from .limits import DIAGNOSTICS_S, INDEX_S, LATE_S, QUIET_S, REMIND_S, SAVE_S
from .messages import (
    CONTROL,
    Abort,
    Answer,
    Ask,
    Ended,
    Failed,
    Farewell,
    Go,
    Join,
    Leave,
    Message,
    Note,
    Ready,
    Report,
    Restart,
    Stop,
    Store,
    Stored,
    Verdict,
)
from .policy import KEPT_VERDICTS, LaunchPolicy, Rules
from .progress import Progress
from .stacks import Stacks
from .texts import counted, headline, names, size_text
from .view import GangView, Happened, NodeView, Presence

Outgoing: TypeAlias = tuple[int, Message]
"""A node's index and a message for it."""


_ERROR_CHARS = 8 * 1024  # of an error's message in the view; its report has more
# What every node gets to know of; the other events are about one node, and report no problem.
_OF_THE_GANG = frozenset({"lost", "preempted", "unreachable", "left_out", "awaited", "taken_in"})


class Phase(enum.Enum):
    """Where the last launch stands."""

    IDLE = "no launch runs; nodes may have called `run` already"
    RUNNING = "the workers run"
    STOPPING = "the workers are told to stop"
    PAUSING = "no worker is left; a restart follows"
    STORING = "no worker is left, and no restart follows: what the workers left is stored"


@dataclass
class Node:
    """One node as the control node knows it."""

    index: int
    presence: Presence = Presence.ABSENT
    join: Join = field(default_factory=lambda: Join(CONTROL))  # of its last task
    tasks: list[str] = field(default_factory=list)  # all that have come, in order
    is_new: bool = False  # whether its task has come in the place of another, and was not ready yet
    is_told: bool = False  # whether its task knows that another one has come
    cause: Cause | None = None  # why it is gone, or out
    call: Ready | None = None  # its call of `run`, as long as that has no verdict
    failed: TorchrunError | None = None  # how its call has failed before the launch began
    awaited_until: float = 0.0  # until which age of the gang a task of it is waited for

    @property
    def host(self) -> str:
        """The host name of its last task."""
        return self.join.host

    def is_older(self, join: Join) -> bool:
        """Return whether a task came before its last member, or was that."""
        known = self.tasks
        return join.task in known and known.index(join.task) <= known.index(self.join.task)


class Gang:
    """The gang's state machine. Only the control node's supervisor has one."""

    def __init__(
        self,
        num_nodes: int,
        pick_port: Callable[[int | None], int | None],  # returns the pinned port (None if taken), or else a free one
        rules: Rules | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_nodes, self.rules = num_nodes, rules or Rules()
        self.view = GangView(num_nodes, began=time.time(), nodes=[NodeView() for _ in range(num_nodes)])
        self.changes = self.numbers = 0  # of the view, and of numbers in it that change all the time
        self.progress, self.hangs, self.stacks = Progress(self._name), Hangs(), Stacks()
        self._values: dict[str, Any] = {}  # by rank: under which keys returned values and exceptions are stored
        self._has_warned = False  # of a report that could not be read
        self.phase, self.launch = Phase.IDLE, Launch(-1)
        self.broken: TorchrunError | None = None  # why no launch can begin any more
        timeout_s = self.rules.started_timeout_s
        self.nodes = [Node(each, join=Join(each), awaited_until=timeout_s) for each in range(num_nodes)]
        # Kept up to date: to look at thousands of nodes at each message would be slow.
        self._in = {each: set[int]() for each in Presence} | {Presence.ABSENT: set(range(num_nodes))}
        self._calls: set[int] = set()  # nodes with a call, and
        self._done: set[int] = set()  # nodes that are here whose step's code has ended well, and
        self._failed: set[int] = set()  # nodes whose last task has left with an error
        self._pick_port, self._clock, self._began_at = pick_port, clock, clock()
        self._group = Group(0)  # the last nodes that have taken part
        self._is_over = False  # whether the control node's step has ended, and no other node is left
        self._is_time_up = False  # whether the end of the step's @timeout was handled
        self._remind_at = float("inf")  # when to log next what is waited for
        # How many events there were at the end of the launch before, and of the last one.
        self._mark = self._next_mark = 0
        self._verdicts: dict[int, Verdict] = {}  # by launch: a node may call it late
        self._out: list[Outgoing] = []

    # --- what is known ----------------------------------------------------------------------------

    @property
    def without(self) -> set[int]:
        """The nodes that are lost, or were told to end, and without which the gang goes on: those tasks shall end."""
        return {node for node in self._in[Presence.OUT] if self.nodes[node].cause is not None}

    @property
    def members(self) -> set[int]:
        """The nodes, besides the control node, that have joined and not yet left."""
        return self._in[Presence.HERE] - {CONTROL}

    @property
    def due_at(self) -> float:
        """The time at which `tick` must be called, since the workers start again then; infinite if none is known."""
        is_known = self.phase is Phase.PAUSING and not self._coming(self._able())
        return self.launch.until if is_known else float("inf")

    @property
    def _age_s(self) -> float:
        return self._clock() - self._began_at

    @property
    def _size(self) -> int:
        """How many nodes take part if none is missing."""
        return self.num_nodes - self.rules.spare_nodes

    @property
    def _least(self) -> int:
        return self.rules.min_nodes or self._size

    @property
    def _number(self) -> int | None:
        """The number of the launch that nodes have called and that has not begun; None without one."""
        if self.phase is not Phase.IDLE or not self._calls:
            return None
        return min(call.launch for node in self._calls if (call := self.nodes[node].call) is not None)

    @property
    def _seen(self) -> GangView:
        """The view, which is about to be changed."""
        self.view.now_s = self._age_s
        self.changes += 1
        return self.view

    def _name(self, rank: int) -> str:
        node = self.launch.group.node_of(rank // (self.launch.nproc or 1))
        return f"rank {rank} (node {node}, host {self.nodes[node].host})"

    def _enter(self, node: Node, presence: Presence) -> None:
        self._in[node.presence].discard(node.index)
        self._in[presence].add(node.index)
        node.presence = presence

    # --- what can happen --------------------------------------------------------------------------

    def handle(self, node: int, message: Message) -> list[Outgoing]:
        """Handle a node's message and return the messages to send; what comes too late is ignored."""
        if 0 <= node < self.num_nodes:
            handler = _HANDLERS.get((self.phase, type(message)))
            if handler is not None:
                handler(self, self.nodes[node], message)
        return self._flush()

    def ask_stacks(self, asked: Any) -> list[Outgoing]:
        """Begin to find out what every rank does now; `stacks` has the answer later, with what was `asked`."""
        launch = self.launch
        others = set(range(self.num_nodes)) - launch.running
        about = (launch.number, launch.generation)
        if self.stacks.ask(asked, about, launch.running, others, self._age_s):
            self._broadcast(Ask(*about, "stacks", {"id": asked}))
        return self._flush()

    def lost(self, node: int, why: str, is_connected: bool = False) -> list[Outgoing]:
        """Handle the end of a node's task.

        `is_connected`: its supervisor still has its connection, and so may still have to end the workers.
        """
        self._lose(self.nodes[node], why, is_ending=is_connected)
        return self._flush()

    def disconnected(self, node: int, why: str) -> list[Outgoing]:
        """Handle the end of a node's connection, which its supervisor keeps until the workers have ended."""
        self._lose(self.nodes[node], why)
        if self.nodes[node].presence is Presence.GONE:
            self._has_no_workers(node)
        return self._flush()

    def give_up(self, error: TorchrunError) -> list[Outgoing]:
        """Break the gang for a reason that is no node's fault."""
        self._break(error)
        return self._flush()

    def was_stopped(self, seconds: float) -> list[Outgoing]:
        """Give the nodes as much longer to report as this process was stopped, perhaps with all of them."""
        self.launch.until += seconds
        return []

    def tick(self) -> list[Outgoing]:
        """Check all time limits; call it once a second, and at `due_at`."""
        now, launch = self._clock(), self.launch
        if self._in[Presence.ABSENT]:
            self._give_up_overdue()
        if now >= self._remind_at:
            self._remind(now)
        if now > self.rules.deadline:
            self._time_is_up()
        if (text := self._overrun(now)) is not None:
            self._fail_with("timeout", text)
        if self.phase is Phase.PAUSING and now >= launch.until:
            self._start_again()
        elif self.phase is Phase.STOPPING and now > launch.until:
            self._decide()
        elif self.phase is Phase.STORING and now > launch.until:
            self._finish(launch.failing_with)
        if self.phase is Phase.RUNNING:
            self._look_at_workers()
        self.stacks.tick(self._age_s)
        return self._flush()

    # --- joining ----------------------------------------------------------------------------------

    def may_join(self, join: Join) -> bool:
        """Return whether a task may join: none is that node, or this task is, and has not got its answer."""
        if not 0 <= join.node < self.num_nodes:
            return False
        node = self.nodes[join.node]
        if node.presence is Presence.HERE:
            return join == node.join
        return node.presence is not Presence.GONE and not self._is_over and not node.is_older(join)

    def _on_join(self, node: Node, join: Join) -> None:
        if node.index != join.node or not self.may_join(join):
            return
        if node.presence is not Presence.HERE:
            self._seen.add("joined", "joined", node.index)
            self.view.nodes[node.index].host = join.host
            self.view.enter("step code", [node.index])
            node.is_new = bool(node.join.task)
            self._failed.discard(node.index)
            node.is_told, node.cause = False, None
        self._enter(node, Presence.HERE)
        node.join = join
        if join.task not in node.tasks:
            node.tasks.append(join.task)
        self._send(Answer(), node.index)
        if self.broken is not None:
            self._send(Abort(self.broken), node.index)

    def turn_away(self, join: Join) -> tuple[Answer, list[Outgoing]]:
        """Return the answer to a task that can't be its node now, and the messages for the nodes.

        Kubernetes starts a second task at once where a pod is deleted or drained, while the first still has its grace.
        The first is told, so that all can save. The second joins when the first has ended, if the gang can use it. Else
        it waits for the end of all, because its own would have all pods killed.
        """
        if not 0 <= join.node < self.num_nodes:
            return Answer(failures.turned_away(join, f"there are {self.num_nodes} nodes in this gang.")), []
        node = self.nodes[join.node]
        is_member = node.presence is Presence.HERE
        if is_member and node.join.place == join.place:
            why = f"another task of this attempt has the same node index (host {node.host})."
            return Answer(failures.turned_away(join, why)), []
        if node.is_older(join):
            why = f"a newer task has taken its place (host {node.host})."
            return Answer(failures.no_replacement(join, why)), []
        if join.task not in node.tasks:
            node.tasks.append(join.task)
        if self.broken is not None and self.rules.replaces:
            return Answer(self.broken), []
        if is_member and not node.is_told and self.broken is None and self.phase in (Phase.IDLE, Phase.RUNNING):
            node.is_told = True
            came = "another task of this node has"
            why = f"it is being replaced: {came} started, as when its pod is deleted or drained"
            self._send(Farewell("replaced", why), node.index)
            self._send(Note(f"node {node.index} (host {node.host}) is being replaced: {came} come"), CONTROL)
        if self.rules.replaces and node.index != CONTROL:
            return Answer(failures.too_soon(node.host), is_early=True), self._flush()
        before = "still runs (host {}), and all ranks may save" if is_member else "has ended (host {})"
        why = f"the task that it is to replace {before.format(node.host)}. A gang takes no node twice."
        return Answer(failures.no_replacement(join, why), self.rules.stop_s), self._flush()

    # --- nodes that are gone ----------------------------------------------------------------------

    def _lose(self, node: Node, why: str, is_ending: bool = False) -> None:
        """Handle the loss of a task that was a member, or never came; of all others it is known already."""
        is_first = node.presence is Presence.ABSENT and not node.tasks
        if node.presence is not Presence.HERE and not is_first:
            return
        self._seen.add("lost", f"lost: {why}", node.index)
        self.view.enter("lost", [node.index])
        if node.index in self._done:
            why = f"{why}, after its step's code but before its results were stored; see its log"
        self._leave(node)
        self._without(node, Cause("lost", node.index, node.host, exception=why), is_ending)
        self._see_who_is_left()

    def _on_leave(self, node: Node, leave: Leave) -> None:
        if leave.how == "killed":
            self._lose(node, leave.text, is_ending=node.index != CONTROL)  # whose loss ends all
        elif leave.how == "done":
            self._on_done(node)
        elif node.presence is not Presence.GONE:
            self._on_left(node, leave)

    def _on_done(self, node: Node) -> None:
        if node.presence is Presence.HERE and node.index not in self._done:
            self._done.add(node.index)
            self._seen.add("finished", "the step has ended well", node.index)
            self.view.enter("storing", [node.index])
            if len(self._done) == len(self._in[Presence.HERE]) and not self._failed:
                self.view.ended_s = self.view.now_s
            self._has_no_workers(node.index)
            self._begin()  # or say that the launch can't
            self._see_who_is_left()

    def _on_left(self, node: Node, leave: Leave) -> None:
        has_failed, after_step = leave.how == "failed", node.index in self._done
        self._seen.add("left", "left: the step has failed" if has_failed else "left", node.index)
        self._send(Farewell("received"), node.index)
        self.view.is_over |= node.index == CONTROL
        if node.presence is Presence.HERE or node.cause is None:  # else it is lost already
            self.view.enter("failed" if has_failed else "finished", [node.index])
        if node.presence is Presence.HERE:
            self._leave(node)
            self._failed |= {node.index} if has_failed else set()
            node.cause = leave.cause
            if leave.cause is not None:
                self._without(node, leave.cause, after_step=after_step)
            else:
                self._has_no_workers(node.index)
                self._begin()
        self._see_who_is_left()
        if node.index == CONTROL:
            self._end_without_control(node)
            self._send(Farewell("bye"), *range(1, self.num_nodes))

    def _leave(self, node: Node) -> None:
        self._enter(node, Presence.GONE)
        self._forget(node)

    def _forget_call(self, node: Node) -> None:
        node.call = node.failed = None
        self._calls.discard(node.index)

    def _forget(self, node: Node) -> None:
        """Forget what the task of a node has said that is gone."""
        self._forget_call(node)
        self._done.discard(node.index)
        self.stacks.gone(node.index, "it is no longer in the gang")
        self.hangs.ended(node.index, ok=False)

    def _end_without_control(self, control: Node) -> None:
        """Tell the nodes how it ends, if the control node leaves with an error: it can't tell them later."""
        if CONTROL not in self._failed:
            return
        if self.phase is not Phase.IDLE:
            self._finish(self.launch.failing_with or self._error_of_launch())
        heard = self._in[Presence.HERE] <= self.launch.told
        if control.cause is None and self.launch.verdict is not None and not heard:
            self._break(self.launch.verdict)

    def _see_who_is_left(self) -> None:
        """Send a control node whose step has ended the failure of a member, or that no member is left.

        A member that raises the verdict of a launch, as all do, fails the run. The control node's step may have ended
        well even so: it has caught the verdict, or ended before that launch.
        """
        if CONTROL not in self._done:
            return
        for node in [self.nodes[each] for each in sorted(self._failed & self._in[Presence.GONE])[:1]]:
            error = self.launch.verdict if node.cause is None else self._error_outside(node.cause)
            if error is not None:
                self._break(error)
        may_come = [node for node in self._in[Presence.ABSENT] if self._may_come(node)]
        if len(self._in[Presence.HERE]) == 1 and not may_come and not self._is_over:
            self._is_over = True
            self._send(Farewell("alone"), CONTROL)

    def _has_no_workers(self, node: int) -> None:
        """Handle that a node reports nothing more of its workers, or of what it stores."""
        self.launch.running.discard(node)
        self.launch.stores.pop(node, None)
        self._decide_if_over()

    def _without(self, node: Node, cause: Cause, is_ending: bool = False, after_step: bool = False) -> None:
        """Go on without a node that is gone, or stop everything."""
        node.cause = cause
        if not is_ending:
            self.launch.running.discard(node.index)
        if self._goes_on_without(node, cause):
            then = "the others go on without it"
            if node.presence is Presence.ABSENT:
                then = "another task takes its place"
            if self.phase is not Phase.STORING or self.launch.failing_with is None:  # else nobody goes on
                self._send(Note(f"{failures.within(cause)}; {then}"), CONTROL)
            self._begin()
        elif self.phase is Phase.IDLE:
            self._break_for(cause, after_step)
        else:
            self._add_failures([Failure(cause)])
            self.launch.stores.pop(node.index, None)
            self._stop()
            self._decide_if_over()

    def _goes_on_without(self, node: Node, cause: Cause) -> bool:
        """Leave a node out that has no workers now, if there are enough others; return whether that holds."""
        launch = self.launch
        is_needed = launch.takes_part(node.index) and (
            self.phase in (Phase.RUNNING, Phase.STOPPING) or node.index in launch.stores
        )
        # A task that has come in the place of another, and fails before it is ready, is no loss for the others.
        is_loss = cause.category in GONE or node.is_new
        if self.broken is not None or node.index == CONTROL or is_needed or not is_loss:
            return False
        if self.phase is Phase.PAUSING and cause.category in GONE - launch.policy.restart_on:
            return False
        if self.phase in (Phase.IDLE, Phase.PAUSING) and not self._are_enough({node.index}):
            return False
        self._leave_out(node, cause)
        return True

    def _may_be_replaced(self, node: Node) -> bool:
        """Return whether another task may come in the place of a node that is gone, or about to go."""
        is_in_time = not node.is_new or self._age_s < node.awaited_until
        return self.rules.replaces and node.index != CONTROL and not self._is_over and is_in_time

    def _leave_out(self, node: Node, cause: Cause) -> None:
        """Go on without a node that is gone or about to go, or wait for another task in its place."""
        node.cause = cause
        self._forget(node)
        launch = self.launch
        launch.ready.pop(node.index, None)
        launch.leaving.pop(node.index, None)
        launch.given_up.discard(node.index)
        if launch.takes_part(node.index):
            launch.lost.add(node.index)
        self._seen.enter("lost", [node.index])
        if self._may_be_replaced(node):
            if not node.is_new:
                node.awaited_until = self._age_s + self.rules.started_timeout_s
            self._enter(node, Presence.ABSENT)
            self._seen.add("awaited", f"another task takes its place: it {headline(cause.what)}", node.index)
        else:
            self._enter(node, Presence.OUT)
            self._seen.add("left_out", f"the others go on without it: it {headline(cause.what)}", node.index)

    def _may_come(self, node: int) -> bool:
        return self._age_s <= self.nodes[node].awaited_until

    def _are_enough(self, besides: Collection[int] = ()) -> bool:
        """Return whether enough nodes are here, or may come, if some are gone."""
        if CONTROL in besides:
            return False
        gone = {*besides, *(self.launch.leaving if self.phase is not Phase.IDLE else ())}
        there = [node for node in self._in[Presence.HERE] if node not in gone]
        come = [node for node in self._in[Presence.ABSENT] if self._may_come(node) and node not in besides]
        come += [node for node in gone - self._in[Presence.ABSENT] if self._may_be_replaced(self.nodes[node])]
        return len(there) + len(come) >= self._least

    def _give_up_overdue(self) -> None:
        """Go on without the nodes that have not come in time, or break the gang."""
        overdue = sorted(node for node in self._in[Presence.ABSENT] if not self._may_come(node))
        if not overdue:
            return
        first, waited_s = self.nodes[overdue[0]], self.rules.started_timeout_s
        if self.phase is Phase.IDLE and not self._are_enough(overdue):
            if first.cause is not None:
                self._break_for(first.cause)
            else:
                command = self.rules.why_it_waits(overdue[0])
                self._break(failures.missing(overdue, self.num_nodes, waited_s, command))
            return
        for each in overdue:
            self._give_up_on(self.nodes[each])
        self._begin()
        self._see_who_is_left()

    def _give_up_on(self, node: Node) -> None:
        """Wait no longer for a node's task."""
        if node.cause is None:
            text = f"it has not joined within {self.rules.started_timeout_s:g} s"
            node.cause = Cause("lost", node.index, node.host, exception=text)
            self._send(Note(f"{failures.within(node.cause)}; the others go on without it"), CONTROL)
        else:
            self._send(Note(f"node {node.index} is not waited for any more"), CONTROL)
        self._enter(node, Presence.OUT)
        self._seen.add("left_out", "the others go on without it", node.index)
        self.view.enter("lost", [node.index])

    def _why_not_without(self, cause: Cause | None) -> str:
        """Say why the gang does not go on without a lost node, where spares or fewer nodes are asked for."""
        launch, rules = self.launch, self.rules
        if cause is None or cause.category not in GONE or not (rules.spare_nodes or rules.min_nodes or rules.replaces):
            return ""
        why = "\nIt can't go on without that node: "
        if cause.node == CONTROL:
            return f"{why}node {CONTROL} is the control node."
        if self.phase is not Phase.IDLE:
            if cause.category in GONE - launch.policy.restart_on:
                return f"{why}restart_on does not have {cause.category!r}."
            if ended := sorted(launch.given_up - launch.leaving.keys()):
                return f"{why}the call of run has ended on {names(ended)}, too."
            if launch.counted >= launch.policy.max_restarts and self.phase is not Phase.PAUSING:
                return f"{why}max_restarts={launch.policy.max_restarts} allows no more restarts."
        able = len(self._in[Presence.HERE] - {cause.node} - launch.leaving.keys())
        if able < self._least:
            came = " No other task has taken its place." if rules.replaces else ""
            left = f"{counted(able, 'node')} {'is' if able == 1 else 'are'} left"
            return f"{why}{left}, and it needs {self._least} (spare_nodes, min_nodes).{came}"
        return ""

    # --- a launch's begin -------------------------------------------------------------------------

    def _on_ready(self, node: Node, call: Ready) -> None:
        number = call.launch
        if node.presence is Presence.HERE and node.index not in self._done:
            if number in self._verdicts:
                self._send_late_verdict(node, self._verdicts[number])  # it was over before this node called it
            elif self.broken is not None:
                self._send_late_verdict(node, Verdict(number, self.broken))
            elif number <= self.launch.number and self.phase is Phase.IDLE:
                self._refuse(node, number, failures.forgotten(number))
            else:
                self._take_call(node, call)
        elif node.presence is Presence.OUT and number in self._verdicts and node.cause is None:
            self._send_late_verdict(node, self._verdicts[number])  # it was dismissed before it called `run`
        elif node.presence is not Presence.HERE:
            error = failures.forgotten(number) if node.cause is None else failures.told_to_end(node.cause)
            self._send(Verdict(number, error), node.index)

    def _take_call(self, node: Node, call: Ready) -> None:
        if self.phase is Phase.IDLE and call.launch != self.view.launch:
            self._see_call(call)
        had_commands = node.call is not None and node.call.prepares
        text = "before_run has ended well" if had_commands else "called run"
        what = ("before_run", "before_run begins") if call.prepares else ("ready", text)
        self._seen.add(*what, node.index, launch=call.launch, generation=None)
        self.view.enter("preparing" if call.prepares else "waiting", [node.index])
        if not self._calls:
            self._remind_at = self._clock() + QUIET_S
        # Equal messages share one object, since thousands of nodes send the same.
        other = self.nodes[next(iter(self._calls), node.index)].call
        node.call, node.failed = (other if other == call else call), None
        self._calls.add(node.index)
        if self.phase is Phase.IDLE:
            node.is_new = node.is_new and call.prepares
            self._begin()
        elif call.launch == self.launch.number and not call.prepares:
            self._take_late(node, call)

    def _see_call(self, call: Ready) -> None:
        """Note that a launch is called for the first time."""
        view = self._seen
        view.turn("waiting")
        view.launch, view.generation, view.began_s, view.restarts, view.nproc = call.launch, None, None, 0, call.nproc
        view.error = view.cause = view.restarts_left = None  # those of the launch before
        for each, node in enumerate(view.nodes):
            node.takes_part, node.exit_codes = each not in self._in[Presence.OUT], {}

    def _take_late(self, node: Node, call: Ready) -> None:
        """Take a node in while the launch runs, as a spare."""
        error = contradiction({CONTROL: self.launch.ready[CONTROL], node.index: call})
        if error is not None:
            self._refuse(node, call.launch, error)
            return
        node.is_new = False
        self.launch.ready[node.index] = call
        if not self.launch.takes_part(node.index):
            self._seen.add("spare", "waits as a spare", node.index)

    def _refuse(self, node: Node, number: int, error: TorchrunError) -> None:
        """Go on without a task that has come late, and can't take part; it alone has the error, and shows all of it."""
        text = headline(error.message if (cause := cause_of(error)) is None else cause.what)
        if cause is None:
            cause = Cause("call", node.index, node.host, exception=text)
            error = failed(type(error), FailureText(cause, instead=error.message))
        self._send(Verdict(number, error), node.index)
        if node.index != CONTROL:  # without which nobody goes on
            self._leave_out(node, Cause("lost", node.index, node.host, exception=text))

    def _able(self) -> list[int]:
        """Return the nodes that can take part in the next generation of the launch, in order."""
        launch = self.launch
        gone = launch.leaving.keys() | launch.given_up
        return sorted(node for node in launch.ready.keys() & self._in[Presence.HERE] if node not in gone)

    def _coming(self, able: Collection[int]) -> list[int]:
        """Return the nodes that a generation waits for, if fewer than it has room for are `able` to take part."""
        missing = self._size - len(able)
        if missing <= 0:
            return []
        here = self._in[Presence.HERE] - self._done - set(able)
        gone = self.launch.leaving.keys() | self.launch.given_up
        candidates = sorted({*self._in[Presence.ABSENT], *here} - gone)
        return [node for node in candidates if self._may_come(node)][:missing]

    def _begin(self) -> None:
        """Begin a launch when all nodes have called it that take part, or end it if it can't begin."""
        here, ended = self._in[Presence.HERE], self._in[Presence.GONE] | self._done
        # The cheap checks come first: this runs for each of thousands of messages.
        if self.phase is not Phase.IDLE or self.broken is not None or not self._calls:
            return
        if not ended and (len(self._calls) < min(self._size, len(here)) or CONTROL not in here):
            return
        number = self._number
        assert number is not None
        if ended:
            self._end_early(number, failures.step_has_ended(number, sorted(ended)))
            return
        group = follow(self._group, sorted(here), self._size, self._least)
        if (group is None or group.size < self._size) and any(map(self._may_come, self._in[Presence.ABSENT])):
            return
        if group is None:
            self._break_for(next(cause for node in self.nodes if (cause := node.cause) is not None))
            return
        nodes = [self.nodes[node] for node in group.nodes]
        if any(node.call is None for node in nodes):
            return
        if error := next((node.failed for node in nodes if node.failed is not None), None):
            self._end_early(number, error)
        elif not any(node.call.prepares for node in nodes if node.call is not None):
            self._begin_launch(number, group)

    def _begin_launch(self, number: int, group: Group) -> None:
        nodes = [self.nodes[node] for node in sorted(self._calls)]
        ready = {each.index: each.call for each in nodes if each.call and not each.call.prepares and not each.failed}
        error = contradiction({node: ready[node] for node in group.nodes})
        if error is not None:
            self._end_early(number, error)
            return
        policy = ready[CONTROL].policy or LaunchPolicy()
        same = {node: call for node, call in ready.items() if call.launch == number}
        self.launch, self._mark = Launch(number, policy, same), self._next_mark
        for node in sorted(same.keys() - set(group.nodes)):
            self._seen.add("spare", "waits as a spare", node)
        self._go(group)

    def _end_early(self, number: int, error: TorchrunError) -> None:
        """End a launch that can't begin."""
        self.launch, self._mark = Launch(number), self._next_mark
        self._finish(error)

    def _go(self, group: Group) -> None:
        """Send *go*: all nodes of a group start a generation of workers."""
        launch, control = self.launch, self.launch.ready[CONTROL]
        port = self._pick_port(control.master_port)
        if port is None:
            self._finish(failures.port_taken(control.master_port, self.nodes[CONTROL].host))
            return
        before, after, lost = set(launch.group.nodes), set(group.nodes), set(launch.lost)
        left, came = (before - after) | lost, (after - before) | (lost & after)
        launch.begin_generation(self._clock(), group)
        self.phase, self._group = Phase.RUNNING, group
        self._see_go(sorted(came) if before else [])
        of_group = {node: launch.ready[node] for node in group.nodes}
        if launch.generation == 0 and (without := without_devices(of_group)):
            hides = f"warning: run(env=...) hides the accelerators on {names(without)}"
            self._send(Note(f"{hides}: the workers there compute on the CPU, the others do not"), CONTROL)
        about = (launch.number, launch.generation, port, self.rules.name, launch.restarts, launch.limit)
        changed = (tuple(sorted(left)), tuple(sorted(came))) if before else ((), ())
        self._broadcast(Go(*about, devices(of_group), group, *changed))

    def _see_go(self, came: list[int]) -> None:
        """Note that a generation begins."""
        launch, view, nodes = self.launch, self._seen, self.launch.group.nodes
        control = launch.ready[CONTROL]
        view.launch, view.generation = launch.number, launch.generation
        view.nproc, view.facts = control.nproc, control.facts
        view.began_s = view.now_s if view.began_s is None else view.began_s
        view.restarts, view.restarts_left = launch.restarts, launch.limit - launch.restarts
        view.restarts_s += [round(view.now_s, 3)] if launch.generation else []
        for each in came:
            view.add("taken_in", "takes part from now on", each)
        for index, node in enumerate(view.nodes):
            node.takes_part, node.has_written, node.exit_codes = launch.takes_part(index), False, {}
        on_each = f"{control.nproc} process{'es' * (control.nproc != 1)} on each"
        again = " again" if launch.generation else ""
        view.add("go", f"start{again} on {counted(len(nodes), 'node')}, {on_each}")
        view.turn("starting")
        view.enter("starting", nodes)
        view.place(nodes)
        view.wants_outputs |= launch.policy.stores_outputs
        view.outputs.pop(launch.number, None)  # those of a generation before
        self.progress.begin(launch.number)
        self.hangs.begin(launch.number, launch.policy.hang_timeout_s, nodes, self._age_s)
        view.hangs = self.hangs.record  # it is not the last failure any more
        self._values = {}

    # --- what the nodes report --------------------------------------------------------------------

    def _is_current(self, report: Report | Failed | Ended | Stored) -> bool:
        """Return whether a message is about this launch and generation; another one is late."""
        launch = self.launch
        return report.launch == launch.number and report.generation in (None, launch.generation)

    def _on_report(self, node: Node, report: Report) -> None:
        launch, index = self.launch, node.index
        if report.kind == "command":
            text, code = str(report.data.get("text")), report.data.get("exit_code")
            about = {"launch": report.launch, "generation": None, "seconds": report.data.get("seconds")}
            self._seen.add("command", text, index, exit_code=code, **about)
        elif self.phase is Phase.IDLE or not self._is_current(report):
            return
        elif report.kind == "started":
            self._seen.add("started", "all workers run", index)
            if self.phase is Phase.RUNNING:
                self.view.enter("running", [index])
                launch.starting.discard(index)
                if not launch.starting and self.view.outcome == "starting":
                    self.view.turn("running")
        elif report.kind == "wrote":
            self._seen.add("output", "first output", index)
            self.view.nodes[index].has_written = True
        elif report.kind == "storing":
            if index in launch.stores:
                launch.stores[index] = str(report.data.get("what"))
        else:
            self._guarded(f"node {index}'s {report.kind}", lambda: self._take(index, report))

    def _guarded(self, what: str, do: Callable[[], object]) -> None:
        """Do what must not end a launch, whatever it raises; a line says so once."""
        try:
            do()
        except Exception as error:
            if not self._has_warned:
                self._send(Note(f"warning: {what} is not kept: {type(error).__name__}: {error}"), CONTROL)
            self._has_warned = True

    def _take(self, node: int, report: Report) -> None:
        """Keep what a node tells of its workers."""
        data, at_s = report.data, self._age_s
        self.numbers += 1
        match report.kind:
            case "progress":
                if first := self.progress.take(node, report.launch, data, at_s):
                    self._seen.add("progress", f"first report read: {first}", node, rank=0)
                self.view.progress = self.progress.record
            case "hangs" if "waits" in data:
                reader = "its output waits for its reader, such as a stopped terminal, and its ranks wait, too"
                self._seen.add("told", reader if data["waits"] else "its output is read again", node)
            case "hangs":
                self.hangs.take(node, data, at_s)
            case "stacks":
                self.stacks.take(node, data)
            case "usage":
                self.view.take_usage(node, data)
            case "outputs":
                self._seen.take_outputs(report.launch, node, data)
                self.view.add("stored", f"stored {counted(data['files'], 'file')}, {size_text(data['size'])}", node)
            case "functions":
                self._values.update(data)
            case "unreached":
                self._fail_with("unreachable", *failures.unreached(self.nodes[CONTROL].host, node, **data))

    def _look_at_workers(self) -> None:
        """Look at what the ranks do, once a second."""
        for line in self.progress.tick(self._age_s):
            self._send(Note(line), CONTROL)
            self.view.progress = self.progress.record
        if (found := self.hangs.tick(self._age_s)) is not None:
            self._fail_with(KIND, found[0], advice=found[1])

    def _on_failed_early(self, node: Node, report: Failed) -> None:
        """Handle a failure in a call of `run` before its launch has begun."""
        cause = report.failures[0].cause if report.failures else None
        if cause is None or node.call is None or node.call.launch != report.launch:
            return
        is_own = cause.node == node.index
        if node.call.prepares and not report.given_up:
            if node.index != CONTROL and len(self._in[Presence.HERE]) > self._least:
                self._refuse(node, report.launch, failures.commands_failed(cause, ". The others go on without it"))
            else:
                node.failed = failures.commands_failed(cause)
                self._seen.why = (
                    f"before_run has failed on node {node.index}; the launch ends when all nodes have called run."
                )
            self._begin()
        elif is_own and self._goes_on_without(node, cause):
            self._send(Note(f"{failures.within(cause)}; the others go on without it"), CONTROL)
            self._begin()
        else:
            error = failures.too_early(cause, report.launch, self._why_not_without(cause))
            if self.phase is Phase.IDLE:
                self._end_early(report.launch, error)
            else:  # nodes are in the launch before it still
                node.failed = error

    def _on_failed(self, node: Node, report: Failed) -> None:
        launch = self.launch
        if report.launch == launch.number and node.index not in launch.ready:
            if node.call is not None and report.failures:  # it has come late, and its commands have failed
                then = ". The others go on without it"
                self._refuse(node, report.launch, failures.commands_failed(report.failures[0].cause, then))
            return
        if report.launch > launch.number:
            self._on_failed_early(node, report)
            return
        if not self._is_current(report):
            return
        cause = report.failures[0].cause if report.failures else None
        is_told = cause is not None and cause.category == "preempted" and cause.node == node.index
        leaves = report.given_up and is_told and node.index not in launch.given_up  # it says so once
        if leaves and cause is not None and self._goes_on_without(node, cause):
            self._send(Note(f"{failures.within(cause)}; the others go on without it"), CONTROL)
            return
        self._add_failures(report.failures)
        if report.given_up:
            launch.given_up.add(node.index)
            launch.stores.pop(node.index, None)
        self._stop()
        self._decide_if_over()

    def _on_ended(self, node: Node, ended: Ended) -> None:
        launch = self.launch
        if not self._is_current(ended) or node.index not in launch.running:
            return
        self._add_failures(ended.failures)
        view = self._seen
        for rank, code in ended.exit_codes.items():
            view.add("exited", describe_exit(code).partition(":")[0], node.index, rank, exit_code=code)
        view.nodes[node.index].exit_codes = dict(ended.exit_codes)
        if node.presence is Presence.HERE:
            view.enter("stopped", [node.index])
        if line := self.progress.ended(node.index, ended.ok):
            self._send(Note(line), CONTROL)  # before the verdict, with which the log of the launch ends
        view.progress = self.progress.record
        self.stacks.gone(node.index, "it has no workers")
        self.hangs.ended(node.index, ended.ok)
        launch.ended[node.index] = replace(ended, failures=())
        launch.running.discard(node.index)
        if not ended.ok:
            self._stop()
        self._decide_if_over()

    def _on_stored(self, node: Node, stored: Stored) -> None:
        if self._is_current(stored) and self.launch.stores.pop(node.index, None) is not None:
            self._add_failures(stored.failures)
            if stored.failures and self.launch.failing_with is None:
                self._stop()
            self._decide_if_over()

    # --- a generation's end -----------------------------------------------------------------------

    def _stop(self) -> None:
        """Stop all nodes, because one of them fails."""
        launch = self.launch
        if self.phase is Phase.PAUSING:  # nothing runs, and nothing can start any more
            self._fail(self._error_of_launch())
        if self.phase not in (Phase.RUNNING, Phase.STORING) or launch.failing_with is not None:
            return
        self.phase, cause = Phase.STOPPING, launch.cause
        kind = "" if cause is None else cause.kind
        launch.until = self._clock() + self.rules.stop_s + (DIAGNOSTICS_S if kind == KIND else 0.0)
        # A preempted node has time for its workers to save.
        saves = cause is not None and cause.category == "preempted"
        why = "" if cause is None else failures.summary(cause)
        self._seen.turn("stopping", why)
        self.view.add("stopping", "all nodes are told to stop")
        self.view.enter("stopping", [node for node in launch.running if self.nodes[node].presence is Presence.HERE])
        about = (launch.number, launch.generation, failures.reason(cause), failures.teller(cause))
        self._broadcast(Stop(*about, launch.policy.preemption_signal if saves else None, kind))
        self._decide_if_over()  # without members, no report of an end will come

    def _decide_if_over(self) -> None:
        """Decide what follows, once all nodes have reported their end, or that all is stored."""
        if self.phase is Phase.STORING and not self.launch.stores:
            self._finish(self.launch.failing_with)
        elif self.phase in (Phase.RUNNING, Phase.STOPPING) and not self.launch.running:
            self._decide()

    def _decide(self) -> None:
        """All nodes have ended, or their time is up: success, restart or failure."""
        launch, now, cause = self.launch, self._clock(), self._cause()
        silent = sorted(launch.running)
        if cause is None and not silent and all(ended.ok for ended in launch.ended.values()):
            self._store(None)
        elif cause is not None and self._may_restart(cause, now) and self._go_on_without_silent(silent):
            self._restart(cause, now)
        else:
            self._fail(self._error_of_launch(silent))

    def _may_restart(self, cause: Cause, now: float) -> bool:
        launch, policy = self.launch, self.launch.policy
        # A node whose own code has left `run` would not obey another *go*. Of one that was told to end, that is no failure.
        has_given_up = bool(launch.given_up - launch.leaving.keys())
        over = cause.kind == "step_timeout" or now >= self.rules.deadline  # by one node's clock
        # A node that was told to end does not use up a restart; but there must be some at all.
        is_left = launch.counted < policy.max_restarts or (cause.category == "preempted" and policy.max_restarts > 0)
        may = (is_left and cause.category in policy.restart_on) or launch.has_lost_its_port()
        return may and not has_given_up and not over and not launch.repeat(now)

    def _go_on_without_silent(self, silent: list[int]) -> bool:
        """Count nodes as lost whose workers may still run; return whether the gang can go on without them."""
        gone = {node.index for node in self.nodes if node.presence is Presence.GONE}
        # That a node which was told to end does not report the end of its workers keeps no other node from going on.
        unknown = [node for node in silent if node not in self.launch.leaving]
        asked = self.rules.spare_nodes or self.rules.min_nodes or self.rules.replaces
        if not self._are_enough(gone | set(unknown)) or (unknown and not asked) or CONTROL in self.launch.leaving:
            return False
        for each in unknown:
            node, text = self.nodes[each], "it did not report in time that its workers had ended"
            self._seen.add("lost", f"lost: {text}", each)
            self._tell_to_end(node, Cause("lost", each, node.host, exception=text))
        self.launch.running.clear()
        return True

    def _restart(self, cause: Cause, now: float) -> None:
        """All workers are gone; they start again after a pause, or when another task has come for a lost one."""
        launch = self.launch
        self._see_cause(cause)
        self.view.report(cause.describe(), None, cause.as_dict())
        is_move = launch.has_lost_its_port()
        # Without the node that has failed, or with another port, there is nothing to wait for.
        pause_s = 0.0 if is_move or cause.category in GONE else round(launch.pause_s(now), 1)
        number = launch.restarts + 1
        launch.uncounted += cause.category == "preempted"
        launch.moves += is_move
        self.phase, launch.restarts_for, launch.until = Phase.PAUSING, cause, now + pause_s
        launch.failures.clear()  # they are dealt with; what fails in the pause is another cause
        for also in self._leave_out_gone():
            if also.node != cause.node:  # the log has the first cause
                self._send(Note(failures.within(also)), CONTROL)
        waits_for = self._coming(self._able())
        self._remind_at = now + REMIND_S if waits_for else float("inf")
        if is_move:
            text = "another program took the port of the rendezvous; all workers start again with another port"
            self._broadcast(Note(text))
        else:
            when = f"when {names(waits_for)} has come" if waits_for else f"in {pause_s:g} s" if pause_s else "now"
            self._seen.add("restart", f"all workers start again {when}")
            self.view.turn("restarting", failures.summary(cause))
            self.view.waits_for = f"{names(waits_for)} to start" if waits_for else ""
            self.view.enter("restarting", self._able())
            counts = (number, number - launch.uncounted, launch.policy.max_restarts)
            self._broadcast(Restart(launch.number, *counts, pause_s, cause, tuple(waits_for)))
        if not pause_s:
            self._start_again()

    def _tell_to_end(self, node: Node, cause: Cause) -> None:
        """Leave a node out that is here; it may have called the next launch already, which then ends for it, too."""
        numbers = {self.launch.number} | (set() if node.call is None else {node.call.launch})
        for number in sorted(numbers):
            self._send(Verdict(number, failures.told_to_end(cause), group=self.launch.group), node.index)
        self._leave_out(node, cause)

    def _leave_out_gone(self) -> list[Cause]:
        """Leave out all nodes that are gone, or about to go; return why."""
        launch, causes = self.launch, []
        for each, cause in sorted(launch.leaving.items()):
            causes.append(cause)
            self._tell_to_end(self.nodes[each], cause)
        for each in sorted(self._in[Presence.GONE]):
            node = self.nodes[each]
            cause = node.cause or Cause("lost", each, node.host, exception="it has left")
            causes.append(cause)
            self._leave_out(node, cause)
        return causes

    def _start_again(self) -> None:
        """Begin the next generation after the pause, in which more nodes may have been lost or have come."""
        able = self._able()
        if self._coming(able):
            return  # `tick` gives up on them when their time is up
        group = follow(self.launch.group, able, self._size, self._least) if CONTROL in able else None
        if group is None:
            self._fail(self._error_of_launch())
        else:
            self._go(group)

    # --- a launch's end ---------------------------------------------------------------------------

    def _error_of_launch(self, silent: Iterable[int] = ()) -> TorchrunError:
        """Return what every node raises after a failed launch; `silent` nodes did not report their end."""
        quiet, launch, cause = sorted(silent), self.launch, self._cause()
        more = (
            f"\n{names(quiet).capitalize()} did not report in time that the workers there had ended." if quiet else ""
        )
        if self.phase is Phase.PAUSING and cause is not None and launch.restarts_for is not None:
            earlier = failures.summary(launch.restarts_for)
            more += f"\nAll workers were about to start again after an earlier failure: {earlier}."
        cause = cause or (launch.restarts_for if self.phase is Phase.PAUSING else None)
        return failures.of_launch(launch, cause, more + self._why_not_without(cause))

    def _fail(self, error: TorchrunError) -> None:
        """End the launch with an error, after the nodes have stored what there is."""
        # After the step's @timeout the workers may use the grace to end, and storing what they left as long again.
        left_s = max(self.rules.deadline - self._clock(), self.rules.grace_s)
        self._store(error, min(SAVE_S, left_s))

    def _store(self, error: TorchrunError | None, within_s: float | None = None) -> None:
        """Have the nodes store what there is; then the launch ends with `error`, or well."""
        launch, now = self.launch, self._clock()
        able = [node for node in launch.ended if launch.ended[node].stores and node not in launch.given_up]
        nodes = sorted(node for node in able if self.nodes[node].presence is Presence.HERE)
        is_broken = error is not None and (known := cause_of(error)) is not None and known.kind == "store"
        if not nodes or is_broken:  # or the datastore itself has failed
            self._finish(error)
            return
        if error is not None:
            self._see_error(error)
        self.phase, self._remind_at = Phase.STORING, now + REMIND_S
        launch.begin_storing(nodes, error, now, float("inf") if within_s is None else now + within_s + INDEX_S)
        events = () if error is None else self._events(of_all=False)
        self._broadcast(Store(launch.number, launch.generation, error, within_s, events, launch.group))

    def _finish(self, error: TorchrunError | None) -> None:
        """End the launch with its verdict; None: all has gone well."""
        launch, view = self.launch, self._seen
        if error is not None and launch.failing_with is None:  # else that was seen before
            self._see_error(error)
        self.phase, launch.verdict, self._remind_at = Phase.IDLE, error, float("inf")
        launch.running.clear()
        launch.stores.clear()
        view.add("done", "the launch has ended well") if error is None else view.add("failed", "the launch has failed")
        view.turn("done" if error is None else "failed", view.why if error is not None else "")
        view.enter("step code", [node for node in self._in[Presence.HERE] if self.nodes[node].call is not None])
        view.place((), LATE_S)
        if error is None:
            view.error, view.cause, view.why = None, None, ""
            self._dismiss_others()
        self._tell_verdict(error)
        self._next_mark = self.view.count
        if error is not None and any(self.nodes[node].cause for node in self._in[Presence.GONE]):
            self._break(error)  # without all its nodes the gang can't launch again
        self._begin()  # nodes may have called the next launch already

    def _tell_verdict(self, error: TorchrunError | None) -> None:
        """Send all nodes their verdict; nodes that get the same share one object. Keep it for those that call it later."""
        launch, of_all, of_gang = self.launch, self._events(), self._events(of_all=False)
        # Where the nodes' numbers contradict each other, each of these launches has ended.
        is_early = launch.generation < 0
        called = [(node, call) for node in sorted(self._calls) if (call := self.nodes[node].call) is not None]
        told = [(node, call.launch) for node, call in called if is_early or call.launch <= launch.number]
        group = launch.group if launch.group.size else None
        made: dict[tuple[int, bool], Verdict] = {}
        for node, number in told:
            key = (number, node == CONTROL)
            if key not in made:
                left = self._left(node == CONTROL, error)
                seen = of_all if node == CONTROL else of_gang
                made[key] = Verdict(number, error, seen, left, error is None and launch.alone, group)
            self._send(made[key], node)
            launch.told.add(node)
            self._forget_call(self.nodes[node])
        left = self._left(True, error) if self.rules.replaces else {}
        for number in {launch.number, *(number for _, number in told)}:
            self._verdicts[number] = Verdict(number, error, left=left, group=group)
        for number in list(self._verdicts)[:-KEPT_VERDICTS]:
            del self._verdicts[number]

    def _left(self, is_control: bool, error: TorchrunError | None) -> dict[str, Any]:
        """Return what the control node, or each other node, is told of what the launch has left."""
        launch, cause = self.launch.number, cause_of(error)
        of = sorted(self.view.outputs.get(launch, {}).items())
        nodes = {
            str(node): [each["key"], each["files"], each["size"]] for node, each in of if is_control or node == CONTROL
        }
        rank = "" if cause is None else str(cause.rank)
        values = {rank: self._values[rank]} if rank in self._values else {}
        if error is None:
            values = dict(self._values) if is_control else {}
        found = {
            "outputs": {"nodes": nodes} if nodes else {},
            "functions": values if self.launch.generation >= 0 else {},
            "progress": self.progress.verdict(launch, is_control),
        }
        return {name: told for name, told in found.items() if told}

    def _dismiss_others(self) -> None:
        """Let the nodes leave without which a launch has ended well, and wait for none of them."""
        launch = self.launch
        for node in [self.nodes[each] for each in sorted(self._in[Presence.ABSENT])]:
            if not launch.takes_part(node.index) and node.cause is not None:
                self._give_up_on(node)
        here = [node for node in sorted(self._in[Presence.HERE]) if not launch.takes_part(node)]
        self._dismiss([node for node in here if self.nodes[node].call is not None])

    def _dismiss(self, others: list[int]) -> None:
        for each in others:
            self._enter(self.nodes[each], Presence.OUT)
            self._seen.add("dismissed", "is not needed any more", each)
        if others:
            verb, them = ("leaves", "it") if len(others) == 1 else ("leave", "them")
            text = f"{names(others)} {verb}: launch {self.launch.number} has ended well without {them}"
            self._send(Note(text), CONTROL)

    def _send_late_verdict(self, node: Node, verdict: Verdict) -> None:
        """Send the verdict of a launch to a node that called it too late, or that can't take part in it."""
        number, is_last = verdict.launch, verdict.launch >= self.launch.number
        seen = self._events(of_all=node.index == CONTROL, launch=None if is_last else number)
        self._send(replace(verdict, events=seen), node.index)
        if verdict.is_without(node.index) and node.presence is Presence.HERE:
            self._dismiss([node.index])
            self._begin()
            self._see_who_is_left()
        elif number == self.launch.number and self.phase is Phase.IDLE:
            node.is_new = False  # it is where the others are

    def _break_for(self, cause: Cause, after_step: bool = False) -> None:
        number = self._number
        if number is None:
            self._break(self._error_outside(cause, after_step))
        else:
            self._break(failures.too_early(cause, number, self._why_not_without(cause)))

    def _error_outside(self, cause: Cause, after_step: bool = False) -> TorchrunError:
        """Return the error for a failure outside of launches: the last launch's own, if it was that failure."""
        last = self.launch.verdict
        known = cause_of(last)
        # Ctrl-C interrupts all nodes of a local run, one after the other.
        is_known = known is not None and (cause.is_same_event(known) or cause.kind == known.kind == "interrupted")
        if last is not None and is_known:
            return last
        return failures.outside(cause, after_step, self._why_not_without(cause))

    def _break(self, error: TorchrunError) -> None:
        """Break the gang: no launch can begin any more. Send *abort* to every node.

        A launch that still gathers ends with the same error: else the first node that leaves with it would seem to have
        called `run` less often than the others.
        """
        if self.broken is not None:
            return
        number = self._number
        # Commands that have failed were before anything else.
        first = next((node.failed for node in self.nodes if node.failed is not None), None)
        self.broken = error = first if number is not None and first is not None else error
        if number is not None:
            self._end_early(number, error)
        self._seen.add("broken", "nothing can be launched any more")
        self._see_error(error)
        self.view.turn("failed", self.view.why)
        others = sorted(self._in[Presence.HERE] - {CONTROL})
        self._send(Abort(error, self._events(of_all=False)), *(node for node in others if node not in self._done))
        if self.nodes[CONTROL].presence is Presence.HERE:  # when done, it waits for the others
            self._send(Abort(error, self._events()), CONTROL)

    # --- time limits ------------------------------------------------------------------------------

    def _overrun(self, now: float) -> str | None:
        """Return in words which time limit the workers, or the storing after them, have passed; else None."""
        launch, is_storing = self.launch, self.phase is Phase.STORING and self.launch.failing_with is None
        if self.phase is not Phase.RUNNING and not is_storing:
            return None
        if now > self.rules.deadline:
            stores = launch.who_stores(now) if is_storing else ""
            return self.rules.longer + (f"; {stores}" if stores else "")
        timeout_s = launch.policy.timeout_s
        if not is_storing and timeout_s is not None and now - launch.went_at > timeout_s:
            return f"longer than {timeout_s:g} s"
        return None

    def _time_is_up(self) -> None:
        """End waits that exceed the step's ``@timeout``; `_overrun` ends workers and storing."""
        control, number = self.nodes[CONTROL], self._number
        if number is not None:
            cause = self._timed_out(f"{self.rules.longer}, while launch {number} waited for {self._waits_for()}")
            self._end_early(number, failures.too_early(cause, number))
        elif self.phase is Phase.PAUSING:
            self._add_failures([Failure(self._timed_out(self.rules.longer))])
            self._fail(self._error_of_launch())
        elif self.phase is Phase.IDLE and not self._is_time_up:
            if control.presence is not Presence.HERE:  # it is about to join, and will hear then
                return
            if CONTROL not in self._done:
                self._break(self._error_outside(self._timed_out(self.rules.longer)))
        elif self.phase is Phase.STOPPING or (self.phase is Phase.STORING and self.launch.failing_with is not None):
            return  # ends soon anyway
        self._is_time_up = True  # once only, as an alarm; a later launch ends at once

    def _timed_out(self, text: str) -> Cause:
        self._seen.add("timeout", f"timeout: it ran {text}")
        return Cause("step_timeout", CONTROL, self.nodes[CONTROL].host, exception=text)

    def _remind(self, now: float) -> None:
        """Log what is waited for."""
        self._remind_at = now + REMIND_S
        number, ready = self._number, [node for node in sorted(self._calls) if not self._prepares(node)]
        if number is not None and ready and (waits_for := self._waits_for()):  # else nobody waits
            absent = sorted(self._in[Presence.ABSENT])
            why = failures.to_see_why(absent[0], self.rules.why_it_waits(absent[0])) if absent else ""
            text = f"launch {number} waits for {waits_for}{why and '.' + why}"
            self._send(Note(text), CONTROL)  # even if it is late itself: the terminal shows its log
            self._send(Note(text, is_detail=True), *(node for node in ready if node != CONTROL))
        elif self.phase is Phase.PAUSING and (coming := self._coming(self._able())):
            why = failures.to_see_why(coming[0], self.rules.why_it_waits(coming[0]))
            text = f"launch {self.launch.number} waits for {names(coming)} to start{why and '.' + why}"
            self._send(Note(text), CONTROL)
        elif text := self.launch.who_stores(now, besides=CONTROL):  # the control node logs its own
            self._send(Note(text), CONTROL)

    def _prepares(self, node: int) -> bool:
        call = self.nodes[node].call
        return call is not None and call.prepares

    def _waits_for(self) -> str:
        """Return in words which nodes are not ready, while others are."""
        absent = sorted(node for node in self._in[Presence.ABSENT] if self._may_come(node))
        late = sorted(self._in[Presence.HERE] - self._calls)
        waits = [f"{names(absent)} to start"] if absent else []
        waits += [f"{names(late)} to call current.torch.run"] if late else []
        prepare = [node for node in sorted(self._calls) if self._prepares(node) and self.nodes[node].failed is None]
        waits += [f"{names(prepare)} to end before_run"] if prepare else []
        return " and for ".join(waits)

    def _fail_with(self, kind: str, text: str, node: int | None = None, advice: str = "") -> None:
        """Stop the launch for a reason that no node has reported as its failure, such as a time limit."""
        self._seen.add(kind, f"{kind}: {text}", node)
        of = CONTROL if node is None else node
        self._add_failures([Failure(Cause(kind, of, self.nodes[of].host, exception=text, advice=advice))])
        self._stop()

    # --- what is seen -----------------------------------------------------------------------------

    def _events(self, of_all: bool = True, launch: int | None = None) -> tuple[Happened, ...]:
        """Return what has happened since the end of the launch before, or in one launch; or only what concerns all."""
        events = self.view.since(self._mark if launch is None else 0)
        found = [each for each in events if of_all or not each.nodes or each.kind in _OF_THE_GANG]
        return tuple(each for each in found if launch in (None, each.launch))

    def _cause(self) -> Cause | None:
        """Return the first failure; of a hang with where the ranks were."""
        cause = self.launch.cause
        if cause is not None and cause.kind == KIND and (detail := self.hangs.detail()):
            self._seen.hangs = self.hangs.record
            return replace(cause, detail=detail)
        return cause

    def _see_cause(self, cause: Cause, before: str = "") -> None:
        self._seen.why = headline(before.replace("\n", " ") + failures.summary(cause))
        about = {} if cause.rank is None else {"rank": cause.rank, "exit_code": cause.exit_code}
        self.view.add("cause", f"cause: {self.view.why}", **about)

    def _see_error(self, error: TorchrunError) -> None:
        failure = failure_of(error)
        if failure is not None:
            # What stands before a lost connection tells who had ended before.
            self._see_cause(failure.cause, failure.before if failure.cause.is_consequence else "")
        else:
            self._seen.why = headline(error.message)
        self.view.error, self.view.cause = error.message[:_ERROR_CHARS], error.cause
        self.view.report(error.message, type(error).__name__, error.cause)

    def _add_failures(self, found: Iterable[Failure]) -> None:
        """Add failures to the launch; note a preemption once."""
        before = self.launch.preempted
        self.launch.add_failures(found, self._clock())
        after = self.launch.preempted
        if before is None and after is not None:
            self._seen.add("preempted", headline(after.what), after.node)

    # --- sending ----------------------------------------------------------------------------------

    def _broadcast(self, message: Message) -> None:
        self._send(message, *sorted(self._in[Presence.HERE] - self._done))

    def _send(self, message: Message, *nodes: int) -> None:
        self._out += [(node, message) for node in nodes]

    def _flush(self) -> list[Outgoing]:
        """Return what is to be sent."""
        out, self._out = self._out, []
        return out


_Handler: TypeAlias = Callable[[Gang, Node, Any], None]
_IN_ALL: dict[type, _Handler] = {
    Join: Gang._on_join,
    Leave: Gang._on_leave,
    Ready: Gang._on_ready,
    Report: Gang._on_report,
}
_HANDLERS: dict[tuple[Phase, type], _Handler] = {
    **{(phase, message): handler for phase in Phase for message, handler in _IN_ALL.items()},
    **{(phase, Failed): Gang._on_failed for phase in Phase if phase is not Phase.IDLE},
    (Phase.IDLE, Failed): Gang._on_failed_early,
    (Phase.RUNNING, Ended): Gang._on_ended,
    (Phase.STOPPING, Ended): Gang._on_ended,
    (Phase.STORING, Stored): Gang._on_stored,
}
"""What is done with each message in each phase; where there is nothing, it is late."""
