"""The gang's state machine on the control node: joining, the begin and end of launches, leaving.

`Gang` is pure: messages and the clock go in, messages come out. It starts no thread, opens no
socket and never sleeps, so a test can try every order of messages. One object decides, so every node gets the
same decision.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..errors import TorchrunError
from . import obstacles
from .agreement import contradiction
from .cause import Cause, Failure, cause_of
from .course import Course, Outgoing
from .history import History, of_the_gang
from .keepers import Keepers, Plain
from .launch import GONE, Launch, Phase, events_for, told_to_end, within
from .nodes import WITHOUT, Nodes, NodeState
from .policy import LaunchPolicy, Rules
from .protocol import (
    CONTROL,
    Abort,
    Ack,
    Alone,
    Bye,
    Command,
    Done,
    Failed,
    Join,
    Leave,
    Message,
    Note,
    Prepares,
    Ready,
    Refused,
    Replaced,
    TaskEnded,
    Verdict,
    Welcome,
)
from .texts import QUIET_S, REMIND_S, headline, names


class Gang:
    """The gang's state machine. Only the control node's supervisor has one."""

    def __init__(
        self,
        num_nodes: int,
        pick_port: Callable[[int | None], int | None],  # returns the pinned port (None if taken), or else a free one
        rules: Rules | None = None,
        keepers: Keepers | None = None,  # of the features
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_nodes = num_nodes
        self._rules = rules or Rules()
        self.nodes = Nodes(num_nodes, takes_late=self._rules.replaces)
        self.broken: TorchrunError | None = None  # why no launch can begin any more
        self.keepers = keepers or Keepers()
        self._course = Course(self.nodes, self._rules, self.keepers, pick_port, clock, self._launch_is_over)
        self._is_time_up = False  # whether the end of the step's @timeout was handled
        self._clock = clock
        self._mark = 0  # how many records there were when the last launch ended
        # Launch number -> verdict, of launches that have ended since workers last began: a node may still call them.
        # With `Rules.replaces`, of the last launches: a task that has come in the place of another calls all anew.
        self._verdicts: dict[int, Verdict] = {}
        # What nodes say of the next launch while one still runs: it is handled when that one is over.
        self._early: list[tuple[int, Prepares | Command | Ready | Failed]] = []
        self._failed: dict[int, TorchrunError | Cause | None] = {}  # of nodes that have left so: with what

    @property
    def history(self) -> History:
        """The records of the gang."""
        return self._course.history

    @property
    def _launch(self) -> Launch:
        return self._course.launch

    @property
    def nproc(self) -> int | None:
        """Processes on each node in the last launch; None before the first."""
        return self._launch.nproc

    @property
    def restarts_left(self) -> int | None:
        """How often the last launch may still be restarted; None if that is not decided here: see `Launch`."""
        return self._launch.restarts_left

    @property
    def facts(self) -> dict[str, str]:
        """The control node's software, as reported in the last launch; empty before the first."""
        ready = self._launch.ready.get(CONTROL)
        return {} if ready is None else ready.facts

    @property
    def due_at(self) -> float:
        """The time at which `tick` must be called, since the workers start again then."""
        return self._course.due_at

    @property
    def error(self) -> TorchrunError | None:
        """The error that broke the gang, or with which the last launch ended."""
        return self.broken or self._launch.verdict

    @property
    def without(self) -> set[int]:
        """The nodes that are lost, or were told to end, and without which the gang goes on: those tasks shall end."""
        return self._course.gone.keys() & self.nodes.which(*WITHOUT)

    # --- what can happen ------------------------------------------------------------------------

    def handle(self, node: int, message: Message) -> list[Outgoing]:
        """Handle a node's message and return the messages to send; any other message is ignored."""
        handler = _HANDLERS.get(type(message))
        if self.nodes[node] is None:
            pass
        elif self.nodes[node] in WITHOUT and not isinstance(message, Leave | Join):
            self._refuse_out(node, message)
        elif handler is not None:
            handler(self, node, message)
        elif isinstance(message, Command | Failed) and self._is_early(node, message):
            self._early.append((node, message))
        elif isinstance(message, Failed) and self._leaves_early(node, message):
            pass
        else:
            self._course.handle(node, message)
        return self._flush()

    def _flush(self) -> list[Outgoing]:
        """Return what is to be sent, after the answers to those that are gone and have called the next launch."""
        for node, message in [each for each in self._early if self.nodes[each[0]] in WITHOUT]:
            self._early.remove((node, message))
            self._refuse_out(node, message)
        return self._course.flush()

    def _refuse_out(self, node: int, message: Message) -> None:
        """Answer the call of `run` of a node without which the gang goes on; what else it says is not heeded."""
        cause = self._course.gone.get(node)
        if not isinstance(message, Ready | Prepares):
            return
        if cause is not None:
            self._course.send(Verdict(message.launch, told_to_end(cause, self.nodes[node] is NodeState.AWAITED)), node)
        elif message.launch in self._verdicts:  # it was dismissed before it called `run`
            self._send_late_verdict(self._verdicts[message.launch], node)
        else:
            self._course.send(Verdict(message.launch, obstacles.too_far_behind(message.launch)), node)

    def _is_early(self, node: int, message: Command | Failed) -> bool:
        return (node, message.launch) in ((of, each.launch) for of, each in self._early)

    def _leaves_early(self, node: int, failed: Failed) -> bool:
        """Return whether a node that was told to end has no workers, and the others go on without it."""
        cause = next((each.cause for each in failed.failures if each.cause.category == "preempted"), None)
        is_own = cause is not None and cause.node == node and failed.launch == self._launch.number
        return failed.given_up and is_own and cause is not None and self._goes_on_without(node, cause)

    def request(self, feature: str, data: Plain) -> list[Outgoing]:
        """Hand a feature what a command asks of the gang; `Keepers.pop_answer` has the answer later."""
        self.keepers.request(feature, data, self._course.age_s)
        return self._flush()

    def lost(self, node: int, why: str, is_connected: bool = False) -> list[Outgoing]:
        """Handle the end of a node's task.

        `is_connected`: its supervisor still has its connection, and so may still have to end the workers.
        """
        self._lose(node, why, is_ending=is_connected)
        return self._flush()

    def disconnected(self, node: int, why: str) -> list[Outgoing]:
        """Handle the end of a node's connection, which its supervisor keeps until the workers have ended."""
        self._launch.ending.discard(node)
        self._lose(node, why)
        self._course.decide_if_all_ended()
        return self._flush()

    def _lose(self, node: int, why: str, is_ending: bool = False) -> None:
        state = self.nodes[node]
        if state in (NodeState.ABSENT, NodeState.JOINED, NodeState.DONE):
            self.nodes.enter(node, NodeState.LOST)
            if is_ending and self._launch.takes_part(node) and node not in self._launch.ended:
                self._launch.ending.add(node)  # else a rank of it could still run beside that of a spare
            self.keepers.gone(node)
            self.history.note("lost", node=node, text=why)
            if state is NodeState.DONE:
                why = f"{why}, after its step's code but before its results were stored; see its log"
            self._course.gone[node] = cause = Cause("lost", node, self.nodes.host(node), exception=why)
            self._node_is_gone(node, cause)
            self._see_who_is_left()

    def _on_task_ended(self, node: int, ended: TaskEnded) -> None:
        self._lose(node, ended.how, is_ending=node != CONTROL)  # which has no connection, and whose loss ends all

    def give_up(self, error: TorchrunError) -> list[Outgoing]:
        """Break the gang for a reason that is no node's fault."""
        self._break(error)
        return self._flush()

    def tick(self) -> list[Outgoing]:
        """Check all time limits; call it once a second, and at `due_at`."""
        now = self._clock()
        if self.nodes.count(NodeState.ABSENT) and self._course.age_s > self._rules.started_timeout_s:
            self._give_up_absent()
        for node in self.nodes.which(NodeState.AWAITED) if self._rules.replaces else ():
            if self._course.is_overdue(node):
                self._give_up_awaited(node)
        if now >= self._launch.remind_at:
            self._remind(now)
        if now > self._rules.deadline:
            self._time_is_up()
        self._course.tick(now)
        return self._flush()

    def _give_up_absent(self) -> None:
        """Go on without the nodes that have not come in time, or break the gang."""
        waited_s, absent = self._rules.started_timeout_s, self.nodes.absent
        if self._course.next_group(*absent) is None:
            command = self._rules.why_it_waits(absent[0])
            self._break(obstacles.missing(absent, self.num_nodes, waited_s, command))
        else:
            for node in absent:
                self._course.expect_no_other(node)  # it may still come itself
                text = f"it has not joined within {waited_s:g} s"
                self._node_is_gone(node, Cause("lost", node, self.nodes.host(node), exception=text))

    def _give_up_awaited(self, node: int) -> None:
        """Go on without a node whose replacement has not come, or break the gang."""
        self._course.give_up_on(node)
        if self._course.next_group() is None and self._launch.phase in (Phase.GATHERING, Phase.OVER):
            self._break_for(node, self._course.gone[node])
        else:
            self._begin_if_all_called()
        self._see_who_is_left()

    def was_stopped(self, seconds: float) -> list[Outgoing]:
        """Give the nodes as much longer to report as this process was stopped, perhaps with all of them."""
        if self._launch.phase in (Phase.STOPPING, Phase.SAVING):
            self._launch.until += seconds
        return []

    def _remind(self, now: float) -> None:
        launch = self._launch
        launch.remind_at = now + REMIND_S
        if launch.phase is Phase.GATHERING and not launch.ready and not launch.failures:
            return  # all nodes that have called `run` run their commands: nobody waits
        if launch.phase in (Phase.GATHERING, Phase.PAUSING) and self._waits_for():
            absent = self.nodes.absent
            why = obstacles.to_see_why(absent[0], self._rules.why_it_waits(absent[0])) if absent else ""
            text = f"launch {launch.number} waits for {self._waits_for()}{why and '.' + why}"
            self._course.send(Note(text), CONTROL)  # even if it is late itself: the terminal shows its log
            self._course.send(Note(text, is_detail=True), *(node for node in launch.ready if node != CONTROL))
        elif text := launch.who_stores(now, besides=CONTROL):  # the control node logs its own
            self._course.send(Note(text), CONTROL)

    def _waits_for(self) -> str:
        """Return in words which nodes are not ready, while others are."""
        launch, absent = self._launch, self.nodes.which(NodeState.ABSENT, NodeState.AWAITED)
        late = [node for node in self.nodes.joined if launch.call_of(node) is None]
        waits = [f"{names(absent)} to start"] if absent else []
        waits += [f"{names(late)} to call current.torch.run"] if late else []
        prepare = sorted(node for node in launch.preparing if launch.cause_of(node) is None)
        waits += [f"{names(prepare)} to end before_run"] if prepare else []
        return " and for ".join(waits)

    def _time_is_up(self) -> None:
        """End waits that exceed the step's ``@timeout``; `Launch.overrun` ends workers and storing."""
        launch = self._launch
        if launch.phase in (Phase.STOPPING, Phase.SAVING):  # ends soon anyway
            return
        if self.nodes[CONTROL] is NodeState.ABSENT:  # it is about to join, and will hear then
            return
        if launch.phase is Phase.GATHERING:
            text = f"{self._rules.longer}, while launch {launch.number} waited for {self._waits_for()}"
            self._course.finish(obstacles.too_early(self._timed_out(text), launch.number))
        elif launch.phase is Phase.PAUSING:
            self._course.fail(launch.error(self._timed_out(self._rules.longer), []))
        elif launch.phase is Phase.OVER and not self._is_time_up and self.nodes[CONTROL] is NodeState.JOINED:
            self._break(self._error_outside(self._timed_out(self._rules.longer)))
        self._is_time_up = True  # once only, as an alarm; a later launch ends at once

    def _timed_out(self, text: str) -> Cause:
        self.history.note("timeout", launch=self._launch.number if self._launch.ready else None, text=text)
        return Cause("step_timeout", CONTROL, self.nodes.host(CONTROL), exception=text)

    # --- joining --------------------------------------------------------------------------------

    def _on_join(self, node: int, join: Join) -> None:
        if node == join.node and self.nodes.may_join(join):
            if self.nodes[node] is not NodeState.JOINED:
                self.history.note("joined", node=node, text=join.host)
            self.nodes.join(join)
            self._course.gone.pop(node, None)
            self._failed.pop(node, None)  # how the task before it has ended counts no more
            self._course.send(Welcome(), node)
            if self.broken is not None:
                self._course.send(Abort(self.broken), node)

    def turn_away(self, join: Join) -> tuple[Refused, list[Outgoing]]:
        """Return the answer to a task that can't be its node, and the messages for the nodes.

        Kubernetes starts a second task at once where a pod is deleted or drained, while the first still has its grace.
        The first is told, so that all can save. The second joins when the first has ended, if the gang can use it. Else
        it waits for the end of all, because its own would have all pods killed.
        """
        node, host = join.node, self.nodes.host(join.node)
        state = self.nodes[node]
        if state is NodeState.OUT and not self._rules.replaces and not self.nodes.has_joined(node):
            return Refused(obstacles.too_late(join)), []
        if state is None or (state in (NodeState.JOINED, NodeState.DONE) and self.nodes.is_same_place(join)):
            return Refused(obstacles.turned_away(join, self.num_nodes, None if state is None else host)), []
        self.nodes.see(join)
        if self.nodes.is_older(join):
            return Refused(obstacles.replaced(join, host)), []
        is_ending = self.broken is not None or self._launch.phase in (Phase.STOPPING, Phase.PAUSING, Phase.SAVING)
        is_member = state is NodeState.JOINED
        if is_member and not is_ending and node not in self.nodes.replaced:
            self.nodes.replaced.add(node)
            why = "it is being replaced: another task of this node has started, as when its pod is deleted or drained"
            self._course.send(Replaced(why), node)
            self._course.send(
                Note(f"node {node} (host {host}) is being replaced: another task of this node has come"), CONTROL
            )
        if self.broken is not None and self._rules.replaces:
            return Refused(self.broken), []
        if self._rules.replaces and node != CONTROL:
            return Refused(obstacles.too_soon(join, host), is_early=True), self._flush()
        return Refused(obstacles.no_replacement(join, host, is_member), self._rules.stop_s), self._flush()

    # --- a launch's begin and end ----------------------------------------------------------------

    def _on_call(self, node: int, call: Prepares | Ready) -> None:
        number = call.launch
        if number in self._verdicts:
            self._send_late_verdict(self._verdicts[number], node)  # it was over before this node called it
            if self._verdicts[number].is_without(node):
                self._course.dismiss([node], number)
                self._begin_if_all_called()
            elif self._launch.phase is Phase.OVER and number == self._launch.number:
                self._course.has_caught_up(node)
            return
        if self.broken is not None:
            self._send_late_verdict(Verdict(number, self.broken), node)
            return
        if number <= self._launch.number - obstacles.MOST_VERDICTS:
            self._course.refuse_late(node, number, obstacles.too_far_behind(number))
            self._begin_if_all_called()
            return
        if self._launch.phase is Phase.OVER:
            rules, remind_at = self._rules, self._clock() + QUIET_S
            self._course.launch = Launch(
                number,
                is_alone=self.num_nodes == 1,
                mark=self._mark,
                deadline=rules.deadline,
                longer=rules.longer,
                remind_at=remind_at,
            )
        launch = self._launch
        if launch.phase is not Phase.GATHERING and number == launch.number and self._rules.replaces:
            self._add_late(launch, node, call)
        elif launch.phase is not Phase.GATHERING:
            self._early.append((node, call))
        else:
            self._add_call(launch, node, call)
            self._begin_if_all_called()

    def _add_late(self, launch: Launch, node: int, call: Prepares | Ready) -> None:
        """Take in a node that has come in the place of another, while the launch runs."""
        error = contradiction({CONTROL: launch.ready[CONTROL], node: call}) if isinstance(call, Ready) else None
        self._course.add_late(node, call, error)
        self._course.note("ready" if isinstance(call, Ready) else "before_run", generation=None, node=node)

    def _add_call(self, launch: Launch, node: int, call: Prepares | Ready) -> None:
        if isinstance(call, Ready):
            launch.add_ready(node, call)
            self._course.has_caught_up(node)
        else:
            launch.preparing[node] = call
        self._course.note("ready" if isinstance(call, Ready) else "before_run", generation=None, node=node)

    def _begin_if_all_called(self) -> None:
        """Begin the launch that gathers, or end it for commands that failed, when a node is no longer waited for."""
        launch = self._launch
        if launch.phase is Phase.GATHERING:
            self._start_if_all_ready()
        if launch.phase is Phase.GATHERING:
            self._course.end_if_commands_failed()

    def _start_if_all_ready(self) -> None:
        launch = self._launch
        gone = (NodeState.DONE, NodeState.LEFT, NodeState.LOST)
        if self.nodes.count(*gone):
            self._course.finish(obstacles.step_has_ended(launch.number, self.nodes.which(*gone)))
        elif len(launch.ready) == self.nodes.expected:
            error = contradiction(launch.ready)
            if error is not None:
                self._course.finish(error)
                return
            if not self._rules.replaces:
                self._verdicts.clear()  # all nodes have left the earlier launches
            launch.policy = launch.ready[CONTROL].policy or LaunchPolicy()
            if (group := self._course.next_group()) is not None:
                self._course.go(group)
            else:
                node, cause = next(reversed(self._course.gone.items()))
                self._break_for(node, cause)

    def _launch_is_over(self, error: TorchrunError | None) -> None:
        """Keep the verdict for nodes that call `run` later, and handle what nodes say that wait for the next launch."""
        launch = self._launch
        # Where the nodes' numbers contradict each other, each of these launches has ended.
        calls: list[Prepares | Ready] = [*launch.preparing.values(), *launch.ready.values()]
        numbers = {launch.number, *(call.launch for call in calls)}
        group = launch.group if launch.group.size else None
        told = self.keepers.verdict(launch.number, True, error) if self._rules.replaces else {}
        self._verdicts.update({number: Verdict(number, error, features=told, group=group) for number in numbers})
        for number in list(self._verdicts)[: -obstacles.MOST_VERDICTS]:
            del self._verdicts[number]
        self._mark = self.history.count
        if error is not None and self.nodes.count(NodeState.LOST):
            self._break(error)  # without all its nodes the gang can't launch again
        early, self._early = self._early, []
        for node, message in early:
            if self.nodes[node] is not NodeState.JOINED:
                continue
            if isinstance(message, Prepares | Ready):
                self._on_call(node, message)
            elif not (isinstance(message, Failed) and self._leaves_early(node, message)):
                self._course.handle(node, message)

    def _send_late_verdict(self, verdict: Verdict, node: int) -> None:
        """Send the verdict of a launch to a node that called it too late, or that can't take part in it."""
        records, number = self._course.events(), verdict.launch
        if number < self._launch.number:  # the others are in a later launch
            records = tuple(record for record in self.history.records if record.launch in (number, None))
        self._course.send(replace(verdict, events=events_for(node, records)), node)

    # --- leaving --------------------------------------------------------------------------------

    def _on_done(self, node: int, done: Done) -> None:
        if self.nodes[node] is NodeState.JOINED:
            self.nodes.enter(node, NodeState.DONE)
            self.keepers.gone(node)
            self.history.note("finished", node=node)
            self._go_on_without(node)
            self._see_who_is_left()

    def _on_leave(self, node: int, leave: Leave) -> None:
        before = self.nodes[node]
        if before not in (NodeState.JOINED, NodeState.DONE, *WITHOUT):
            return
        self.history.note("left", node=node, text="its step has failed" if leave.failed else "")
        self._course.send(Ack(), node)
        if before in WITHOUT:
            self._see_who_is_left()
            return
        self.nodes.enter(node, NodeState.LEFT)
        self.keepers.gone(node)
        if leave.cause is not None:
            self._node_is_gone(node, leave.cause, after_step=before is NodeState.DONE)
        elif before is NodeState.JOINED:
            self._go_on_without(node)
        # Where the others go on without it, its failure is none of the run.
        if (leave.failed or leave.cause is not None) and self.nodes[node] is NodeState.LEFT:
            self._failed[node] = leave.cause or self._launch.verdict
        self._see_who_is_left()
        if node == CONTROL:
            self._end_without_control()
            self._course.send(Bye(), *self.nodes.which(NodeState.JOINED, *WITHOUT))

    def _end_without_control(self) -> None:
        """Tell the nodes how it ends, if the control node leaves with an error: it can't tell them later."""
        launch, failed = self._launch, self._failed.get(CONTROL)
        if failed is not None and launch.phase not in (Phase.GATHERING, Phase.OVER):
            self._course.finish(launch.error(launch.first_cause(), []))
        if isinstance(failed, TorchrunError) and any(launch.call_of(node) is None for node in self.nodes.joined):
            self._break(failed)  # these nodes have not heard the verdict

    def _see_who_is_left(self) -> None:
        """Send a control node whose step has ended the failure of a member, or `Alone` when no member is left.

        A member that raises the verdict of a launch, as all do, fails the run. The control node's step may have ended
        well even so: it has caught the verdict, or ended before that launch.
        """
        if self.nodes[CONTROL] is NodeState.DONE:
            failed = [each for node, each in self._failed.items() if each and self.nodes[node] is NodeState.LEFT]
            for each in failed[:1]:
                self._break(each if isinstance(each, TorchrunError) else self._error_outside(each))
            if self.nodes.count(NodeState.JOINED, NodeState.DONE, NodeState.AWAITED) == 1:
                self.nodes.takes_late = False  # a task that comes now finds nothing to do
                self._course.send(Alone(), CONTROL)

    def _go_on_without(self, node: int) -> None:
        """Handle that `node` will report no more: end a launch that can't begin, or check whether all others have ended."""
        if self._launch.phase is Phase.GATHERING:
            self._course.finish(obstacles.step_has_ended(self._launch.number, [node]))
        else:
            self._course.decide_if_all_ended()

    def _node_is_gone(self, node: int, cause: Cause, after_step: bool = False) -> None:
        """Stop everything, since a node failed outside of its workers, unless the others go on without it."""
        if not self._goes_on_without(node, cause):
            self._break_for(node, cause, after_step)

    def _break_for(self, node: int, cause: Cause, after_step: bool = False) -> None:
        launch = self._launch
        if launch.phase is Phase.OVER:
            self._break(self._error_outside(cause, after_step))
        elif launch.phase is Phase.GATHERING:
            self._break(obstacles.too_early(cause, launch.number, self._course.why_not_without(cause)))
        else:
            self._course.add_failures([Failure(cause)])
            self._course.stop()
            self._course.decide_if_all_ended()

    def _error_outside(self, cause: Cause, after_step: bool = False) -> TorchrunError:
        """Return the error for a failure outside of launches: the last launch's own, if it was that failure."""
        last = self._launch.verdict
        known = cause_of(last)
        # Ctrl-C interrupts all nodes of a local run, one after the other.
        is_known = known is not None and (cause.is_same_event(known) or cause.kind == known.kind == "interrupted")
        if last is not None and is_known:
            return last
        return obstacles.outside(cause, after_step, self._course.why_not_without(cause), self.num_nodes == 1)

    def _goes_on_without(self, node: int, cause: Cause) -> bool:
        """Leave a node out that is gone and has no workers now, if there are enough others; return whether that holds."""
        launch = self._launch
        # While the nodes store, one that has nothing to store has no part in that any more.
        is_storing = launch.phase is Phase.STORING and node not in launch.stores
        is_waiting = is_storing or launch.phase in (Phase.GATHERING, Phase.PAUSING, Phase.OVER)
        # A task that has come in the place of another, and fails before it is ready, is no loss for the others.
        is_newcomer = node in self._course.waits
        if self.broken is not None or node == CONTROL or not (cause.category in GONE or is_newcomer):
            return False
        if launch.phase is Phase.PAUSING and cause.category in GONE - launch.policy.restart_on:
            return False
        if self._course.next_group(node) is None and not self._course.may_be_replaced(node):
            return False
        if launch.takes_part(node) and not is_waiting:
            return False
        self._course.leave_out(node, cause)
        if self.nodes[node] is NodeState.AWAITED:
            then = "another task takes its place"
        else:
            then = "the others go on without it" if is_waiting else "it has no workers"
        text = f"{within(cause)}; {then}"
        if launch.phase is not Phase.SAVING:  # else they do not go on
            self._course.send(Note(text), CONTROL)
        self._begin_if_all_called()
        self._see_who_is_left()
        return True

    def _break(self, error: TorchrunError) -> None:
        """Break the gang: no launch can begin any more. Send *abort* to every node.

        A launch that still gathers ends with the same error: else the first node that leaves with it would seem to have
        called `run` less often than the others.
        """
        if self.broken is None:
            self.broken = error = self._course.first_error(error) or error
            if self._launch.phase is Phase.GATHERING:
                self._course.finish(error)
            self.history.note("broken", text=headline(error.message))
            self._course.report(error, None, None)
            records = self._course.events()
            self._course.send(
                Abort(error, of_the_gang(records)), *(node for node in self.nodes.joined if node != CONTROL)
            )
            if self.nodes[CONTROL] in (NodeState.JOINED, NodeState.DONE):  # when done, it waits for the others
                self._course.send(Abort(error, records), CONTROL)


_HANDLERS: dict[type, Callable[[Gang, int, Any], None]] = {
    Join: Gang._on_join,
    Prepares: Gang._on_call,
    Ready: Gang._on_call,
    Done: Gang._on_done,
    Leave: Gang._on_leave,
    TaskEnded: Gang._on_task_ended,
}
