"""Who is in, who is ready, what was decided: the control node's view of the gang.

`Gang` is pure: messages and the clock go in, messages come out. It starts no thread, opens no
socket and never sleeps, so every interleaving can be tried in a test. One object decides, so there is
one decision, and every node gets the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..errors import TorchrunError
from . import obstacles
from .cause import Cause, Failure, cause_of, describe_exit, first_failure
from .decision import BACKOFF_LIMIT_S, Next, decide
from .history import History, Kind, Record, of_the_gang
from .keepers import Keepers, Where
from .launch import LONGER, Launch, Phase, events_for, reason, summary, teller, verdicts
from .nodes import Nodes, NodeState
from .policy import LaunchPolicy
from .protocol import (
    CONTROL,
    WORKERS,
    Abort,
    Ack,
    Alone,
    Bye,
    Done,
    Ended,
    Failed,
    Go,
    Join,
    Leave,
    Message,
    Note,
    Ready,
    Refused,
    Replaced,
    Restart,
    Save,
    Started,
    Stop,
    Stored,
    Storing,
    Told,
    Verdict,
    Welcome,
    Wrote,
)
from .texts import QUIET_S, REMIND_S, counted, headline, names

Outgoing = tuple[int, Message]
"""A node's index and a message for it."""

# What a node needs beyond the workers' grace to kill, reap and read the last bytes.
_STOP_MARGIN_S = 15.0
# How long it may take to store what a launch that has failed has left, and the list of what was stored in that time.
# The nodes wait for it, and cost.
SAVE_S = 120.0
_LIST_S = 15.0


@dataclass(frozen=True)
class Rules:
    """What a gang goes by, whatever it launches."""

    started_timeout_s: float = 600.0  # ``all_nodes_started_timeout``
    grace_s: float = 30.0  # what workers have between SIGTERM and SIGKILL
    name: str = "gang"  # its own in the world, so that two gangs with one pinned port can't meet in one store
    deadline: float = float("inf")  # end of the step's ``@timeout`` by the clock, whatever the gang does then
    why_it_waits: Callable[[int], str] = lambda node: ""  # returns a command that tells it of a node, or nothing

    @property
    def stop_s(self) -> float:
        """How long the nodes may take to stop their workers."""
        return self.grace_s + _STOP_MARGIN_S


class Gang:
    """The gang's state machine."""

    def __init__(
        self,
        num_nodes: int,
        pick_port: Callable[[int | None], int | None],  # returns the pinned port (None if taken), or else a free one
        rules: Rules | None = None,
        keepers: Keepers | None = None,  # of the features
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_nodes = num_nodes
        self.nodes = Nodes(num_nodes)
        self.broken: TorchrunError | None = None  # why nothing can be launched any more
        self._pick_port = pick_port
        self._rules = rules or Rules()
        self._is_time_up = False  # whether the control node's own code has had the time, or was told that it is over
        self._clock = clock
        self._started_at = clock()
        self.history = History(clock)
        self.keepers = keepers or Keepers()
        self._launch = Launch(-1, Phase.OVER)  # the last one
        self._mark = 0  # how many records there were when it ended
        # By the launch's number, of those only to which a node may still come.
        self._verdicts: dict[int, TorchrunError | None] = {}
        self._early: dict[int, Ready] = {}  # of nodes that have given up the launch that still runs
        self._failed_with: TorchrunError | None = None  # a verdict that a member's step has ended with
        self._out: list[Outgoing] = []

    @property
    def nproc(self) -> int | None:
        """Processes on each node in the last launch; None before the first."""
        ready = self._launch.ready.get(CONTROL)
        return None if ready is None else ready.nproc

    @property
    def facts(self) -> dict[str, str]:
        """What the control node's software is, as it said in the last launch; empty before the first."""
        ready = self._launch.ready.get(CONTROL)
        return {} if ready is None else ready.facts

    @property
    def due_at(self) -> float:
        """The time of its clock at which `tick` must come: the workers start again then."""
        return self._launch.until if self._launch.phase is Phase.PAUSING else float("inf")

    @property
    def _age_s(self) -> float:
        """Seconds since the gang's begin."""
        return self._clock() - self._started_at

    @property
    def error(self) -> TorchrunError | None:
        """What the gang is broken by, or what the last launch has ended with."""
        return self.broken or self._launch.verdict

    # --- what can happen ------------------------------------------------------------------------

    def handle(self, node: int, message: Message) -> list[Outgoing]:
        """Take a message of a node and return what is to be sent; what no node sends is ignored."""
        handler = _HANDLERS.get(type(message))
        if handler is not None and self.nodes[node] is not None and not self._is_late(message):
            handler(self, node, message)
        return self._flush()

    def _is_late(self, message: Message) -> bool:
        """Tell whether a message speaks of a launch that is over, or of another generation than the one that runs."""
        if not isinstance(message, Started | Wrote | Told | Failed | Ended | Storing | Stored):
            return False
        if self._is_early(message):
            return False
        launch = self._launch
        is_of_it = message.launch == launch.number and message.generation in (None, launch.generation)
        return launch.phase is Phase.OVER or not is_of_it

    def _is_early(self, message: Message) -> bool:
        """Tell whether a node gives up a launch that waits for the end of another."""
        if not isinstance(message, Failed) or not message.given_up:
            return False
        return any(ready.launch == message.launch for ready in self._early.values())

    def lost(self, node: int, why: str) -> list[Outgoing]:
        """Note that a node's connection or task ended, or that it fell silent."""
        state = self.nodes[node]
        if state in (NodeState.ABSENT, NodeState.JOINED, NodeState.DONE):
            self.nodes.enter(node, NodeState.LOST)
            self.history.note("lost", node=node, text=why)
            if state is NodeState.DONE:
                why = f"{why}, after its step's code but before its results were stored; see its log"
            self._node_is_gone(node, Cause("lost", node, self.nodes.host(node), exception=why))
            self._see_who_is_left()
        return self._flush()

    def give_up(self, error: TorchrunError) -> list[Outgoing]:
        """Break the gang because of something that is no node's fault."""
        self._break(error)
        return self._flush()

    def tick(self) -> list[Outgoing]:
        """Look at the clock; call it once a second, and when it is `due_at`."""
        now = self._clock()
        if self.nodes.count(NodeState.ABSENT) and now - self._started_at > self._rules.started_timeout_s:
            absent = self.nodes.absent
            command = self._rules.why_it_waits(absent[0])
            self._break(obstacles.missing(absent, self.num_nodes, self._rules.started_timeout_s, command))
        if now >= self._launch.remind_at:
            self._remind(now)
        self._look_at_limits(now)
        if self._launch.phase is Phase.RUNNING:
            self.keepers.tick(self._age_s, self._where)
        return self._flush()

    def _remind(self, now: float) -> None:
        launch = self._launch
        launch.remind_at = now + REMIND_S
        if launch.phase is Phase.GATHERING:
            absent = self.nodes.absent
            why = obstacles.to_see_why(absent[0], self._rules.why_it_waits(absent[0])) if absent else ""
            text = f"launch {launch.number} waits for {self._waits_for()}{why and '.' + why}"
            self._send(Note(text), CONTROL)  # whose log the terminal shows, even if it is the one that is late
            self._send(Note(text, is_detail=True), *(node for node in launch.ready if node != CONTROL))
        elif text := launch.who_stores(now, besides=CONTROL):  # which says so itself
            self._send(Note(text), CONTROL)

    def _waits_for(self) -> str:
        """Say which nodes have not called `run`, while others have."""
        absent, late = self.nodes.absent, [node for node in self.nodes.joined if node not in self._launch.ready]
        waits = [f"{names(absent)} to start"] if absent else []
        waits += [f"{names(late)} to call current.torch.run"] if late else []
        return " and for ".join(waits)

    def _look_at_limits(self, now: float) -> None:
        launch = self._launch
        if now > self._rules.deadline:
            self._time_is_up()
        if (text := launch.overrun(now)) is not None:
            self._fail_as_a_whole("timeout", text)
        if launch.phase is Phase.PAUSING and now >= launch.until:
            self._go()
        elif launch.phase is Phase.STOPPING and now > launch.until:
            self._decide()
        elif launch.phase is Phase.SAVING and now > launch.until:
            self._finish(launch.failing_with)

    def _fail_as_a_whole(self, kind: str, text: str) -> None:
        """Stop the launch because of something that is no node's failure."""
        self._note(kind, text=text)
        cause = Cause(kind, CONTROL, self.nodes.host(CONTROL), exception=text)
        self._launch.note_failures([Failure(cause)], self._clock())
        self._stop()

    def _time_is_up(self) -> None:
        """End what waits or runs beyond the step's ``@timeout``; workers, and what they store, `Launch.overrun` ends."""
        launch = self._launch
        if launch.phase in (Phase.STOPPING, Phase.SAVING):  # soon over
            return
        if launch.phase is Phase.GATHERING:
            text = f"{LONGER}, while launch {launch.number} waited for {self._waits_for()}"
            self._finish(obstacles.too_early(self._timed_out(text), launch.number))
        elif launch.phase is Phase.PAUSING:
            self._fail(launch.error(self._timed_out(LONGER), []))
        elif launch.phase is Phase.OVER and not self._is_time_up and self.nodes[CONTROL] is NodeState.JOINED:
            self._break(obstacles.outside(self._timed_out(LONGER), after_step=False))
        self._is_time_up = True  # as an alarm, which rings once; a launch begins in vain from now on

    def _timed_out(self, text: str) -> Cause:
        self.history.note("timeout", launch=self._launch.number if self._launch.ready else None, text=text)
        return Cause("step_timeout", CONTROL, self.nodes.host(CONTROL), exception=text)

    # --- joining --------------------------------------------------------------------------------

    def _on_join(self, node: int, join: Join) -> None:
        if node == join.node and self.nodes.may_join(join):
            if self.nodes[node] is NodeState.ABSENT:
                self.history.note("joined", node=node, text=join.host)
            self.nodes.join(join)
            self._send(Welcome(), node)
            if self.broken is not None:
                self._send(Abort(self.broken), node)

    def turn_away(self, join: Join) -> tuple[Refused, list[Outgoing]]:
        """Return what a task gets that can't be its node, and what the nodes have to know.

        Kubernetes starts a second task at once where a pod is deleted or drained, while the first still has its grace.
        The first is told, so that all can save. The second waits for their ends, because its own would have all pods
        killed.
        """
        node, host = join.node, self.nodes.host(join.node)
        state = self.nodes[node]
        if state is None or self.nodes.is_same_place(join):
            return Refused(obstacles.turned_away(join, self.num_nodes, None if state is None else host)), []
        is_ending = self.broken is not None or self._launch.phase in (Phase.STOPPING, Phase.PAUSING, Phase.SAVING)
        is_member = state is NodeState.JOINED
        if is_member and not is_ending and node not in self.nodes.replaced:
            self.nodes.replaced.add(node)
            why = "it is being replaced: another task of this node has started, as when its pod is deleted or drained"
            self._send(Replaced(why), node)
            self._send(
                Note(f"node {node} (host {host}) is being replaced: another task of this node has come"), CONTROL
            )
        return Refused(obstacles.no_replacement(join, host, is_member), self._rules.stop_s), self._flush()

    # --- a launch: its start --------------------------------------------------------------------

    def _on_ready(self, node: int, ready: Ready) -> None:
        number = ready.launch
        if number in self._verdicts:
            self._send_late_verdict(number, node, self._verdicts[number])  # it was over before this node came to it
            return
        if self.broken is not None:
            self._send_late_verdict(number, node, self.broken)
            return
        if self._launch.phase is Phase.OVER:
            mark = self._launch.mark if ready.goes_on else self._mark
            now = self._clock()
            self._launch = Launch(number, mark=mark, deadline=self._rules.deadline, remind_at=now + QUIET_S)
        launch = self._launch
        if node in launch.dropped:
            self._send_late_verdict(number, node, obstacles.dropped_out(number, node, launch.number))
        elif launch.phase is not Phase.GATHERING:
            self._early[node] = ready
        else:
            launch.note_ready(node, ready)
            self._note("ready", generation=None, node=node)
            self._start_if_all_ready()

    def _start_if_all_ready(self) -> None:
        launch = self._launch
        gone = (NodeState.DONE, NodeState.LEFT, NodeState.LOST)
        if self.nodes.count(*gone):
            self._finish(obstacles.step_has_ended(launch.number, self.nodes.which(*gone)))
        elif len(launch.ready) == self.num_nodes:
            error = launch.contradiction()
            if error is not None:
                self._finish(error)
                return
            self._verdicts.clear()  # all nodes have left the launches before
            launch.policy = launch.ready[CONTROL].policy or LaunchPolicy()
            self._go()

    def _go(self) -> None:
        launch = self._launch
        pinned = launch.ready[CONTROL].master_port
        port = self._pick_port(pinned)
        if port is None:
            self._finish(obstacles.port_taken(pinned, self.nodes.host(CONTROL)))
            return
        launch.begin_generation(self._clock())
        self.keepers.begin(launch.number, launch.policy.features, self._age_s)
        limit = launch.policy.max_restarts
        if (runs := launch.ready[CONTROL].runs) != WORKERS:
            self._note(runs, text=f"{runs} on {counted(self.num_nodes, 'node')}")
        else:
            nproc = launch.ready[CONTROL].nproc
            self._note("go", text=f"{counted(self.num_nodes, 'node')}, {nproc} process{'es' * (nproc != 1)} on each")
            if launch.without_devices and launch.generation == 0:
                who = names(launch.without_devices)
                text = f"warning: run(env=...) hides the accelerators on {who}: the workers there compute on the CPU"
                self._send(Note(f"{text}, the others do not"), CONTROL)
        go = Go(launch.number, launch.generation, port, self._rules.name, launch.restarts, limit, launch.devices)
        self._broadcast(go)

    # --- a launch: what its nodes report --------------------------------------------------------

    def _on_started(self, node: int, started: Started) -> None:
        self._note("started", node=node)

    def _on_wrote(self, node: int, wrote: Wrote) -> None:
        self._note("output", node=node)

    def _on_told(self, node: int, told: Told) -> None:
        self.keepers.handle(node, told, self._age_s)

    def _on_failed(self, node: int, failed: Failed) -> None:
        launch = self._launch
        if self._is_early(failed):
            self._give_up_early(failed)
            return
        self._note_failures(failed.failures)
        if failed.given_up:
            launch.given_up.add(node)
            launch.stores.pop(node, None)
        cause = launch.first_cause()
        if launch.phase is Phase.GATHERING and cause is not None:
            self._finish(obstacles.too_early(cause, launch.number))
        elif launch.phase is Phase.SAVING:
            self._decide_if_all_ended()
        else:
            self._stop_or_drop(node)

    def _give_up_early(self, failed: Failed) -> None:
        """End a launch that waits for the end of another: a node has given it up, so it can't begin on any."""
        number, first = failed.launch, first_failure(failed.failures)
        if first is None:
            return
        error = obstacles.too_early(first.cause, number)
        self._verdicts[number] = error
        self.history.note("failed", launch=number, text=headline(error.message))
        self._report(error, number, None)
        for node in [node for node, ready in self._early.items() if ready.launch == number]:
            del self._early[node]
            self._send_late_verdict(number, node, error)

    def _on_ended(self, node: int, ended: Ended) -> None:
        launch = self._launch
        if launch.phase not in (Phase.RUNNING, Phase.STOPPING):
            return
        self._note_failures(ended.failures)
        for rank, code in ended.exit_codes.items() if node not in launch.ended else ():
            self._note("exited", node=node, rank=rank, exit_code=code, text=describe_exit(code))
        self._note("stopped", node=node)
        self.keepers.ended(node, ended.ok)
        launch.ended[node] = replace(ended, failures=())
        if ended.storing and not (ended.ok and launch.phase is Phase.STOPPING):
            launch.note_storing(node, ended.storing, self._clock())
        if not ended.ok:
            self._stop_or_drop(node)
        if node in launch.dropped:
            self._send_verdict([node], launch.dropped_error(node))
        self._decide_if_all_ended()

    def _on_storing(self, node: int, storing: Storing) -> None:
        if node in self._launch.stores:
            self._launch.stores[node] = storing.what

    def _on_stored(self, node: int, stored: Stored) -> None:
        if self._launch.stores.pop(node, None) is not None:
            self._note_failures(stored.failures)
            if stored.failures:
                self._stop()
            self._decide_if_all_ended()

    # --- a launch: its end ----------------------------------------------------------------------

    def _stop_or_drop(self, node: int) -> None:
        """Stop all because `node` fails; a launch with torchrun's own elasticity goes on while enough are left."""
        launch = self._launch
        if launch.phase is Phase.PAUSING:  # nothing runs, and nothing can start any more
            self._fail(launch.error(self._first_cause(), []))
            return
        wanted = launch.policy.min_nodes
        if wanted is None:  # before all nodes are looked through
            self._stop()
            return
        others = [other for other in self.nodes.joined if other != node and other not in launch.dropped]
        if launch.phase is not Phase.RUNNING or CONTROL not in others or len(others) < wanted:
            self._stop()
        elif node not in launch.dropped:
            launch.dropped.add(node)
            cause = launch.cause_of(node)
            self._send(Stop(launch.number, launch.generation, signal=launch.signal_for(cause)), node)
            self._note("dropped", node=node)
            what = f" ({cause.what.splitlines()[0]})" if cause is not None else ""
            text = f"node {node} has dropped out{what}; the launch goes on with {len(others)} nodes"
            self._send(Note(text), *others)

    def _stop(self) -> None:
        launch = self._launch
        if launch.phase not in (Phase.RUNNING, Phase.STORING):
            return
        launch.enter(Phase.STOPPING)
        for node in [node for node in launch.stores if launch.ended[node].ok]:
            del launch.stores[node]  # after a failure, only what was raised is wanted
        cause = launch.first_cause()
        kind = "" if cause is None else cause.kind
        launch.until = self._clock() + self._rules.stop_s + self.keepers.find_out_s(kind)
        number = launch.signal_for(cause)
        self._note("stopping", text="" if cause is None else summary(cause))
        self._broadcast(Stop(launch.number, launch.generation, reason(cause), teller(cause), number, kind))
        self._decide_if_all_ended()  # no word of the workers' ends will come, if there are none

    def _decide_if_all_ended(self) -> None:
        # Each node's message leads here, so what is quickly known comes first.
        launch = self._launch
        if launch.phase is Phase.SAVING and not any(self.nodes[node] is NodeState.JOINED for node in launch.stores):
            self._finish(launch.failing_with)
            return
        running = launch.phase in (Phase.RUNNING, Phase.STORING, Phase.STOPPING)
        if not running or len(launch.ended) < self.nodes.count(NodeState.JOINED):
            return
        is_storing = any(self.nodes[node] is NodeState.JOINED for node in launch.stores)
        if (is_storing and launch.phase is not Phase.RUNNING) or not launch.ended.keys() >= set(self.nodes.joined):
            return
        if is_storing:
            launch.enter(Phase.STORING)
        else:
            self._decide()

    def _decide(self) -> None:
        """All nodes have ended, or their time is up: success, restart or failure."""
        launch, now = self._launch, self._clock()
        silent = [node for node in self.nodes.joined if node not in launch.ended]
        cause = self._first_cause()
        follows = decide(launch, cause, silent, self.nodes.count(NodeState.JOINED) == self.num_nodes, now)
        if follows is Next.FINISH:
            self._finish(None)
        elif follows is Next.MOVE:
            launch.generation += 1
            launch.moves += 1
            self._broadcast(Note("the port chosen for the rendezvous was taken meanwhile; starting on another"))
            self._go()
        elif follows is Next.RESTART and cause is not None:
            self._restart(cause, now)
        else:
            self._fail(launch.error(cause, silent))

    def _restart(self, cause: Cause, now: float) -> None:
        launch = self._launch
        self._note_cause(cause)
        self.history.report(None, cause.describe(), cause.as_dict(), launch.number, launch.generation)
        pause_s = launch.begin_pause(now, min(2.0**launch.restarts, BACKOFF_LIMIT_S))
        self._note("restart", text=f"restart {launch.restarts} of {launch.policy.max_restarts} in {pause_s:g} s")
        self._broadcast(Restart(launch.number, launch.restarts, launch.policy.max_restarts, pause_s, cause))

    def _first_cause(self) -> Cause | None:
        """Return the failure that started it all, with what features have found out of it."""
        cause = self._launch.first_cause()
        detail = "" if cause is None else self.keepers.detail(cause.kind)
        return replace(cause, detail=detail) if cause is not None and detail else cause

    def _fail(self, error: TorchrunError) -> None:
        """End the launch with an error, when what the nodes save is stored."""
        launch = self._launch
        nodes = [node for node in launch.saved_by(error) if self.nodes[node] is NodeState.JOINED]
        now = self._clock()
        # Workers have the grace to end after the step's time, and what they have written as long again.
        within_s = min(SAVE_S, max(launch.deadline - now, self._rules.grace_s))
        if not nodes or within_s <= 0:
            self._finish(error)
            return
        self._tell_cause(error)
        launch.begin_saving(nodes, error, now, now + within_s + _LIST_S)
        about = (launch.number, launch.generation, error)
        events = of_the_gang(self._events())
        self._send(Save(*about, within_s, events), *nodes)
        self._send(Save(*about, None, events), *(node for node in self.nodes.joined if node not in launch.stores))

    def _tell_cause(self, error: TorchrunError) -> None:
        if (cause := cause_of(error)) is not None:
            self._note_cause(cause)
        self._report(error, self._launch.number, self._launch.generation)

    def _finish(self, error: TorchrunError | None) -> None:
        launch = self._launch
        if error is not None and launch.phase is not Phase.SAVING:  # where it is, that was told when it began
            self._tell_cause(error)
        launch.enter(Phase.OVER)
        launch.verdict = error
        launch.stores.clear()  # nobody waits for it any more
        if error is None:
            self._note("done")
        else:
            self._note("failed", text=headline(error.message))
        # Where the nodes' numbers contradict each other, each of these launches has ended.
        numbers = {launch.number, *(ready.launch for ready in launch.ready.values())}
        if len(numbers) > 1 or len(launch.ready) < self.num_nodes:  # else all nodes have come to it
            self._verdicts.update(dict.fromkeys(numbers, error))
        self._send_verdict([node for node in self.nodes.joined if node not in launch.dropped], error)
        self._mark = self.history.count
        if error is not None and self.nodes.count(NodeState.LOST):
            self._break(error)  # without all its nodes the gang can't launch again
        early, self._early = self._early, {}
        for node, ready in early.items():
            if self.nodes[node] is NodeState.JOINED:
                self._on_ready(node, ready)

    def _send_verdict(self, nodes: Iterable[int], error: TorchrunError | None) -> None:
        told = self.keepers.verdict
        number = self._launch.number
        for node, verdict in verdicts(
            self._launch, nodes, error, self._events(), lambda to_control: told(number, to_control, error)
        ):
            self._send(verdict, node)

    def _send_late_verdict(self, number: int, node: int, error: TorchrunError | None) -> None:
        """Send the end of a launch to a node that has come to it since, or that can't take part in it."""
        records = self._events()
        if number < self._launch.number:  # to which others have come meanwhile
            records = tuple(record for record in self.history.records if record.launch in (number, None))
        self._send(Verdict(number, error, events=events_for(node, records)), node)

    def _events(self) -> tuple[Record, ...]:
        """Return what has happened in the last launch and after it."""
        return self.history.since(self._launch.mark)

    # --- leaving --------------------------------------------------------------------------------

    def _on_done(self, node: int, done: Done) -> None:
        if self.nodes[node] is NodeState.JOINED:
            self.nodes.enter(node, NodeState.DONE)
            self.history.note("finished", node=node)
            self._go_on_without(node)
            self._see_who_is_left()

    def _on_leave(self, node: int, leave: Leave) -> None:
        before = self.nodes[node]
        if before not in (NodeState.JOINED, NodeState.DONE):
            return
        self.nodes.enter(node, NodeState.LEFT)
        self.history.note("left", node=node, text="its step has failed" if leave.failed else "")
        self._send(Ack(), node)
        if leave.cause is not None:
            self._node_is_gone(node, leave.cause, after_step=before is NodeState.DONE)
        elif before is NodeState.JOINED:
            self._go_on_without(node)
        if leave.failed and leave.cause is None and node not in self._launch.dropped:
            self._failed_with = self._launch.verdict
        self._see_who_is_left()
        if node == CONTROL:
            self._broadcast(Bye())

    def _see_who_is_left(self) -> None:
        """Tell a control node whose step has ended that a member's failed, or that no member is left.

        A member that raises the verdict of a launch, as all do, fails the run. The control node's step may have ended
        well even so: it has caught the verdict, or ended before that launch.
        """
        if self.nodes[CONTROL] is NodeState.DONE:
            if self._failed_with is not None:
                self._break(self._failed_with)
            if self.nodes.count(NodeState.JOINED, NodeState.DONE) == 1:
                self._send(Alone(), CONTROL)

    def _go_on_without(self, node: int) -> None:
        """See what it means for the launch that no more can be expected of `node`."""
        if self._launch.phase is Phase.GATHERING:
            self._finish(obstacles.step_has_ended(self._launch.number, [node]))
        else:
            self._decide_if_all_ended()

    def _node_is_gone(self, node: int, cause: Cause, after_step: bool = False) -> None:
        """Stop everything, since a node failed outside of its workers."""
        launch = self._launch
        if launch.phase is Phase.OVER:
            last = self._launch.verdict
            is_known = (known := cause_of(last)) is not None and cause.is_same_event(known)
            self._break(last if last is not None and is_known else obstacles.outside(cause, after_step))
        elif launch.phase is Phase.GATHERING:
            error = obstacles.too_early(cause, launch.number)
            self._finish(error)
            self._break(error)
        else:
            self._note_failures([Failure(cause)])
            self._stop_or_drop(node)
            self._decide_if_all_ended()

    def _break(self, error: TorchrunError) -> None:
        """Nothing can be launched any more: tell every node, wherever its code is."""
        if self.broken is None:
            self.broken = error
            self.history.note("broken", text=headline(error.message))
            self._report(error, None, None)
            records = self._events()
            self._send(Abort(error, of_the_gang(records)), *(node for node in self.nodes.joined if node != CONTROL))
            if self.nodes[CONTROL] in (NodeState.JOINED, NodeState.DONE):  # done, it waits for the others
                self._send(Abort(error, records), CONTROL)

    # --- the history ----------------------------------------------------------------------------

    def _note(self, kind: Kind | str, **facts: Any) -> None:
        """Take down what has happened to the launch."""
        self.history.note(kind, **{"launch": self._launch.number, "generation": self._launch.generation, **facts})

    def _note_cause(self, cause: Cause) -> None:
        self._note("cause", node=cause.node, rank=cause.rank, exit_code=cause.exit_code, text=summary(cause))

    def _report(self, error: TorchrunError, launch: int | None, generation: int | None) -> None:
        self.history.report(type(error).__name__, error.message, error.cause, launch, generation)

    def _note_failures(self, failures: Iterable[Failure]) -> None:
        launch = self._launch
        before = launch.preempted
        launch.note_failures(failures, self._clock())
        if before is None and launch.preempted is not None:
            self._note("preempted", node=launch.preempted.node, text=headline(launch.preempted.what))

    # --- what features say ----------------------------------------------------------------------

    def _where(self, rank: int) -> Where:
        node = rank // (self.nproc or 1)
        return Where(node, rank, self.nodes.host(node))

    def _take_remarks(self) -> None:
        for remarks in self.keepers.pop_remarks():
            for each in remarks.happened:
                self._note(**asdict(each))
            for line in remarks.lines:
                self._send(Note(line), CONTROL)
            if remarks.failing is not None and self._launch.phase is Phase.RUNNING:
                self._fail_as_a_whole(remarks.failing.kind, remarks.failing.text)

    # --- sending --------------------------------------------------------------------------------

    def _broadcast(self, message: Message) -> None:
        self._send(message, *self.nodes.joined)

    def _send(self, message: Message, *nodes: int) -> None:
        self._out += [(node, message) for node in nodes]

    def _flush(self) -> list[Outgoing]:
        self._take_remarks()
        out, self._out = self._out, []
        return out


_HANDLERS: dict[type, Callable[[Gang, int, Any], None]] = {
    Join: Gang._on_join,
    Ready: Gang._on_ready,
    Started: Gang._on_started,
    Wrote: Gang._on_wrote,
    Told: Gang._on_told,
    Failed: Gang._on_failed,
    Ended: Gang._on_ended,
    Storing: Gang._on_storing,
    Stored: Gang._on_stored,
    Done: Gang._on_done,
    Leave: Gang._on_leave,
}
