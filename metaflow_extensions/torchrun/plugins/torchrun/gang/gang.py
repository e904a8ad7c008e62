"""The gang's machine on the control node: joining, launches with their restarts, leaving.

`Gang` is pure: messages and the clock go in, messages come out. It starts no thread, opens no socket and never sleeps, so
a test can try every order of messages. One object decides, so every node gets the same decision. Each message has a
method, and `Gang._settle` says what follows from all that is known then, in which `Phase`.

Who takes part in a generation is one rule: who took part stays; the first others that are here fill up to the size. Are
there fewer, those are waited for that may come; then it goes on with at least `min_nodes`, or fails.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from ..errors import GangError, TorchrunError
from ..texts import counted, headline, moment, names, size_text
from . import failures
from .cause import Cause, Failure, FailureText, cause_of, describe_exit, failure_of
from .launch import GONE, Launch
from .limits import FIRST_OUTPUT_S, INDEX_S, LATE_S, QUIET_S, REMIND_S, SAVE_S
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
    Stop,
    StopAt,
    Store,
    Stored,
    Verdict,
    What,
)
from .policy import Group, Rules, follow
from .progress import Progress
from .questions import HANG, LIMITS, PREEMPTED, Question
from .stacks import GangStacks, NodeStacks, conclude, gathered, hang
from .view import GangView, NodeView, Presence, State
from .wire import from_plain

Outgoing: TypeAlias = tuple[int, Message]
"""A node's index and a message for it."""


_ERROR_CHARS = 8 * 1024  # of an error's message in the view; its report has more


class Phase(enum.Enum):
    """Where the last launch stands."""

    IDLE = "no launch runs; nodes may have called `run` already"
    RUNNING = "the workers run"
    STOPPING = "the workers are told to stop"
    PAUSING = "no worker is left; a restart follows, perhaps when other tasks have come"
    STORING = "no worker is left, and no restart follows: what the workers left is stored"


@dataclass
class Node:
    """One node as the control node knows it."""

    index: int
    awaited_until: float  # until when a task of it is waited for
    join: Join  # of its last task
    presence: Presence = Presence.ABSENT
    is_new: bool = False  # whether its task has come in the place of another, and was not ready yet
    cause: Cause | None = None  # why it is gone, or out

    @property
    def host(self) -> str:
        """The host name of its last task."""
        return self.join.host

    def lost(self, why: str) -> Cause:
        """Return why it is gone; if that is not known yet, it is lost, and `why`."""
        return self.cause or Cause("lost", self.index, self.host, exception=why)


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
        self.view = GangView(began=time.time(), nodes=[NodeView() for _ in range(num_nodes)])
        self.changes = 0  # how often the view may have changed
        self.progress = Progress(self._name)
        self._questions: dict[str, Question] = {}  # that are not answered yet
        self.answers: dict[str, Any] = {}  # to commands, until they are fetched
        self._has_warned = False  # of a report that could not be read
        self.phase, self.launch = Phase.IDLE, Launch(-1)
        self.broken: TorchrunError | None = None  # why no launch can begin any more
        self._pick_port, self._clock = pick_port, clock
        self._began_at = self._now = clock()
        until = self._now + self.rules.started_timeout_s
        self.nodes = [Node(each, until, Join(each)) for each in range(num_nodes)]
        # Kept up to date: to look at thousands of nodes at each message would be slow.
        self._in = {each: set[int]() for each in Presence}
        self._absent, self._here, self._gone, self._out_of_it = self._in.values()
        self._absent.update(range(num_nodes))
        self._called: dict[int, int] = {}  # node -> the launch that it has called, as long as that has no verdict
        self._calls: dict[int, Ready] = {}  # of those whose commands of before_run have ended, the calls themselves
        self._done: set[int] = set()  # nodes whose step's code has ended well
        self._failed: set[int] = set()  # nodes whose last task has left with an error
        self._is_over = False  # whether the control node's step has ended, and no other node is left
        self._is_time_up = False  # whether the end of the step's @timeout was handled
        self._remind_at = float("inf")  # when to log next what is waited for
        self._verdicts: dict[int, Verdict] = {}  # by launch, of all: another task may come and call them late
        self._out: list[Outgoing] = []

    # --- what is known ----------------------------------------------------------------------------

    @property
    def without(self) -> set[int]:
        """The nodes that are lost, or were told to end, and without which the gang goes on: those tasks shall end."""
        return {node for node in self._out_of_it if self.nodes[node].cause is not None}

    @property
    def members(self) -> set[int]:
        """The nodes, besides the control node, that have joined and not yet left."""
        return self._here - {CONTROL}

    @property
    def ready(self) -> set[int]:
        """The nodes that take part in the last launch, or may."""
        number = self.launch.number
        return {node for node, call in self._calls.items() if call.launch == number}

    @property
    def _size(self) -> int:
        """How many nodes take part if none is missing."""
        return self.num_nodes - self.rules.spare_nodes

    @property
    def _least(self) -> int:
        return self.rules.min_nodes or self._size

    @property
    def _number(self) -> int | None:
        """The number of the launch that runs, or that nodes have called; None without one."""
        if self.phase is not Phase.IDLE:
            return self.launch.number
        return min(self._called.values(), default=None)

    def _name(self, rank: int) -> str:
        node = self.launch.group.nodes[rank // (self.launch.control.nproc or 1)]
        return f"rank {rank} (node {node}, host {self.nodes[node].host})"

    def _enter(self, node: Node, presence: Presence) -> None:
        self._in[node.presence].discard(node.index)
        self._in[presence].add(node.index)
        node.presence = presence

    # --- what can happen --------------------------------------------------------------------------

    def handle(self, node: int, message: Message) -> list[Outgoing]:
        """Handle a node's message and return the messages to send; what comes too late is ignored."""
        handler = _HANDLERS.get(type(message))
        if handler is None:
            return []
        self.changes += 1
        return self._step(handler, self, self.nodes[node], message)

    def ask(self, asked: str, what: What, of: dict[str, Any]) -> list[Outgoing]:
        """Ask the nodes for a command, see `registry.Request`; `answers` has it later, under this id."""
        return self._step(self._ask, asked, what, of)

    def lost(self, node: int, why: str) -> list[Outgoing]:
        """Handle the end of a node's connection, or of a task that had not joined yet.

        Its supervisor keeps the connection until the workers have ended.
        """
        return self._step(self._on_lost, self.nodes[node], why)

    def give_up(self, error: TorchrunError) -> list[Outgoing]:
        """Break the gang for a reason that is no node's fault."""
        return self._step(self._break, error)

    def was_stopped(self, seconds: float) -> list[Outgoing]:
        """Give the nodes as much longer to report as this process was stopped, perhaps with all of them."""
        launch = self.launch
        launch.until, launch.active_at = launch.until + seconds, launch.active_at + seconds
        launch.went_at += seconds
        return []

    def tick(self) -> list[Outgoing]:
        """Check all time limits; call it once a second."""
        return self._step(self._tick)

    def _step(self, do: Callable[..., None], *args: Any) -> list[Outgoing]:
        """Do something at one moment; return what is to be sent."""
        self._now = self._clock()
        self.view.now_s = self._now - self._began_at
        do(*args)
        self._settle()
        out, self._out = self._out, []
        self.changes += bool(out)
        return out

    def _settle(self) -> None:
        """Do what follows from what is known now."""
        self._answer_questions()
        before = None
        while before != (now := (id(self.launch), self.phase)):
            before, launch = now, self.launch
            is_late = self._now >= launch.until
            if launch.fails and launch.failing_with is None and self.phase not in (Phase.IDLE, Phase.STOPPING):
                self._stop()
            elif self.phase is Phase.STORING and (is_late or not launch.stores):
                self._finish(launch.failing_with)
            elif self.phase in (Phase.RUNNING, Phase.STOPPING) and (is_late or not launch.running):
                self._decide()
            elif self.phase is Phase.PAUSING:
                self._start_again()
            elif self.phase is Phase.IDLE:
                self._begin()
        self._see_who_is_left()

    def _tick(self) -> None:
        if self._absent:
            self._give_up_overdue()
        if self._now >= self._remind_at:
            self._remind()
        self._look_at_limits()
        if self.phase is Phase.RUNNING:
            self._look_at_workers()

    # --- joining ----------------------------------------------------------------------------------

    def _on_join(self, node: Node, join: Join) -> None:
        """Take in a task that `refuses` has nothing against."""
        if node.presence is not Presence.HERE:
            self._see("joined", "joined", node, "step code", launch=None)
            self.view.nodes[node.index].host = join.host
            node.is_new = bool(node.join.task)
            self._failed.discard(node.index)
            node.cause = None
        self._enter(node, Presence.HERE)
        node.join = join
        self._send(Answer(), node.index)
        if self.broken is not None:
            self._send(Abort(self.broken), node.index)

    def refuses(self, join: Join) -> Answer | None:
        """Return the answer to a task that can't be its node now; None if it may join.

        It may if no task is that node, or it is itself and has not got its answer.
        Kubernetes starts a second task at once where a pod is deleted or drained, while the first still has its grace.
        The second tries again, until it can take that place or the gang has ended: its own end would have all pods killed.
        """
        node = self.nodes[join.node]
        if node.presence is Presence.HERE and join == node.join:
            return None
        if node.presence in (Presence.ABSENT, Presence.OUT) and not self._is_over:
            return None
        if self.broken is not None:
            return Answer(self.broken)
        text = f"another task, on host {node.host}, is or was node {node.index}, and can't be replaced yet"
        return Answer(GangError(text), is_early=True)

    # --- nodes that are gone ----------------------------------------------------------------------

    def _on_lost(self, node: Node, why: str) -> None:
        if node.presence is Presence.HERE or (node.presence is Presence.ABSENT and not node.join.task):
            self._lose(node, why)
        self._has_no_workers(node.index)

    def _lose(self, node: Node, why: str) -> None:
        self._see("lost", f"lost: {why}", node, "lost")
        self._go_without(node, node.lost(why))

    def _on_leave(self, node: Node, leave: Leave) -> None:
        is_here = node.presence is Presence.HERE
        if leave.how == "killed" and is_here:  # its supervisor still ends the workers
            self._lose(node, leave.text)
            if node.index == CONTROL:  # whose loss ends all
                self._has_no_workers(CONTROL)
        elif leave.how == "done" and is_here and node.index not in self._done:
            self._done.add(node.index)
            self._see("finished", "the step has ended well", node, "storing")
            if self._here <= self._done and not self._failed:
                self.view.ended_s = self.view.now_s
            self._has_no_workers(node.index)
        elif leave.how in ("left", "failed") and node.presence is not Presence.GONE:
            self._on_left(node, leave)

    def _on_left(self, node: Node, leave: Leave) -> None:
        has_failed = leave.how == "failed"
        self._see("left", "left: the step has failed" if has_failed else "left", node)
        self._send(Farewell("received"), node.index)
        self.view.is_over |= node.index == CONTROL
        if node.presence is Presence.HERE or node.cause is None:  # else it is lost already
            self.view.enter("failed" if has_failed else "finished", [node.index])
        if node.presence is Presence.HERE:
            self._failed |= {node.index} if has_failed else set()
            self._go_without(node, leave.cause)
            self._has_no_workers(node.index)
        if node.index == CONTROL:
            self._settle()
            launch = self.launch
            if has_failed and self.phase is not Phase.IDLE:  # it can't tell the nodes later how it ends
                self._finish(launch.failing_with or self._error_of_launch())
            if has_failed and node.cause is None and launch.verdict is not None and not self._here <= launch.told:
                self._break(launch.verdict)
            self._send(Farewell("bye"), *range(1, self.num_nodes))

    def _go_without(self, node: Node, cause: Cause | None) -> None:
        """Go on without a node that is gone from now on, or stop everything; without a cause, it has ended well."""
        self._enter(node, Presence.GONE)
        self._end_call(node)
        node.cause = cause
        if cause is None or self._goes_on_without(node, cause):
            return
        if self.phase is Phase.IDLE:
            self._break(self._error_outside(cause))
        else:
            self.launch.add_failures([Failure(cause)], self._now)
            self.launch.stores.discard(node.index)

    def _see_who_is_left(self) -> None:
        """Send a control node whose step has ended the failure of a member, or that no member is left.

        A member that raises the verdict of a launch, as all do, fails the run. The control node's step may have ended
        well even so: it has caught the verdict, or ended before that launch.
        """
        if CONTROL not in self._done or CONTROL not in self._here:
            return
        if self.broken is None and (first := min(self._failed & self._gone, default=None)) is not None:
            cause = self.nodes[first].cause
            error = self.launch.verdict if cause is None else self._error_outside(cause)
            if error is not None:
                self._break(error)
        if len(self._here) == 1 and not any(map(self._may_come, self._absent)) and not self._is_over:
            self._is_over = True
            self._send(Farewell("alone"), CONTROL)

    def _has_no_workers(self, node: int) -> None:
        """Expect no more of a node's workers, nor that it stores anything."""
        self.launch.running.discard(node)
        self.launch.stores.discard(node)

    def _goes_on_without(self, node: Node, cause: Cause) -> bool:
        """Leave a node out that has no workers now, if there are enough others; return whether that holds."""
        launch = self.launch
        is_needed = launch.takes_part(node.index) and (
            self.phase in (Phase.RUNNING, Phase.STOPPING) or node.index in launch.stores
        )
        # A task that has come in the place of another, and fails before it is ready, is no loss for the others.
        is_loss = cause.category in GONE or node.is_new
        may_go = is_loss and not is_needed and self.broken is None and node.index != CONTROL
        if self.phase is Phase.PAUSING:
            may_go = may_go and cause.category not in GONE - launch.policy.restart_on
        if self.phase in (Phase.IDLE, Phase.PAUSING):
            may_go = may_go and self._are_enough({node.index})
        if may_go:
            self._leave_out(node, cause)
        return may_go

    def _may_be_replaced(self, node: Node) -> bool:
        """Return whether another task may come in the place of a node that is gone, or about to go."""
        is_in_time = not node.is_new or self._now < node.awaited_until
        return self.rules.replaces and node.index != CONTROL and not self._is_over and is_in_time

    def _leave_out(self, node: Node, cause: Cause, waits: bool = True) -> None:
        """Go on without a node that is gone or about to go, or wait for another task in its place."""
        node.cause = cause
        self._end_call(node)
        self._done.discard(node.index)
        self.launch.leaving.pop(node.index, None)
        self.launch.given_up.discard(node.index)
        if waits and self._may_be_replaced(node):
            if not node.is_new:
                node.awaited_until = self._now + self.rules.started_timeout_s
            self._enter(node, Presence.ABSENT)
            kind, then = "awaited", "another task takes its place"
        else:
            self._enter(node, Presence.OUT)
            kind, then = "left_out", "the others go on without it"
        self._see(kind, f"{then}: it {headline(cause.what)}", node, "lost")
        if self.launch.failing_with is None or self.phase is not Phase.STORING:  # else nobody goes on
            self._send(Note(f"{FailureText(cause).who} {headline(cause.what)}; {then}"), CONTROL)

    def _may_come(self, node: int) -> bool:
        return self._now <= self.nodes[node].awaited_until

    def _are_enough(self, besides: Collection[int] = ()) -> bool:
        """Return whether enough nodes are here, or may come, if some are gone."""
        gone = {*besides, *(self.launch.leaving if self.phase is not Phase.IDLE else ())}
        if CONTROL in gone:
            return False
        come = [node for node in self._absent if self._may_come(node) and node not in besides]
        come += [node for node in gone - self._absent if self._may_be_replaced(self.nodes[node])]
        return len(self._here - gone) + len(come) >= self._least

    def _give_up_overdue(self) -> None:
        """Go on without the nodes that have not come in time, or break the gang."""
        overdue = sorted(node for node in self._absent if not self._may_come(node))
        if overdue and self.phase is Phase.IDLE and not self._are_enough(overdue):
            first = self.nodes[overdue[0]]
            waited_s, command = self.rules.started_timeout_s, self.rules.why_it_waits(first.index)
            never = failures.missing(overdue, self.num_nodes, waited_s, command)
            self._break(never if first.cause is None else self._error_outside(first.cause))
        else:
            for each in overdue:
                self._give_up_on(self.nodes[each])

    def _give_up_on(self, node: Node) -> None:
        """Wait no longer for a node's task."""
        self._leave_out(node, node.lost(f"it has not joined within {self.rules.started_timeout_s:g} s"), waits=False)

    def _why_not_without(self, cause: Cause | None) -> str:
        """Say why the gang does not go on without a lost node, and what would let it."""
        launch, is_idle = self.launch, self.phase is Phase.IDLE
        if cause is None or cause.category not in GONE or self.num_nodes == 1:
            return ""
        able = len(self._here - {cause.node} - launch.leaving.keys())
        is_used_up = not (is_idle or self.phase is Phase.PAUSING or launch.has_restarts_left(cause))
        found = [f"max_restarts={launch.policy.max_restarts} allows no more restarts"] * is_used_up
        if cause.node == CONTROL:
            found = [f"node {CONTROL} is the control node"]
        elif not is_idle and cause.category not in launch.policy.restart_on:
            found = [f"restart_on does not have {cause.category!r}"]
        elif able < self._least:
            left = f"{counted(able, 'node')} {'is' if able == 1 else 'are'} left"
            found += [f"{left}, and it needs {self._least} (spare_nodes and min_nodes let it go on with fewer)"]
            found += ["no other task has taken its place"] * (self.rules.replaces and not is_used_up)
        return f"\nIt can't go on without that node: {'; '.join(found)}." if found else ""

    # --- a launch's begin -------------------------------------------------------------------------

    def _may_call(self, node: Node, number: int) -> bool:
        """Return whether a node can call a launch; where it can't any more, it gets the verdict."""
        known = self._verdicts.get(number) or (self.broken and Verdict(number, self.broken))
        if node.presence is not Presence.HERE:
            self._send(Verdict(number, failures.told_to_end(node.lost("it is not needed any more"))), node.index)
        elif known and node.index not in self._done:  # it was over before this node called it
            if number >= self.launch.number and self.phase is Phase.IDLE:
                node.is_new = False  # it is where the others are
            self._send_verdict(node, known)
        return node.presence is Presence.HERE and not known and node.index not in self._done

    def _on_ready(self, node: Node, call: Ready) -> None:
        if not self._may_call(node, call.launch):
            return
        self._see_call(call.launch, call.nproc)
        was_preparing = node.index in self._called and node.index not in self._calls
        text = "before_run has ended well" if was_preparing else "called run"
        self._called[node.index] = call.launch
        self._see("ready", text, node, "waiting", launch=call.launch, generation=None)
        if not self._calls:
            self._remind_at = self._now + QUIET_S
        self._calls[node.index] = call
        if self.phase is Phase.IDLE:
            node.is_new = False
        elif call.launch == self.launch.number:
            self._take_late(node, call)

    def _end_call(self, node: Node) -> None:
        self._called.pop(node.index, None)
        self._calls.pop(node.index, None)

    def _see_call(self, number: int, nproc: int | None) -> None:
        """Note that a node has called a launch, perhaps as the first one."""
        view = self.view
        if self.phase is not Phase.IDLE:
            return
        view.nproc = nproc or view.nproc
        if view.launch is not None and number <= view.launch:
            return
        view.turn("waiting")
        view.goodput.enter("waiting", view.now_s)
        view.launch, view.generation, view.began_s = number, None, None
        view.error = view.cause = view.restarts_left = None  # those of the launch before
        for each, node in enumerate(view.nodes):
            node.takes_part, node.exit_codes = each not in self._out_of_it, {}

    def _take_late(self, node: Node, call: Ready) -> None:
        """Take a node in while the launch runs, as a spare; it alone hears if it can't take part, and shows all of it."""
        error = failures.contradiction({CONTROL: self.launch.control, node.index: call})
        if error is not None:
            self._tell_to_end(node, Cause("call", node.index, node.host, exception=error.message))
        else:
            node.is_new = False
            self._see("spare", "waits as a spare", node)

    def _able(self) -> list[int]:
        """Return the nodes that can take part in the next generation of the launch, in order."""
        launch = self.launch
        return sorted((self.ready & self._here) - launch.leaving.keys() - launch.given_up)

    def _coming(self, able: Collection[int]) -> list[int]:
        """Return the nodes that a generation waits for, if fewer than it has room for are `able` to take part."""
        missing = self._size - len(able)
        if missing <= 0:
            return []
        there = (self._here - self._done - set(able)) | self._absent
        candidates = sorted(there - self.launch.leaving.keys() - self.launch.given_up)
        return [node for node in candidates if self._may_come(node)][:missing]

    def _begin(self) -> None:
        """Begin a launch when all nodes have called it that take part, or end it if it can't begin."""
        # The cheap checks come first: this runs for each of thousands of messages.
        if self.phase is not Phase.IDLE or self.broken is not None or not self._calls:
            return
        ended = self._gone | self._done
        if not ended and (len(self._calls) < min(self._size, len(self._here)) or CONTROL not in self._here):
            return
        number = min(call.launch for call in self._calls.values())
        if ended:
            self._end_early(number, failures.step_has_ended(number, sorted(ended)))
            return
        group = follow(self.launch.group, sorted(self._here), self._size, self._least)
        if (group is None or group.size < self._size) and any(map(self._may_come, self._absent)):
            return
        if group is None:
            self._break(self._error_outside(next(node.cause for node in self.nodes if node.cause is not None)))
        elif not self._calls.keys() >= set(group.nodes):
            return
        elif (error := failures.contradiction({node: self._calls[node] for node in group.nodes})) is not None:
            self._end_early(number, error)
        else:
            self.launch = Launch(number, self._calls[CONTROL], group=self.launch.group)
            for each in sorted(self.ready - set(group.nodes)):
                self._see("spare", "waits as a spare", self.nodes[each])
            self._go(group)

    def _end_early(self, number: int, error: TorchrunError) -> None:
        """End a launch that can't begin."""
        launch = Launch(number, group=self.launch.group)
        if self.phase is Phase.IDLE:
            self.launch = launch
            self._finish(error)
        else:  # nodes are in the launch before it still
            self._tell_verdict(launch, error)

    def _go(self, group: Group) -> None:
        """Send *go*: all nodes of a group start a generation of workers."""
        launch, control = self.launch, self.launch.control
        port = self._pick_port(control.master_port)
        if port is None:
            self._finish(failures.port_taken(control.master_port, self.nodes[CONTROL].host))
            return
        tasks = {node: self.nodes[node].join.task for node in group.nodes}
        left = sorted(node for node, task in launch.tasks.items() if tasks.get(node) != task)
        came = sorted(node for node, task in tasks.items() if launch.tasks and launch.tasks.get(node) != task)
        launch.begin_generation(self._now, group, tasks)
        self.phase = Phase.RUNNING
        self._see_go(came)
        about = (launch.number, launch.generation, port, self.rules.name, launch.limit)
        again = "; ".join(filter(None, (launch.again, failures.change_of_nodes(left, came, group.size))))
        restart = (tuple(left), tuple(came), again, launch.restarts_for)
        self._broadcast(Go(*about, group, *restart))

    def _see_go(self, came: list[int]) -> None:
        """Note that a generation begins."""
        launch, view, nodes = self.launch, self.view, self.launch.group.nodes
        control = launch.control
        view.launch, view.generation = launch.number, launch.generation
        view.nproc, view.facts = control.nproc, control.facts
        view.began_s = view.now_s if view.began_s is None else view.began_s
        view.restarts_left = launch.limit - launch.generation
        view.restarts_s += [round(view.now_s, 3)] if launch.generation else []
        for each in came:
            self._see("taken_in", "takes part from now on", self.nodes[each])
        for index, node in enumerate(view.nodes):
            node.takes_part, node.has_written, node.exit_codes = launch.takes_part(index), False, {}
        again, es = " again" * (launch.generation > 0), "es" * (control.nproc != 1)
        self._see("go", f"start{again} on {counted(len(nodes), 'node')}, {control.nproc} process{es} on each")
        view.turn("starting")
        view.goodput.go(launch.generation > 0, view.now_s)
        view.enter("starting", nodes)
        view.place(nodes)
        view.outputs.pop(launch.number, None)  # those of a generation before
        self.progress.begin(launch.number)

    # --- what the nodes report --------------------------------------------------------------------

    def _is_current(self, report: Report | Failed | Ended | Stored) -> bool:
        """Return whether a message is about this launch and generation; another one is late."""
        launch = self.launch
        return report.launch == launch.number and report.generation in (None, launch.generation)

    def _on_report(self, node: Node, report: Report) -> None:
        """Keep what a node tells; what can't be read must not end a launch, and a line says so once."""
        if report.kind not in ("before_run", "command") and (self.phase is Phase.IDLE or not self._is_current(report)):
            return
        try:
            self._take(node, report)
        except Exception as error:
            if not self._has_warned:
                why = f"{type(error).__name__}: {error}"
                self._send(Note(f"warning: node {node.index}'s {report.kind} is not kept: {why}"), CONTROL)
            self._has_warned = True

    def _take(self, node: Node, report: Report) -> None:
        launch, data, view, index = self.launch, report.data, self.view, node.index
        match report.kind:
            case "before_run" if self._may_call(node, report.launch):
                self._see_call(report.launch, None)
                self._calls.pop(index, None)  # of a launch that it has given up
                self._called[index] = report.launch
                self._see(report.kind, "before_run begins", node, "preparing", launch=report.launch, generation=None)
            case "command":
                about: dict[str, Any] = {"launch": report.launch, "generation": None, "seconds": data.get("seconds")}
                self._see("command", str(data.get("text")), node, exit_code=data.get("exit_code"), **about)
            case "started":
                self._see("started", "all workers run", node)
                if self.phase is Phase.RUNNING:
                    view.enter("running", [index])
                    launch.starting.discard(index)
                    if not launch.starting and view.outcome == "starting":
                        view.turn("running")
                        view.goodput.all_run(view.now_s)
            case "wrote":
                self._see("output", "first output", node)
                view.nodes[index].has_written, launch.is_silent = True, False
            case "progress":
                if first := self.progress.take(index, report.launch, data, self._now):
                    launch.is_silent = False
                    self._see("progress", f"first report read: {first}", node, rank=0)
                view.progress = self.progress.record
                if data.get("step") is not None:  # rank 0's; of some steps in one report the first tells where it began
                    began = min((points[0][0] for points in data["points"].values() if points), default=data["step"])
                    for step in sorted({began, data["step"]}):
                        view.goodput.step(step, view.now_s)
            case "hangs":
                launch.active_at, launch.has_begun = max(launch.active_at, self._now - data["age_s"]), True
            case "answer" if (question := self._questions.get(data["id"])) is not None:
                found = data["found"]
                if question.what == "stacks" and not isinstance(found, str):
                    found = from_plain(NodeStacks, found, "stacks")
                question.keep(index, found)
            case "usage":
                view.take_usage(index, data)
            case "outputs":
                view.take_outputs(report.launch, index, data)
                self._see("stored", f"stored {counted(data['files'], 'file')}, {size_text(data['size'])}", node)
            case "functions":
                launch.values.update(data)
            case "unreached":
                self._fail_with("unreachable", *failures.unreached(self.nodes[CONTROL].host, **data), node)

    def _ask(self, asked: str, what: What, of: dict[str, Any]) -> None:
        launch, nodes = self.launch, self.launch.running
        if what == "profile":
            at = of["rank"] // (launch.control.nproc or 1)
            nodes = nodes.intersection(launch.group.nodes[at : at + 1])
        if what != "stacks" and self.phase is not Phase.RUNNING:
            nodes = set()
        about = launch.number, launch.generation
        self._questions[asked] = Question(what, about, nodes, self._now + LIMITS[what])
        self._send(Ask(*about, asked, what, of), *sorted(nodes))

    def _answer_questions(self) -> None:
        """Answer those that are over."""
        about = self.launch.number, self.launch.generation
        for asked, question in list(self._questions.items()):
            if question.is_over(self._now, self.launch.running if question.about == about else frozenset()):
                del self._questions[asked]
                answer = self._answer(asked, question)
                if asked == HANG:
                    self._end_hang(answer)
                elif asked != PREEMPTED:
                    self.answers[asked] = answer

    def _answer(self, asked: str, question: Question) -> Any:
        match question.what:
            case "stop":
                return self._stop_at(asked, question)
            case "profile":
                return question.profile()
        return gathered(question, self.num_nodes, self.ready.difference(self.launch.group.nodes))

    def _stop_at(self, asked: str, question: Question) -> dict[str, Any]:
        """Tell the ranks that wait in a call of `stopping` at which one they all stop; return it, or why there is none."""
        call, why = question.agreed_call(needs_all=asked != PREEMPTED)
        self._send(StopAt(*question.about, call), *sorted(question.nodes))
        if call:
            text = f"all ranks stop at call {call} of stopping()"
            self._see("stop_at", text)
            self._send(Note(text), CONTROL)
        return {"call": call, "why": why}

    def _look_at_workers(self) -> None:
        """Look at what the ranks do, once a second."""
        for line in self.progress.tick(self._now):
            self._send(Note(line), CONTROL)
        launch = self.launch
        if launch.is_silent and self.rules.stacks and self._now - launch.went_at > FIRST_OUTPUT_S:
            launch.is_silent = False
            where = f"`{self.rules.stacks}` shows where each rank is"
            self._send(Note(f"no output for {FIRST_OUTPUT_S:g} s; {where}"), CONTROL)
        if self._hang() is None:
            self._questions.pop(HANG, None)
        elif HANG not in self._questions:
            self._ask(HANG, "stacks", {})

    def _hang(self) -> tuple[str, str] | None:
        launch = self.launch
        return hang(self._now - launch.active_at, launch.policy.hang_timeout_s, launch.has_begun)

    def _end_hang(self, found: GangStacks) -> None:
        """Stop a launch that hangs, unless a rank has gone on meanwhile."""
        if self.phase is Phase.RUNNING and (why := self._hang()) is not None:
            well = [node for node, ended in self.launch.ended.items() if ended.ok]
            detail, self.view.hangs = conclude(found, well)
            self._fail_with(HANG, *why, detail=detail)

    def _on_failed_early(self, node: Node, report: Failed) -> None:
        """Handle a failure in a call of `run` before this node takes part in its launch."""
        cause = report.failures[0].cause if report.failures else None
        if cause is None or self._called.get(node.index) != report.launch:
            return
        is_command = node.index not in self._calls and not report.given_up
        is_late = self.phase is not Phase.IDLE and report.launch == self.launch.number
        if is_late or (is_command and node.index != CONTROL and len(self._here) > self._least):
            self._tell_to_end(node, cause)
        elif is_command or cause.node != node.index or not self._goes_on_without(node, cause):
            more = self._why_not_without(cause)
            self._end_early(report.launch, failures.outside(cause, report.launch, False, more))

    def _on_failed(self, node: Node, report: Failed) -> None:
        launch, call = self.launch, self._calls.get(node.index)
        is_in = self.phase is not Phase.IDLE and report.launch <= launch.number
        if not is_in or not (node.index in launch.running or (call is not None and call.launch >= launch.number)):
            self._on_failed_early(node, report)
            return
        if not self._is_current(report):
            return
        if report.given_up and node.index not in launch.given_up:  # it says so once
            told = [each.cause for each in report.failures if each.cause.category == "preempted"]
            if told and told[0].node == node.index and self._goes_on_without(node, told[0]):
                return
        self.launch.add_failures(report.failures, self._now)
        if report.given_up:
            launch.given_up.add(node.index)
            launch.stores.discard(node.index)
        launch.fails = True

    def _on_ended(self, node: Node, ended: Ended) -> None:
        launch, view = self.launch, self.view
        if not self._is_current(ended) or node.index not in launch.running:
            return
        self.launch.add_failures(ended.failures, self._now)
        for rank, code in ended.exit_codes.items():
            self._see("exited", describe_exit(code).partition(":")[0], node, rank=rank, exit_code=code)
        view.nodes[node.index].exit_codes = dict(ended.exit_codes)
        if node.presence is Presence.HERE:
            view.enter("stopped", [node.index])
        if line := self.progress.ended(node.index, ended.ok):
            self._send(Note(line), CONTROL)  # before the verdict, with which the log of the launch ends
        launch.ended[node.index] = replace(ended, failures=())
        launch.running.discard(node.index)
        launch.fails |= not ended.ok

    def _on_stored(self, node: Node, stored: Stored) -> None:
        if self._is_current(stored) and node.index in self.launch.stores:
            self.launch.stores.discard(node.index)
            self.launch.add_failures(stored.failures, self._now)

    # --- a generation's end -----------------------------------------------------------------------

    def _stop(self) -> None:
        """Stop all nodes, because one of them fails."""
        launch = self.launch
        if self.phase is Phase.PAUSING:  # nothing runs, and nothing can start any more
            self._store(self._error_of_launch())
            return
        cause = launch.cause
        for question in self._questions.values():  # a command has nothing to stop any more
            if question.what == "stop":
                question.end()
        # A preempted node has time for its workers to save.
        saves = cause is not None and cause.category == "preempted"
        if saves:
            self._ask(PREEMPTED, "stop", {"needs_all": False})
        self.phase, launch.until = Phase.STOPPING, self._now + self.rules.stop_s
        self.view.goodput.enter("end", self.view.now_s)
        self._see("stopping", "all nodes are told to stop")
        self.view.turn("stopping", "" if cause is None else failures.summary(cause))
        self.view.enter("stopping", launch.running & self._here)
        about = (launch.number, launch.generation, failures.reason(cause), failures.teller(cause))
        self._broadcast(Stop(*about, launch.policy.preemption_signal if saves else None))

    def _decide(self) -> None:
        """All nodes have ended, or their time is up: success, restart or failure."""
        launch, cause = self.launch, self.launch.cause
        silent = sorted(launch.running)
        if not launch.fails and not silent:
            self._store(None)
        elif cause is not None and self._may_restart(cause) and self._go_on_without_silent(silent):
            self._restart(cause)
        else:
            self._store(self._error_of_launch(silent))

    def _may_restart(self, cause: Cause) -> bool:
        launch, policy = self.launch, self.launch.policy
        # A node whose own code has left `run` would not obey another *go*. Of one that was told to end, that is no failure.
        has_given_up = bool(launch.given_up - launch.leaving.keys())
        over = self._now >= self.rules.deadline
        may = (launch.has_restarts_left(cause) and cause.category in policy.restart_on) or launch.has_lost_its_port()
        return may and not has_given_up and not over and not launch.repeat(self._now)

    def _go_on_without_silent(self, silent: list[int]) -> bool:
        """Count nodes as lost whose workers may still run; return whether the gang can go on without them."""
        # That a node which was told to end does not report the end of its workers keeps no other node from going on.
        unknown = [node for node in silent if node not in self.launch.leaving]
        if not self._are_enough(self._gone | set(unknown)):
            return False
        for each in unknown:
            node, text = self.nodes[each], "it did not report in time that its workers had ended"
            self._see("lost", f"lost: {text}", node)
            self._tell_to_end(node, node.lost(text))
        self.launch.running.clear()
        return True

    def _restart(self, cause: Cause) -> None:
        """All workers are gone; they start again at once, or when another task has come for a lost one."""
        launch = self.launch
        self.view.report(cause.describe(), None, cause.as_dict(), self._see_cause(cause))
        is_move = launch.has_lost_its_port()
        is_counted = not is_move and cause.category != "preempted"
        launch.moves += is_move
        launch.uncounted += not is_counted
        self.phase, launch.restarts_for = Phase.PAUSING, None if is_move else cause
        launch.forget_failures()
        for each, why in sorted(launch.leaving.items()):  # they are about to go
            self._tell_to_end(self.nodes[each], why)
        for node in [self.nodes[each] for each in sorted(self._gone)]:
            self._leave_out(node, node.lost("it has left"))
        what = "failed: another program took the port of the rendezvous" if is_move else headline(cause.what)
        launch.again = f"all workers start again, because {FailureText(cause).who} {what}"
        if is_counted:
            count = launch.generation + 1 - launch.uncounted
            launch.again = f"restart {count} of {launch.policy.max_restarts}: {launch.again}"
        self.view.turn("restarting", failures.summary(cause))
        self.view.goodput.restart()
        self.view.enter("restarting", [each for each in self._able() if launch.takes_part(each)])
        self._remind()

    def _tell_to_end(self, node: Node, cause: Cause) -> None:
        """Leave a node out that is here, with a verdict of its own."""
        number = self._called.get(node.index, self.launch.number)
        self._send_verdict(node, Verdict(number, failures.told_to_end(cause)))
        self._leave_out(node, cause)

    def _start_again(self) -> None:
        """Begin the next generation, unless nodes may come for it."""
        able = self._able()
        self.view.waits_for = self._waits_for()
        if self.view.waits_for:
            return  # until they come, or `tick` gives up on them
        group = follow(self.launch.group, able, self._size, self._least) if CONTROL in able else None
        if group is None:
            self._store(self._error_of_launch())
        else:
            self._go(group)

    # --- a launch's end ---------------------------------------------------------------------------

    def _error_of_launch(self, silent: Collection[int] = ()) -> TorchrunError:
        """Return what every node raises after a failed launch; `silent` nodes did not report their end."""
        launch, more = self.launch, ""
        if silent:
            more = f"\n{names(silent).capitalize()} did not report in time that the workers there had ended."
        cause = launch.cause or (launch.restarts_for if self.phase is Phase.PAUSING else None)
        return failures.of_launch(launch, cause, more + self._why_not_without(cause))

    def _store(self, error: TorchrunError | None) -> None:
        """Have the nodes store what there is; then the launch ends with `error`, or well."""
        launch, now, rules = self.launch, self._now, self.rules
        # After the step's @timeout the workers may use the grace to end, and storing what they left as long again.
        within_s = None if error is None else min(SAVE_S, max(rules.deadline - now, rules.grace_s))
        able = {node for node, ended in launch.ended.items() if ended.stores}
        nodes = (able & self._here) - launch.given_up
        known = cause_of(error)
        if not nodes or (known is not None and known.kind == "store"):  # or the datastore itself has failed
            self._finish(error)
            return
        if error is not None:
            self._see_error(error)
        self.phase, self._remind_at = Phase.STORING, now + REMIND_S
        self.view.goodput.enter("end", self.view.now_s)
        launch.stores, launch.failing_with = nodes, error
        launch.until = float("inf") if within_s is None else now + within_s + INDEX_S
        self._broadcast(Store(launch.number, launch.generation, error, within_s, launch.group))

    def _finish(self, error: TorchrunError | None) -> None:
        """End the launch with its verdict; None: all has gone well."""
        launch, view = self.launch, self.view
        if error is not None and launch.failing_with is None:  # else that was seen before
            self._see_error(error)
        self.phase, launch.verdict, self._remind_at = Phase.IDLE, error, float("inf")
        launch.running.clear()
        launch.stores.clear()
        self._see(*(("done", "the launch has ended well") if error is None else ("failed", "the launch has failed")))
        why = "stopped by a command" * launch.is_stopped if error is None else view.why
        view.turn("done" if error is None else "failed", why)
        view.place((), LATE_S)
        view.goodput.enter("own_code", view.now_s)
        if error is None:
            view.error, view.cause = None, None
            for each in sorted(self._absent):  # who comes in the place of one would lack what this launch has left
                if not launch.takes_part(each) and self.nodes[each].cause is not None:
                    self._give_up_on(self.nodes[each])
        self._tell_verdict(launch, error)
        if error is not None and any(self.nodes[node].cause for node in self._gone):
            self._break(error)  # without all its nodes the gang can't launch again

    def _tell_verdict(self, launch: Launch, error: TorchrunError | None) -> None:
        """Send all nodes their verdict; members get one object. Keep it for those that call the launch later."""
        number, group = launch.number, launch.group if launch.generation >= 0 else None
        alone = error is None and bool(launch.ended) and all(ended.alone for ended in launch.ended.values())
        events, last = self.view.events, self.view.launch
        ends = [at for at, each in enumerate(events, 1) if each.kind in ("done", "failed") and each.launch != last]
        seen = tuple(events[max(ends, default=0) :])  # since the end of the launch before
        how, told = (alone, group, launch.is_stopped), self.view.goodput.until(self.view.now_s)
        of_control = Verdict(number, error, seen, self._left(launch, error, True), *how, told)
        of_others = Verdict(number, error, (), self._left(launch, error, False), *how)
        for each in sorted(node for node, its in self._called.items() if its == number):
            launch.told.add(each)
            self._send_verdict(self.nodes[each], of_control if each == CONTROL else of_others)
        left = {name: each for name, each in of_control.left.items() if self.rules.replaces and name != "progress"}
        self._verdicts[number] = replace(of_others, left=left)  # progress is long

    def _send_verdict(self, node: Node, verdict: Verdict) -> None:
        """Send a node a verdict. If the launch has ended well without it, it leaves, and nobody waits for it."""
        self._end_call(node)
        self._send(verdict, node.index)
        if node.presence is Presence.HERE:
            self.view.enter("step code", [node.index])
        if verdict.is_without(node.index) and node.presence is Presence.HERE:
            self._enter(node, Presence.OUT)
            self._see("dismissed", "is not needed any more", node)
            text = f"node {node.index} leaves: launch {verdict.launch} has ended well without it"
            self._send(Note(text), CONTROL)

    def _left(self, launch: Launch, error: TorchrunError | None, is_control: bool) -> dict[str, Any]:
        """Return what the control node, or each other node, is told of what the launch has left."""
        cause = cause_of(error)
        outputs = {
            str(node): [each["key"], each["files"], each["size"]]
            for node, each in sorted(self.view.outputs.get(launch.number, {}).items())
            if is_control or node == CONTROL
        }
        values = launch.values
        if error is not None or not is_control:  # of a failure that of the failed rank, which all raise
            values = {rank: key for rank, key in values.items() if cause is not None and rank == str(cause.rank)}
        found = {
            "outputs": {"nodes": outputs} if outputs else {},
            "functions": dict(values),
            "progress": self.progress.verdict(launch.number, is_control),
        }
        return {name: told for name, told in found.items() if told}

    def _error_outside(self, cause: Cause) -> TorchrunError:
        """Return the error for a failure outside of launches: the last launch's own, if it was that failure."""
        number, last = self._number if self.phase is Phase.IDLE else None, self.launch.verdict
        known = cause_of(last)
        # Ctrl-C interrupts all nodes of a local run, one after the other.
        is_known = known is not None and (cause.is_same_event(known) or cause.kind == known.kind == "interrupted")
        if number is None and last is not None and is_known:
            return last
        return failures.outside(cause, number, cause.node in self._done, self._why_not_without(cause))

    def _break(self, error: TorchrunError) -> None:
        """Break the gang: no launch can begin any more. Send *abort* to every node.

        A launch that still gathers ends with the same error: else the first node that leaves with it would seem to have
        called `run` less often than the others.
        """
        if self.broken is not None:
            return
        number, self.broken = self._number, error
        if number is not None and self.phase is Phase.IDLE:
            self._end_early(number, error)
        self._see("broken", "nothing can be launched any more")
        if error is not self.launch.verdict:  # else that was seen before
            self._see_error(error)
        self.view.turn("failed", self.view.why)
        told = self._here - self._done | self._here & {CONTROL}  # when done, that one waits for the others
        self._send(Abort(error), *sorted(told))

    # --- time limits ------------------------------------------------------------------------------

    def _look_at_limits(self) -> None:
        """Stop a launch that exceeds its ``timeout_s``, and all that exceeds the step's ``@timeout``."""
        launch, number, limit_s = self.launch, self._number, self.launch.policy.timeout_s
        if self._now <= self.rules.deadline:
            if self.phase is Phase.RUNNING and limit_s is not None and self._now - launch.went_at > limit_s:
                self._fail_with("timeout", f"longer than {limit_s:g} s")
            return
        if self.phase is Phase.STOPPING or CONTROL not in self._here:
            return  # it ends soon, or is about to join
        text, waits_for = self.rules.longer, self._waits_for()
        text += f", while launch {number} waited for {waits_for}" if waits_for and number is not None else ""
        if self.phase is not Phase.IDLE:
            if launch.failing_with is None:
                self._fail_with("timeout", text)
        elif (late := self._here - self._done) and not (number is None and self._is_time_up):
            self._see("timeout", f"timeout: {text}")
            node = min(late)
            error = self._error_outside(Cause("step_timeout", node, self.nodes[node].host, exception=text))
            self._break(error) if number is None else self._end_early(number, error)
        self._is_time_up = True  # outside of launches once only, as an alarm

    def _remind(self) -> None:
        """Log what is waited for."""
        self._remind_at = self._now + REMIND_S
        if not (waits_for := self._waits_for()):
            return
        if self.phase is Phase.PAUSING:
            then = "goes on with fewer nodes" if len(self._able()) >= self._least else "fails"
            waits_for += f" (all_nodes_started_timeout), and then {then}"
        missing = min(self._absent, default=None)
        why = "" if missing is None else failures.to_see_why(missing, self.rules.why_it_waits(missing))
        text = f"launch {self._number} waits for {waits_for}{why and '.' + why}"
        self._send(Note(text), CONTROL)  # even if it is late itself: the terminal shows its log

    def _waits_for(self) -> str:
        """Return in words for which nodes the others wait, or all."""
        if self.phase is Phase.PAUSING:
            coming = self._coming(self._able())
            last = (
                self.view.began - self._began_at + max((self.nodes[each].awaited_until for each in coming), default=0.0)
            )
            what = "to start" if self._absent.issuperset(coming) else "to start or to call run"
            waits: dict[str, Iterable[int]] = {f"{what}, until {moment(last)} at most": coming}
        elif self.phase is not Phase.IDLE:
            waits = {"to store what its workers have left": self.launch.stores}
        else:
            waits = {
                "to start": filter(self._may_come, self._absent),
                "to call current.torch.run": self._here - self._called.keys(),
                "to end before_run": self._called.keys() - self._calls.keys(),
            }
        found = {what: sorted(nodes) for what, nodes in waits.items()}
        return " and for ".join(f"{names(nodes)} {what}" for what, nodes in found.items() if nodes)

    def _fail_with(self, kind: str, text: str, advice: str = "", node: Node | None = None, detail: str = "") -> None:
        """Stop the launch for a reason that no node has reported as its failure, such as a time limit."""
        self._see(kind, f"{kind}: {text}", node)
        of = node or self.nodes[CONTROL]
        cause = Cause(kind, of.index, of.host, exception=text, advice=advice, detail=detail)
        self.launch.add_failures([Failure(cause)], self._now)

    # --- what is seen -----------------------------------------------------------------------------

    def _see(self, kind: str, text: str, node: Node | None = None, state: State | None = None, **more: Any) -> None:
        """Add an event to the view, of a node with the state that it is in from now on."""
        self.changes += 1
        self.view.add(kind, text, None if node is None else node.index, **more)
        if node is not None and state is not None:
            self.view.enter(state, [node.index])

    def _see_cause(self, cause: Cause, before: str = "") -> float:
        """Add the cause to what has happened; return when it did."""
        self.view.why = headline(before.replace("\n", " ") + failures.summary(cause))
        at_s = self.view.now_s
        if (first := self.launch.first) is not None and cause.is_same_event(first.cause):
            at_s = -first.age_s - self._began_at  # it became known later
        if first is None and cause == self.launch.restarts_for:
            return at_s  # it was seen before
        self._see("cause", f"cause: {self.view.why}", rank=cause.rank, exit_code=cause.exit_code, at_s=at_s)
        return at_s

    def _see_error(self, error: TorchrunError) -> None:
        failure, at_s = failure_of(error), self.view.now_s
        if failure is not None:
            # What stands before a lost connection tells who had ended before.
            at_s = self._see_cause(failure.cause, failure.before if failure.cause.is_consequence else "")
        else:
            self.view.why = headline(error.message)
        self.view.error, self.view.cause = error.message[:_ERROR_CHARS], error.cause
        self.view.report(error.message, type(error).__name__, error.cause, at_s)

    # --- sending ----------------------------------------------------------------------------------

    def _broadcast(self, message: Message) -> None:
        self._send(message, *sorted(self._here - self._done))

    def _send(self, message: Message, *nodes: int) -> None:
        self._out += [(node, message) for node in nodes]


_HANDLERS: dict[type, Callable[[Gang, Node, Any], None]] = {
    Join: Gang._on_join,
    Leave: Gang._on_leave,
    Ready: Gang._on_ready,
    Report: Gang._on_report,
    Failed: Gang._on_failed,
    Ended: Gang._on_ended,
    Stored: Gang._on_stored,
}
