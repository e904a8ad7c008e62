"""One launch on the control node, from *go* to the verdict, with its restarts. Pure.

`Gang` owns the nodes and what happens outside of launches; it hands the reports of a launch that runs to its `Course`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..errors import TorchrunError
from . import obstacles
from .agreement import devices, without_devices
from .cause import Cause, Failure, FailureText, cause_of, describe_exit, failed, failure_of, of_one_node
from .group import Group, follow
from .history import History, Kind, Record, of_the_gang
from .keepers import Failing, Keepers, Where
from .launch import (
    GONE,
    Launch,
    Next,
    Phase,
    change_of_nodes,
    decide,
    reason,
    summary,
    teller,
    told_to_end,
    verdicts,
    within,
)
from .nodes import Nodes, NodeState
from .policy import Rules
from .protocol import (
    CONTROL,
    Ask,
    Command,
    Ended,
    Failed,
    Go,
    Message,
    Note,
    Prepares,
    Ready,
    Restart,
    Started,
    Stop,
    Store,
    Stored,
    Storing,
    Told,
    Verdict,
    Wrote,
)
from .texts import REMIND_S, counted, headline, names

Outgoing = tuple[int, Message]
"""A node's index and a message for it."""

# How long storing what a failed launch has left may take, and then the index of it. All nodes wait meanwhile, and the
# user pays for them.
SAVE_S = 120.0
_INDEX_S = 15.0


@dataclass
class Wait:
    """How another task is waited for in the place of one that is gone."""

    tries: int = 0  # how many tasks were waited for so; all but the last one ended before they were ready
    since_s: float = 0.0  # by the gang's age, when the last one was lost
    joins: int = 0  # how many tasks had joined as this node by then
    what_came: str = ""  # why a task in its place does not take part


class Course:
    """The launch that runs, or the last one."""

    def __init__(
        self,
        nodes: Nodes,
        rules: Rules,
        keepers: Keepers,
        pick_port: Callable[[int | None], int | None],
        clock: Callable[[], float],
        over: Callable[[TorchrunError | None], None],  # called when the nodes have been sent the verdict
    ) -> None:
        self.nodes, self.rules, self.keepers = nodes, rules, keepers
        self.history = History(clock)
        self.launch = Launch(-1, Phase.OVER)
        self.gone: dict[int, Cause] = {}  # why nodes are lost, or were told to end
        self.waits: dict[int, Wait] = {}  # for a task in a node's place, until one is ready for a launch
        self._pick_port, self._clock, self._over = pick_port, clock, over
        self._began_at = clock()
        self._out: list[Outgoing] = []

    @property
    def age_s(self) -> float:
        """Seconds since the gang's begin."""
        return self._clock() - self._began_at

    def tick(self, now: float) -> None:
        """Check the time limits of the launch."""
        launch = self.launch
        if (text := launch.overrun(now)) is not None:
            self.fail_with(Failing("timeout", text))
        if launch.phase is Phase.PAUSING and now >= launch.until:
            self._start_again()
        elif launch.phase is Phase.STOPPING and now > launch.until:
            self._decide()
        elif launch.phase is Phase.SAVING and now > launch.until:
            self.finish(launch.failing_with)
        if launch.phase is Phase.RUNNING:
            self.keepers.tick(self.age_s, self._where)
        self.keepers.overdue(self.age_s)

    # --- which nodes take part -------------------------------------------------------------------

    def next_group(self, *besides: int) -> Group | None:
        """Return the nodes of the next generation, without the nodes `besides`; None if too few are left."""
        able = self._able(besides)
        return follow(self.launch.group, able, self._size, self._least) if CONTROL in able else None

    @property
    def _least(self) -> int:
        return self.rules.min_nodes or self._size

    def _able(self, besides: Collection[int] = ()) -> list[int]:
        """Return the nodes that can take part in the next generation, in order."""
        launch, nodes = self.launch, self.nodes
        gone = launch.given_up | launch.leaving.keys() | set(besides)
        if launch.phase in (Phase.GATHERING, Phase.OVER):  # of those nodes, each may still come or has ended well
            able = [node for node in range(nodes.size) if nodes[node] not in (NodeState.LOST, NodeState.OUT)]
            gone = set(besides)
        else:
            able = [node for node in nodes.joined if node in launch.ready]
        return [node for node in able if node not in gone]

    def why_not_without(self, cause: Cause | None) -> str:
        """Say why the gang does not go on without a lost node, where spares or fewer nodes are asked for."""
        launch, rules = self.launch, self.rules
        able = self._able(() if cause is None else (cause.node,))
        asked = rules.spare_nodes or rules.min_nodes or rules.replaces
        if cause is None or cause.category not in GONE or not asked:
            return ""
        why = "\nIt can't go on without that node: "
        if cause.node == CONTROL:
            return f"{why}node {CONTROL} is the control node."
        if launch.phase is Phase.STOPPING and cause.category in GONE - launch.policy.restart_on:
            return f"{why}restart_on does not have {cause.category!r}."
        if launch.phase is Phase.STOPPING and (ended := sorted(launch.given_up - launch.leaving.keys())):
            return f"{why}the call of run has ended on {names(ended)}, too."
        is_counted = cause.category != "preempted" or launch.policy.max_restarts == 0
        if launch.phase is Phase.STOPPING and launch.restarts >= launch.limit and is_counted:
            return f"{why}max_restarts={launch.policy.max_restarts} allows no more restarts."
        if len(able) < self._least:
            left = f"{counted(len(able), 'node')} {'is' if len(able) == 1 else 'are'} left"
            return f"{why}{left}, and it needs {self._least} (spare_nodes, min_nodes).{self._what_came(cause)}"
        return ""

    def _what_came(self, cause: Cause) -> str:
        """Return as a sentence what came of the wait for another task in the place of a node."""
        wait = self.waits.get(cause.node)
        if wait is None or not wait.tries:
            return ""
        if self.nodes[cause.node] in (NodeState.DONE, NodeState.LEFT):
            return " The step of the task in its place has ended without calling run."
        if wait.what_came:
            why = wait.what_came.removeprefix("failed: ").rstrip(".")
            return f" The task in its place can't take part: {why}."
        return " No other task has taken its place." if self.nodes.joins(cause.node) == wait.joins else ""

    def may_be_replaced(self, node: int) -> bool:
        """Return whether another task may take a node's place: not after too many that ended before they were ready."""
        wait = self.waits.get(node)
        return node != CONTROL and (0 if wait is None else wait.tries) < self.rules.replacements

    def expect_no_other(self, node: int) -> None:
        """Record that no other task will come in the place of a node, if it is lost."""
        self.waits.setdefault(node, Wait()).tries = self.rules.replacements

    def has_caught_up(self, node: int) -> None:
        """Record that a task that came in the place of another is where the others are."""
        self.waits.pop(node, None)

    def leave_out(self, node: int, cause: Cause) -> None:
        """Go on without a node that is gone or about to go, or wait for another task in its place.

        The node gets `cause` if it calls `run` again.
        """
        self.gone[node] = cause
        self.keepers.gone(node)
        if self.launch.takes_part(node):
            self.launch.lost.add(node)
        if node in self.waits:
            self.waits[node].what_came = headline(cause.what)
        if self.may_be_replaced(node):
            self.nodes.enter(node, NodeState.AWAITED)
            wait = self.waits.setdefault(node, Wait())
            wait.tries, wait.since_s, wait.joins = wait.tries + 1, self.age_s, self.nodes.joins(node)
            self.note("awaited", node=node, text=headline(cause.what))
        else:
            self.give_up_on(node)
        self._forget_call(node)

    def give_up_on(self, node: int) -> None:
        """Go on without a node for good, as far as no other task comes late."""
        self.nodes.enter(node, NodeState.OUT)
        came = self._what_came(self.gone[node])
        self.note("left_out", node=node, text=f"{headline(self.gone[node].what)}{came and f'.{came}'}")
        if came:
            self.send(Note(f"node {node} is not waited for any more.{came}"), CONTROL)

    def _forget_call(self, node: int) -> None:
        launch = self.launch
        for each in (launch.ready, launch.preparing, launch.leaving):
            each.pop(node, None)
        launch.given_up.discard(node)
        launch.without_commands.discard(node)
        if launch.phase is Phase.GATHERING and not launch.without_commands:  # else its failure stands for all of them
            launch.failures = [each for each in launch.failures if each.cause.node != node]

    def _leave_out_gone(self) -> None:
        """Leave out all nodes that are gone, or about to go."""
        launch = self.launch
        for node, cause in list(launch.leaving.items()):
            self.send(Verdict(launch.number, told_to_end(cause, self.may_be_replaced(node)), group=launch.group), node)
            self.leave_out(node, cause)
        for node in self.nodes.which(NodeState.LOST, NodeState.LEFT, NodeState.DONE):
            self.leave_out(
                node, self.gone.get(node, Cause("lost", node, self.nodes.host(node), exception="it has left"))
            )

    def _note_change(self, group: Group) -> None:
        """Note which nodes wait in a launch's first generation, and which take part since a restart."""
        launch, after = self.launch, set(group.nodes)
        if launch.group.size:
            for node in sorted(after - set(launch.group.nodes)):
                self.note("taken_in", node=node)
        else:
            for node in sorted(launch.ready.keys() - after):
                self.note("spare", node=node)

    # --- its begin -------------------------------------------------------------------------------

    def go(self, group: Group) -> None:
        """Send *go*: all nodes of a group start a generation of workers."""
        launch = self.launch
        pinned = launch.ready[CONTROL].master_port
        port = self._pick_port(pinned)
        if port is None:
            self.finish(obstacles.port_taken(pinned, self.nodes.host(CONTROL)))
            return
        self._note_change(group)
        launch.begin_generation(self._clock(), group)
        self.keepers.begin(launch.number, launch.policy.features, self.age_s)
        for node in sorted(set(range(self.nodes.size)) - set(group.nodes)):
            self.keepers.ended(node, True)
        nproc = launch.ready[CONTROL].nproc
        text = f"{counted(group.size, 'node')}, {nproc} process{'es' * (nproc != 1)} on each"
        self.note("go", text=text, nproc=nproc, group=group)
        if launch.generation == 0 and (without := without_devices(launch.ready)):
            hides = f"warning: run(env=...) hides the accelerators on {names(without)}"
            self.send(Note(f"{hides}: the workers there compute on the CPU, the others do not"), CONTROL)
        seen = devices(launch.ready)
        about = (launch.number, launch.generation, port, self.rules.name, launch.restarts, launch.limit)
        self.broadcast(Go(*about, seen, group))

    # --- what the nodes report -------------------------------------------------------------------

    def handle(self, node: int, report: Message) -> None:
        """Handle a node's report; a report about another launch or generation is late and is ignored."""
        handler, launch = _HANDLERS.get(type(report)), self.launch
        if handler is None or launch.phase is Phase.OVER:
            return
        about: Any = report
        if about.launch == launch.number and getattr(about, "generation", None) in (None, launch.generation):
            handler(self, node, report)

    def _on_command(self, node: int, ended: Command) -> None:
        facts = {"exit_code": ended.exit_code, "seconds": ended.seconds}
        self.note("command", node=node, generation=None, text=ended.text, **facts)

    def _on_started(self, node: int, started: Started) -> None:
        self.note("started", node=node)

    def _on_wrote(self, node: int, wrote: Wrote) -> None:
        self.note("output", node=node)

    def _on_told(self, node: int, told: Told) -> None:
        self.keepers.handle(node, told, self.age_s)

    def _on_failed(self, node: int, failed: Failed) -> None:
        launch = self.launch
        kind = failed.failures[0].cause.kind if failed.failures else ""
        if node in launch.preparing and launch.phase is not Phase.GATHERING and kind == "command":
            error = obstacles.commands_failed(failed.failures[0].cause, "The others go on without it.")
            self.refuse_late(node, launch.number, error)
            return
        self.add_failures(failed.failures)
        if failed.given_up:
            launch.given_up.add(node)
            launch.stores.pop(node, None)
        cause = launch.first_cause()
        if launch.phase is Phase.GATHERING and cause is not None:
            if node in launch.preparing and not failed.given_up:
                launch.without_commands.add(node)
                self.end_if_commands_failed()
            else:
                self.finish(obstacles.too_early(cause, launch.number, self.why_not_without(cause)))
        elif launch.phase is Phase.SAVING:
            self.decide_if_all_ended()
        else:
            self.stop()

    def end_if_commands_failed(self) -> None:
        """End a launch whose commands have failed, once all nodes have called `run`.

        Earlier, the control node could be gone before a late node has heard why.
        """
        launch, cause = self.launch, self.launch.first_cause()
        if cause is not None and len(launch.preparing) + len(launch.ready) == self.nodes.expected:
            self.finish(obstacles.commands_failed(cause))

    def first_error(self, error: TorchrunError | None) -> TorchrunError | None:
        """Return with what the launch ends: commands that failed while it gathered were before anything else."""
        launch, cause = self.launch, self.launch.first_cause()
        is_first = launch.phase is Phase.GATHERING and cause is not None and cause.node in launch.without_commands
        if is_first and cause is not None:
            error = obstacles.commands_failed(cause, is_alone=launch.is_alone)
        return of_one_node(error) if self.nodes.size == 1 and error is not None else error

    def _on_ended(self, node: int, ended: Ended) -> None:
        launch = self.launch
        if launch.phase not in (Phase.RUNNING, Phase.STOPPING):
            return
        self.add_failures(ended.failures)
        for rank, code in ended.exit_codes.items() if node not in launch.ended else ():
            self.note("exited", node=node, rank=rank, exit_code=code, text=describe_exit(code))
        self.note("stopped", node=node)
        self.keepers.ended(node, ended.ok)
        self._send_remarks()  # before the verdict, with which the log of the launch ends
        launch.ended.setdefault(node, replace(ended, failures=()))  # a second order to end knows no exit codes
        if not ended.ok:
            self.stop()
        self.decide_if_all_ended()

    def _on_storing(self, node: int, storing: Storing) -> None:
        if node in self.launch.stores:
            self.launch.stores[node] = storing.what

    def _on_stored(self, node: int, stored: Stored) -> None:
        if self.launch.stores.pop(node, None) is not None:
            self.add_failures(stored.failures)
            if stored.failures:
                self._stop()
            self.decide_if_all_ended()

    # --- its end ---------------------------------------------------------------------------------

    def stop(self) -> None:
        """Stop all nodes, because one of them fails."""
        launch = self.launch
        if launch.phase is Phase.PAUSING:  # nothing runs, and nothing can start any more
            cause = self._first_cause()
            self.fail(launch.error(cause, [], self.why_not_without(cause)))
        else:
            self._stop()

    def _stop(self) -> None:
        launch = self.launch
        if launch.phase not in (Phase.RUNNING, Phase.STORING):
            return
        launch.enter(Phase.STOPPING)
        cause = launch.first_cause()
        kind = "" if cause is None else cause.kind
        launch.until = self._clock() + self.rules.stop_s + self.keepers.find_out_s(kind)
        number = launch.signal_for(cause)
        self.note("stopping", text="" if cause is None else summary(cause, launch.is_alone))
        self.broadcast(Stop(launch.number, launch.generation, reason(cause), teller(cause), number, kind))
        self.decide_if_all_ended()  # without members, no report of an end will come

    def decide_if_all_ended(self) -> None:
        """Decide what follows, once all nodes have reported their end, or that all is stored."""
        # This runs for each node's message, thousands of times in a large gang, so the cheap checks come first.
        launch = self.launch
        if launch.phase in (Phase.STORING, Phase.SAVING):
            if not any(self.nodes[node] is NodeState.JOINED for node in launch.stores):
                self.finish(launch.failing_with)
        elif launch.phase in (Phase.RUNNING, Phase.STOPPING):
            gone = self.nodes.count(NodeState.DONE, NodeState.LEFT, NodeState.LOST)
            if len(launch.ended) + gone >= launch.group.size and not self._silent() and not launch.ending:
                self._decide()

    def _silent(self) -> list[int]:
        """Return the nodes whose workers have not ended, as far as is known."""
        launch = self.launch
        return [node for node in self.nodes.joined if node not in launch.ended and launch.takes_part(node)]

    def _decide(self) -> None:
        """All nodes have ended, or their time is up: success, restart or failure."""
        launch, now = self.launch, self._clock()
        silent, cause = self._silent(), self._first_cause()
        group = self.next_group()
        has_group = group is not None or self._may_wait()
        # That a node which was told to end does not report the end of its workers keeps no other node from going on.
        unknown = [node for node in silent if node not in launch.leaving]
        is_restarting = decide(launch, cause, [], True, now) in (Next.RESTART, Next.MOVE)
        if unknown and is_restarting and self._leave_out_silent(unknown):
            unknown, group, has_group = [], self.next_group(), True
        follows = decide(launch, cause, unknown, has_group, now)
        if follows is Next.FINISH:
            self._store(None)
        elif follows is Next.MOVE and group == launch.group:
            launch.generation += 1
            launch.moves += 1
            self.broadcast(
                Note("another program took the port of the rendezvous; all workers start again with another port")
            )
            self._leave_out_gone()
            self.go(group)
        elif follows in (Next.RESTART, Next.MOVE) and cause is not None:
            launch.uncounted += follows is Next.MOVE or cause.category == "preempted"
            self._restart(cause, now, at_once=follows is Next.MOVE or cause.category in GONE)
        else:
            self.fail(launch.error(cause, silent, self.why_not_without(cause)))

    def _leave_out_silent(self, silent: list[int]) -> bool:
        """Count nodes as lost whose workers may still run, if the gang can go on without them; return whether it can."""
        rules, able = self.rules, set(self._able()) - set(silent)
        is_replaced = all(self.may_be_replaced(node) for node in silent)
        if not (rules.spare_nodes or rules.min_nodes or rules.replaces) or CONTROL in silent:
            return False
        if len(able) < self._least and not is_replaced:
            return False
        for node in silent:
            text = "it did not report in time that its workers had ended"
            self.note("lost", node=node, text=text)
            cause = self.gone[node] = Cause("lost", node, self.nodes.host(node), exception=text)
            self.send(Verdict(self.launch.number, told_to_end(cause, self.may_be_replaced(node))), node)
            self.nodes.enter(node, NodeState.LOST)
        return True

    def _may_wait(self) -> bool:
        """Return whether enough nodes are there when other tasks have taken the places of those that are missing."""
        gone = {*self.launch.leaving, *self.nodes.which(NodeState.LOST, NodeState.LEFT, NodeState.DONE)}
        come = [node for node in gone if self.may_be_replaced(node)]
        able = set(self._able()) | set(self._coming()) | set(come)
        return CONTROL not in gone and len(able) >= self._least

    @property
    def _size(self) -> int:
        """How many nodes take part if none is missing."""
        return self.nodes.size - self.rules.spare_nodes

    def _coming(self) -> list[int]:
        """Return the nodes whose other task may come, or has come and is not ready."""
        return [node for node in sorted(self.waits) if self.nodes[node] in (NodeState.AWAITED, NodeState.JOINED)]

    def _awaited(self, group: Group | None) -> list[int]:
        """Return the nodes whose other tasks a generation waits for, before it begins with `group`.

        Where `group` is enough to go on, it waits for none longer than for one that has not joined.
        """
        missing, coming = self._size - (0 if group is None else group.size), self._coming()
        if group is None and len(self._able()) + len(coming) < self._least:
            return []
        if group is not None and group.size >= self._least:
            coming = [node for node in coming if not self.is_overdue(node)]
        return coming[:missing] if missing > 0 else []

    def is_overdue(self, node: int) -> bool:
        """Return whether the time is up in which another task must come in the place of a node."""
        return self.age_s - self.waits[node].since_s > self.rules.started_timeout_s

    def _restart(self, cause: Cause, now: float, at_once: bool) -> None:
        launch = self.launch
        self._record_cause(cause)
        self.history.report(None, cause.describe(launch.is_alone), cause.as_dict(), launch.number, launch.generation)
        # Without the node that has failed, or with another port, there is nothing to wait for.
        waits_s = 0.0 if at_once else launch.backoff_s
        pause_s = launch.begin_pause(now, waits_s)
        self._leave_out_gone()
        there = follow(launch.group, self._able(), self._size, 0)
        joined = set() if there is None else set(there.nodes)
        awaited = self._awaited(there)
        before, after = set(launch.group.nodes), joined | set(awaited)
        # The log has the cause, and has told of those in whose place another task has joined already.
        for also in (self.gone[node] for node in sorted(before - joined - {cause.node}) if node in self.gone):
            self.send(Note(within(also)), CONTROL)
        left, came = tuple(sorted(before - joined)), tuple(sorted(after - before | set(awaited)))
        who = change_of_nodes(left, came, len(after))
        when = "when it has come" if awaited else f"in {pause_s:g} s"
        launch.remind_at = now + REMIND_S if awaited else launch.remind_at
        self.note("restart", text=f"restart {launch.restarts} of {launch.limit} {when}{who and f'; {who}'}")
        self._announce(cause, pause_s, left, came, after)

    def _announce(
        self, cause: Cause, pause_s: float, left: tuple[int, ...], came: tuple[int, ...], nodes: Collection[int]
    ) -> None:
        launch = self.launch
        launch.announced, launch.left = Group.of(nodes), left
        about = (launch.number, launch.restarts, launch.limit, pause_s, cause)
        self.broadcast(Restart(*about, left, came, len(nodes)))

    def _start_again(self) -> None:
        """Begin the next generation after the pause, in which more nodes may have been lost."""
        group = self.next_group()
        if self._awaited(group):
            return  # `Gang` gives up on them when their time is up
        if group is None:
            cause = self.launch.restarts_for
            self.fail(self.launch.error(cause, [], self.why_not_without(cause)))
        else:
            self._leave_out_gone()
            before, after = set(self.launch.group.nodes), set(group.nodes)
            left = before - after | self.launch.lost
            is_known = group == self.launch.announced and left <= set(self.launch.left)
            if not is_known and self.launch.restarts_for is not None:  # more were lost in the pause
                came = after - before | (left & after)
                self._announce(self.launch.restarts_for, 0.0, tuple(sorted(left)), tuple(sorted(came)), after)
            self.go(group)

    def add_late(self, node: int, call: Prepares | Ready, error: TorchrunError | None) -> None:
        """Take a node into a launch that runs, which has come in the place of another; `error` is what contradicts that."""
        launch = self.launch
        if error is not None:
            self.refuse_late(node, call.launch, error)
        elif isinstance(call, Ready):
            launch.add_ready(node, call)
            self.has_caught_up(node)
            if not launch.takes_part(node):
                self.note("spare", node=node)
        else:
            launch.preparing[node] = call

    def refuse_late(self, node: int, number: int, error: TorchrunError) -> None:
        """Go on without a task that has come in the place of another, calls launch `number`, and can't take part."""
        cause, host = cause_of(error), self.nodes.host(node)
        text = headline(error.message if cause is None else cause.what)
        if cause is None:  # this task alone has the error, so it shows all of it
            alone = Cause("call", node, host, exception=text)
            error = failed(type(error), FailureText(alone, instead=error.message))
        self.send(Verdict(number, error), node)
        self.gone[node] = Cause("lost", node, self.nodes.host(node), exception=text)
        self.waits.setdefault(node, Wait()).what_came = text
        self._forget_call(node)
        self.give_up_on(node)

    @property
    def due_at(self) -> float:
        """The time at which the workers start again; infinite if none is known."""
        waits = self.launch.phase is Phase.PAUSING and not self._awaited(self.next_group())
        return self.launch.until if waits else float("inf")

    def _first_cause(self) -> Cause | None:
        """Return the first failure, with what features have found out about it."""
        cause = self.launch.first_cause()
        detail = "" if cause is None else self.keepers.detail(cause.kind)
        return replace(cause, detail=detail) if cause is not None and detail else cause

    def fail_with(self, failing: Failing) -> None:
        """Stop the launch for a reason that no node has reported as its failure, such as a time limit."""
        self.note(failing.kind, node=failing.node, text=failing.text)
        node = CONTROL if failing.node is None else failing.node
        cause = Cause(failing.kind, node, self.nodes.host(node), exception=failing.text, advice=failing.advice)
        self.launch.add_failures([Failure(cause)], self._clock())
        self._stop()

    def fail(self, error: TorchrunError) -> None:
        """End the launch with an error, after the nodes have stored what there is."""
        # After the step's @timeout the workers may use the grace to end, and storing what they left as long again.
        left_s = max(self.launch.deadline - self._clock(), self.rules.grace_s)
        self._store(error, min(SAVE_S, left_s))

    def _store(self, error: TorchrunError | None, within_s: float | None = None) -> None:
        """Have the nodes store what there is; then the launch ends with `error`, or well."""
        launch, now = self.launch, self._clock()
        nodes = [node for node in launch.storing_nodes(error) if self.nodes[node] is NodeState.JOINED]
        if not nodes or within_s == 0:
            self.finish(error)
            return
        if error is not None:
            self._record_error(error)
        launch.begin_storing(nodes, error, now, now + (within_s or 0.0) + _INDEX_S)
        events = () if error is None else of_the_gang(self.events())
        self.broadcast(Store(launch.number, launch.generation, error, within_s, events, launch.group))

    def _record_error(self, error: TorchrunError) -> None:
        if (failure := failure_of(error)) is not None:
            # What stands before a lost connection tells who had ended before.
            self._record_cause(failure.cause, failure.before if failure.cause.is_consequence else "")
        self.report(error, self.launch.number, self.launch.generation)

    def finish(self, error: TorchrunError | None) -> None:
        """End the launch with its verdict; None: all has gone well."""
        launch, error = self.launch, self.first_error(error)
        if error is not None and launch.phase is not Phase.SAVING:  # else `fail` has recorded it
            self._record_error(error)
        launch.enter(Phase.OVER)
        launch.verdict = error
        launch.stores.clear()  # no node waits for it any more
        joined = self.nodes.joined
        if error is None:
            self.note("done")
            self._go_on_without_others()
        else:
            self.note("failed", text=headline(error.message))
        told, number = self.keepers.verdict, launch.number
        for node, verdict in verdicts(
            launch, joined, error, self.events(), lambda to_control: told(number, to_control, error)
        ):
            self.send(verdict, node)
        self._over(error)

    def _go_on_without_others(self) -> None:
        """Let the nodes leave without which the launch has ended well, and wait for none in the place of one."""
        group = self.launch.group
        for node in self.nodes.which(NodeState.AWAITED):
            if group.rank_of(node) is None:
                self.give_up_on(node)
        if others := [node for node in self.nodes.joined if group.rank_of(node) is None]:
            self.dismiss(others, self.launch.number)

    def dismiss(self, others: Sequence[int], launch: int) -> None:
        """Let nodes leave that have no part in a launch that has ended well: its verdict tells them."""
        for node in others:
            self.nodes.enter(node, NodeState.OUT)
            self.keepers.gone(node)
            self.note("dismissed", node=node)
        verb, them = ("leaves", "it") if len(others) == 1 else ("leave", "them")
        self.send(Note(f"{names(others)} {verb}: launch {launch} has ended well without {them}"), CONTROL)

    # --- the history -----------------------------------------------------------------------------

    def events(self) -> tuple[Record, ...]:
        """Return what has happened in the last launch and after it."""
        return self.history.since(self.launch.mark)

    def note(self, kind: Kind | str, **facts: Any) -> None:
        """Add a record about the launch to the history."""
        self.history.note(kind, **{"launch": self.launch.number, "generation": self.launch.generation, **facts})

    def _record_cause(self, cause: Cause, before: str = "") -> None:
        text = headline(before.replace("\n", " ") + summary(cause, self.launch.is_alone))
        self.note("cause", node=cause.node, rank=cause.rank, exit_code=cause.exit_code, text=text)

    def report(self, error: TorchrunError, launch: int | None, generation: int | None) -> None:
        """Add the full text of an error to the history."""
        self.history.report(type(error).__name__, error.message, error.cause, launch, generation)

    def add_failures(self, failures: Iterable[Failure]) -> None:
        """Add failures to the launch; record a preemption once."""
        launch = self.launch
        before = launch.preempted
        launch.add_failures(failures, self._clock())
        if before is None and launch.preempted is not None:
            self.note("preempted", node=launch.preempted.node, text=headline(launch.preempted.what))

    # --- what features say -----------------------------------------------------------------------

    def _where(self, rank: int) -> Where:
        node = self.launch.group.node_of(rank // (self.launch.nproc or 1))
        return Where(node, rank, self.nodes.host(node))

    def _send_remarks(self) -> None:
        for feature, data in self.keepers.pop_asks():
            if self.launch.phase in (Phase.RUNNING, Phase.STOPPING):
                self.broadcast(Ask(self.launch.number, self.launch.generation, feature, data))
        for remarks in self.keepers.pop_remarks():
            for each in remarks.happened:
                self.note(**asdict(each))
            for line in remarks.lines:
                self.send(Note(line), CONTROL)
            if remarks.failing is not None and self.launch.phase is Phase.RUNNING:
                self.fail_with(remarks.failing)

    # --- sending ---------------------------------------------------------------------------------

    def broadcast(self, message: Message) -> None:
        """Send a message to all members."""
        self.send(message, *self.nodes.joined)

    def send(self, message: Message, *nodes: int) -> None:
        """Send a message to some nodes."""
        self._out += [(node, message) for node in nodes]

    def flush(self) -> list[Outgoing]:
        """Return what is to be sent."""
        self._send_remarks()
        out, self._out = self._out, []
        return out


_HANDLERS: dict[type, Callable[[Course, int, Any], None]] = {
    Command: Course._on_command,
    Started: Course._on_started,
    Wrote: Course._on_wrote,
    Told: Course._on_told,
    Failed: Course._on_failed,
    Ended: Course._on_ended,
    Storing: Course._on_storing,
    Stored: Course._on_stored,
}
