"""Who is in, who is ready, what was decided: the control node's view of the gang.

`Gang` is pure: messages and the clock go in, messages come out. It starts no thread, opens no
socket and never sleeps, so every interleaving can be tried in a test. One object decides, so there is
one decision, and every node gets the same.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from ..errors import GangError, GangStartTimeout, TorchrunError, TorchrunPreempted
from .cause import Cause, Failure
from .launch import Launch, Phase, error_of, reason, teller
from .nodes import Nodes, NodeState
from .policy import LaunchPolicy
from .protocol import (
    CONTROL,
    Abort,
    Ack,
    Active,
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
    Replaced,
    Restart,
    Stop,
    Stored,
    Storing,
    Verdict,
    Welcome,
)
from .texts import QUIET_S, REMIND_S, names

Outgoing = tuple[int, Message]
"""A node's index and a message for it."""

_BACKOFF_LIMIT_S = 30.0
# What an agent says when its store can't listen (TCPStore, torch 2.13).
_PORT_TAKEN = re.compile("EADDRINUSE|address already in use", re.IGNORECASE)
_MAX_MOVES = 3
# What a node needs beyond the workers' grace to kill, reap and read the last bytes.
_STOP_MARGIN_S = 15.0
# How long the nodes may take to write down what the workers of a hang are doing.
DIAGNOSTICS_S = 15.0


@dataclass(frozen=True)
class GangSettings:
    """What the gang is called, and how patient it is."""

    num_nodes: int
    started_timeout_s: float = 600.0  # ``all_nodes_started_timeout``
    grace_s: float = 30.0  # seconds workers have between SIGTERM and SIGKILL
    # Its own in the world: part of every rendezvous' id, so that two gangs with the same pinned port can't meet in
    # one store.
    name: str = "gang"


class Gang:
    """The gang's state machine."""

    def __init__(
        self,
        settings: GangSettings,
        pick_port: Callable[[int | None], int | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self._pick_port = pick_port  # returns the pinned port (None if taken), or else a free one
        self._clock = clock  # monotonic seconds
        self.nodes = Nodes(settings.num_nodes)
        self.broken: TorchrunError | None = None  # why nothing can be launched any more
        self._started_at = clock()
        self._launch: Launch | None = None
        self._verdicts: dict[int, Verdict] = {}
        self._early: dict[int, Ready] = {}  # of nodes that have given up the launch that still runs
        self._failed_with: TorchrunError | None = None  # a verdict that a member's step has ended with
        self._out: list[Outgoing] = []
        self._handlers: dict[type, Callable[[int, Any], None]] = {
            Join: self._on_join,
            Ready: self._on_ready,
            Active: self._on_active,
            Failed: self._on_failed,
            Ended: self._on_ended,
            Storing: self._on_storing,
            Stored: self._on_stored,
            Done: self._on_done,
            Leave: self._on_leave,
        }

    # --- what can happen ------------------------------------------------------------------------

    def handle(self, node: int, message: Message) -> list[Outgoing]:
        """Take a message of a node and return what is to be sent; what no node sends is ignored."""
        handler = self._handlers.get(type(message))
        if handler is not None and self.nodes[node] is not None:
            handler(node, message)
        return self._flush()

    def lost(self, node: int, why: str) -> list[Outgoing]:
        """Note that a node's connection or task ended, or that it fell silent."""
        state = self.nodes[node]
        if state in (NodeState.ABSENT, NodeState.JOINED, NodeState.DONE):
            self.nodes.enter(node, NodeState.LOST)
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
        """Look at the clock; call it a few times a second."""
        now = self._clock()
        overdue = self.nodes.count(NodeState.ABSENT) and now - self._started_at > self.settings.started_timeout_s
        if overdue and self.broken is None:
            self._break(self._missing_error(self.nodes.absent))
        launch = self._launch
        if launch is not None:
            self._remind(launch, now)
            self._look_at_limits(launch, now)
        return self._flush()

    def _remind(self, launch: Launch, now: float) -> None:
        if now < launch.remind_at:
            return
        launch.remind_at = now + REMIND_S
        if launch.phase is Phase.GATHERING:
            late = [node for node in self.nodes.joined if node not in launch.ready]
            waits = [f"{names(self.nodes.absent)} to start"] if self.nodes.absent else []
            waits += [f"{names(late)} to call current.torch.run"] if late else []
            self._say(launch.ready, f"launch {launch.number} waits for {' and for '.join(waits)}")
        elif text := launch.who_stores(now, besides=CONTROL):  # which says so itself
            self._say([CONTROL], text)

    def _look_at_limits(self, launch: Launch, now: float) -> None:
        if launch.phase in (Phase.RUNNING, Phase.STORING):
            overrun = launch.overrun(now)
            if overrun is not None:
                kind, text = overrun
                launch.note_failure(Failure(Cause(kind, CONTROL, self.nodes.host(CONTROL), exception=text)), now)
                self._stop(launch)
        if launch.phase is Phase.PAUSING and now >= launch.until:
            self._go(launch)
        elif launch.phase is Phase.STOPPING and now > launch.until:
            self._decide(launch)

    # --- joining --------------------------------------------------------------------------------

    def _on_join(self, node: int, join: Join) -> None:
        if node != join.node or not self.nodes.may_join(join):
            return
        self.nodes.join(join)
        self._send(node, Welcome())
        if self.broken is not None:
            self._send(node, Abort(self.broken))

    def turn_away(self, join: Join) -> tuple[TorchrunError, float, list[Outgoing]]:
        """Say why a task can't be its node, how long it shall put off its end, and what the nodes have to know.

        Kubernetes starts a second task at once where a pod is deleted or drained, while the first still has its grace.
        The first is told, so that all can save. The second waits for their ends, because its own would have all pods
        killed.
        """
        node, host = join.node, self.nodes.host(join.node)
        state = self.nodes[node]
        who = f"Node {node} (host {join.host}) was turned away by the control node"
        if state is None:
            return GangError(f"{who}: there are {self.settings.num_nodes} nodes in this gang."), 0.0, []
        if self.nodes.is_same_place(join):
            return GangError(f"{who}: another task of this attempt has the same node index (host {host})."), 0.0, []
        launch = self._launch
        ending = launch is not None and launch.phase in (Phase.STOPPING, Phase.PAUSING)
        is_member = state is NodeState.JOINED
        if is_member and not ending and self.broken is None and node not in self.nodes.replaced:
            self.nodes.replaced.add(node)
            why = "it is being replaced: another task of this node has started, as when its pod is deleted or drained"
            self._send(node, Replaced(why))
            self._say([CONTROL], f"node {node} (host {host}) is being replaced: another task of this node has come")
        before = f"still runs (host {host}), and all ranks may save" if is_member else f"has ended (host {host})"
        text = f"{who}: the task that it is to replace {before}. A gang takes no node twice. {TorchrunPreempted.remedy}"
        return TorchrunPreempted(text), self.settings.grace_s + _STOP_MARGIN_S, self._flush()

    # --- a launch: its start --------------------------------------------------------------------

    def _on_ready(self, node: int, ready: Ready) -> None:
        number = ready.launch
        if number in self._verdicts:
            self._send(node, self._verdicts[number])  # it was over before this node came to it
            return
        if self.broken is not None:
            self._send(node, Verdict(number, self.broken))
            return
        if self._launch is None or self._launch.phase is Phase.OVER:
            self._launch = Launch(number, remind_at=self._clock() + QUIET_S)
        launch = self._launch
        if node in launch.dropped:
            self._send(node, Verdict(number, self._dropped_out_error(launch, node, number)))
        elif launch.phase is not Phase.GATHERING:
            self._early[node] = ready
        else:
            launch.note_ready(node, ready)
            self._start_if_all_ready(launch)

    def _start_if_all_ready(self, launch: Launch) -> None:
        gone = (NodeState.DONE, NodeState.LEFT, NodeState.LOST)
        if self.nodes.count(*gone):
            self._finish(launch, self._left_error(launch, self.nodes.which(*gone)))
        elif len(launch.ready) == self.settings.num_nodes:
            error = launch.contradiction()
            if error is not None:
                self._finish(launch, error)
                return
            launch.policy = launch.ready[CONTROL].policy or LaunchPolicy()
            if launch.policy.left_s is not None:
                launch.deadline = self._clock() + launch.policy.left_s
            self._go(launch)

    def _go(self, launch: Launch) -> None:
        pinned = launch.ready[CONTROL].master_port
        port = self._pick_port(pinned)
        if port is None:
            self._finish(launch, self._port_error(pinned))
            return
        launch.begin_generation(self._clock())
        name, limit = self.settings.name, launch.policy.max_restarts
        self._broadcast(Go(launch.number, launch.generation, port, name, launch.restarts, limit))

    # --- a launch: what its nodes report --------------------------------------------------------

    def _current(self, number: int, generation: int | None) -> Launch | None:
        """Return the launch that a message speaks of, unless it is over or another generation runs."""
        launch = self._launch
        if launch is None or launch.phase is Phase.OVER or number != launch.number:
            return None
        return launch if generation in (None, launch.generation) else None

    def _note_failures(self, launch: Launch, failures: Iterable[Failure]) -> None:
        for failure in failures:
            launch.note_failure(failure, self._clock())

    def _on_active(self, node: int, active: Active) -> None:
        launch = self._current(active.launch, active.generation)
        if launch is not None:
            launch.active_at = max(launch.active_at, self._clock() - active.age_s)

    def _on_failed(self, node: int, failed: Failed) -> None:
        launch = self._current(failed.launch, failed.generation)
        if launch is None:
            return
        self._note_failures(launch, failed.failures)
        if failed.given_up:
            launch.given_up.add(node)
            launch.stores.pop(node, None)
        cause = launch.first_cause()
        if launch.phase is Phase.GATHERING and cause is not None:
            self._finish(launch, self._too_early_error(launch, cause))
        else:
            self._stop_or_drop(launch, node)

    def _on_ended(self, node: int, ended: Ended) -> None:
        launch = self._current(ended.launch, ended.generation)
        if launch is None or launch.phase not in (Phase.RUNNING, Phase.STOPPING):
            return
        self._note_failures(launch, ended.failures)
        launch.ended[node] = replace(ended, failures=())
        if ended.storing and not (ended.ok and launch.phase is Phase.STOPPING):
            launch.note_storing(node, ended.storing, self._clock())
        if not ended.ok:
            self._stop_or_drop(launch, node)
        if node in launch.dropped:
            self._send_verdict(launch, [node], launch.dropped_error(node))
        self._decide_if_all_ended(launch)

    def _on_storing(self, node: int, storing: Storing) -> None:
        launch = self._current(storing.launch, storing.generation)
        if launch is not None and node in launch.stores:
            launch.stores[node] = storing.what

    def _on_stored(self, node: int, stored: Stored) -> None:
        launch = self._current(stored.launch, stored.generation)
        if launch is None or launch.stores.pop(node, None) is None:
            return
        launch.stored.update(stored.keys)
        self._note_failures(launch, stored.failures)
        if stored.failures:
            self._stop(launch)
        self._decide_if_all_ended(launch)

    # --- a launch: its end ----------------------------------------------------------------------

    def _stop_or_drop(self, launch: Launch, node: int) -> None:
        """Stop all because `node` fails; a launch with torchrun's own elasticity goes on while enough are left."""
        if launch.phase is Phase.PAUSING:  # nothing runs, and nothing can start any more
            self._finish(launch, launch.error(launch.first_cause(), []))
            return
        wanted = launch.policy.min_nodes
        if wanted is None:  # before all nodes are looked through
            self._stop(launch)
            return
        others = [other for other in self.nodes.joined if other != node and other not in launch.dropped]
        if launch.phase is not Phase.RUNNING or CONTROL not in others or len(others) < wanted:
            self._stop(launch)
        elif node not in launch.dropped:
            launch.dropped.add(node)
            cause = launch.cause_of(node)
            self._send(node, Stop(launch.number, launch.generation, signal=self._signal_for(launch, cause)))
            what = f" ({cause.what.splitlines()[0]})" if cause is not None else ""
            self._say(others, f"node {node} has dropped out{what}; the launch goes on with {len(others)} nodes")

    def _stop(self, launch: Launch) -> None:
        if launch.phase not in (Phase.RUNNING, Phase.STORING):
            return
        launch.enter(Phase.STOPPING)
        for node in [node for node in launch.stores if launch.ended[node].ok]:
            del launch.stores[node]  # after a failure, only what was raised is wanted
        cause = launch.first_cause()
        is_hang = cause is not None and cause.kind == "hang"
        launch.until = self._clock() + self.settings.grace_s + _STOP_MARGIN_S + (DIAGNOSTICS_S if is_hang else 0.0)
        number = self._signal_for(launch, cause)
        self._broadcast(Stop(launch.number, launch.generation, reason(cause), teller(cause), number, is_hang))
        self._decide_if_all_ended(launch)  # no word of the workers' ends will come, if there are none

    @staticmethod
    def _signal_for(launch: Launch, cause: Cause | None) -> int | None:
        """Return what the workers get so that they can save, where `cause` leaves time for it."""
        is_preempted = cause is not None and cause.category == "preempted"
        return launch.policy.preemption_signal if is_preempted else None

    def _decide_if_all_ended(self, launch: Launch) -> None:
        # Each node's message leads here, so what is quickly known comes first.
        running = launch.phase in (Phase.RUNNING, Phase.STORING, Phase.STOPPING)
        if not running or len(launch.ended) < self.nodes.count(NodeState.JOINED):
            return
        is_storing = any(self.nodes[node] is NodeState.JOINED for node in launch.stores)
        if (is_storing and launch.phase is not Phase.RUNNING) or not launch.ended.keys() >= set(self.nodes.joined):
            return
        if is_storing:
            launch.enter(Phase.STORING)
        else:
            self._decide(launch)

    def _decide(self, launch: Launch) -> None:
        """All nodes have ended, or their time is up: success, restart or failure."""
        silent = [node for node in self.nodes.joined if node not in launch.ended]
        cause = launch.first_cause()
        all_well = all(ended.ok for node, ended in launch.ended.items() if node not in launch.dropped)
        if (cause is None or launch.dropped) and not silent and all_well:
            self._finish(launch, None)
        elif cause is not None and self._may_move(launch, cause, silent):
            self._move(launch)
        elif cause is not None and self._may_restart(launch, cause, silent):
            self._restart(launch, cause)
        else:
            self._finish(launch, launch.error(cause, silent))

    def _can_start_again(self, launch: Launch, silent: list[int]) -> bool:
        """Tell whether all nodes can go on; one that has given the launch up by itself does not listen to it."""
        is_whole = self.nodes.count(NodeState.JOINED) == self.settings.num_nodes
        return is_whole and not silent and not launch.given_up and launch.preempted is None

    def _may_move(self, launch: Launch, cause: Cause, silent: list[int]) -> bool:
        """Tell whether somebody took the chosen port before the agent did, and another may be chosen."""
        taken = cause.kind == "agent" and _PORT_TAKEN.search(cause.detail) is not None
        may_choose = launch.ready[CONTROL].master_port is None and launch.moves < _MAX_MOVES
        return taken and may_choose and self._can_start_again(launch, silent)

    def _move(self, launch: Launch) -> None:
        launch.generation += 1
        launch.moves += 1
        self._say(self.nodes.joined, "the port chosen for the rendezvous was taken meanwhile; starting on another")
        self._go(launch)

    def _may_restart(self, launch: Launch, cause: Cause, silent: list[int]) -> bool:
        policy = launch.policy
        over = cause.kind == "step_timeout" or self._clock() >= launch.deadline  # as one node's clock has it
        wanted = cause.category in policy.retry_on and launch.restarts < policy.max_restarts
        return wanted and not over and self._can_start_again(launch, silent)

    def _restart(self, launch: Launch, cause: Cause) -> None:
        pause_s = min(2.0**launch.restarts, _BACKOFF_LIMIT_S)
        launch.begin_pause(self._clock(), pause_s)
        self._broadcast(Restart(launch.number, launch.restarts, launch.policy.max_restarts, pause_s, cause))

    def _finish(self, launch: Launch, error: TorchrunError | None) -> None:
        launch.enter(Phase.OVER)
        self._verdicts[launch.number] = Verdict(launch.number, error)
        self._send_verdict(launch, [node for node in self.nodes.joined if node not in launch.dropped], error)
        if error is not None and self.nodes.count(NodeState.LOST):
            self._break(error)  # without all its nodes the gang can't launch again
        early, self._early = self._early, {}
        for node, ready in early.items():
            if self.nodes[node] is NodeState.JOINED:
                self._on_ready(node, ready)

    def _send_verdict(self, launch: Launch, nodes: Iterable[int], error: TorchrunError | None) -> None:
        made: dict[tuple[int, bool], Verdict] = {}  # one message for all that get the same
        for node in nodes:
            if node in launch.ready:  # by the number the node itself gave it, which may be the contradiction
                number = launch.ready[node].launch
                key = (number, node == CONTROL)
                if key not in made:
                    made[key] = Verdict(number, error, launch.stored_for(node, error))
                self._send(node, made[key])

    # --- leaving --------------------------------------------------------------------------------

    def _on_done(self, node: int, message: Done) -> None:
        if self.nodes[node] is NodeState.JOINED:
            self.nodes.enter(node, NodeState.DONE)
            self._go_on_without(node)
            self._see_who_is_left()

    def _on_leave(self, node: int, leave: Leave) -> None:
        before = self.nodes[node]
        if before not in (NodeState.JOINED, NodeState.DONE):
            return
        self.nodes.enter(node, NodeState.LEFT)
        self._send(node, Ack())
        if leave.cause is not None:
            self._node_is_gone(node, leave.cause, after_step=before is NodeState.DONE)
        elif before is NodeState.JOINED:
            self._go_on_without(node)
        is_dropped = self._launch is not None and node in self._launch.dropped
        if leave.failed and leave.cause is None and not is_dropped:
            self._failed_with = self._last_error()
        self._see_who_is_left()
        if node == CONTROL:
            self._broadcast(Bye())

    def _last_error(self) -> TorchrunError | None:
        """Return the verdict of the last launch if that failed."""
        is_over = self._launch is not None and self._launch.phase is Phase.OVER
        return self._verdicts[self._launch.number].error if self._launch is not None and is_over else None

    def _see_who_is_left(self) -> None:
        """Tell a control node whose step has ended that a member's failed, or that no member is left.

        A member that raises the verdict of a launch, as all do, fails the run. The control node's step may have ended
        well even so: it has caught the verdict, or ended before that launch.
        """
        if self.nodes[CONTROL] is not NodeState.DONE:
            return
        if self._failed_with is not None:
            self._break(self._failed_with)
        if self.nodes.count(NodeState.JOINED, NodeState.DONE) == 1:
            self._send(CONTROL, Alone())

    def _go_on_without(self, node: int) -> None:
        """See what it means for the launch that no more can be expected of `node`."""
        if self._launch is not None and self._launch.phase is Phase.GATHERING:
            self._finish(self._launch, self._left_error(self._launch, [node]))
        elif self._launch is not None:
            self._decide_if_all_ended(self._launch)

    def _node_is_gone(self, node: int, cause: Cause, after_step: bool = False) -> None:
        """Stop everything, since a node failed outside of its workers."""
        launch = self._launch
        if launch is None or launch.phase is Phase.OVER:
            self._break(self._outside_error(cause, after_step))
        elif launch.phase is Phase.GATHERING:
            error = self._too_early_error(launch, cause)
            self._finish(launch, error)
            self._break(error)
        else:
            launch.note_failure(Failure(cause), self._clock())
            self._stop_or_drop(launch, node)
            self._decide_if_all_ended(launch)

    def _break(self, error: TorchrunError) -> None:
        """Nothing can be launched any more: tell every node, wherever its code is."""
        if self.broken is None:
            self.broken = error
            self._broadcast(Abort(error))
            if self.nodes[CONTROL] is NodeState.DONE:  # it waits for the others
                self._send(CONTROL, Abort(error))

    # --- errors ---------------------------------------------------------------------------------

    def _outside_error(self, cause: Cause, after_step: bool) -> TorchrunError:
        """Return the error for a node that failed while no launch ran."""
        last = self._last_error()
        if last is not None and last.cause is not None and cause.is_same_event(last.cause):
            return last
        place = "in the call of" if cause.kind == "call" else "outside of"
        when = f"{place} current.torch.run"
        if after_step:
            when = "after the step's code, before its results were stored"
        return error_of(cause, f"It happened {when}; the other nodes were stopped.")

    def _too_early_error(self, launch: Launch, cause: Cause) -> TorchrunError:
        return error_of(cause, f"It happened before launch {launch.number} began.")

    def _missing_error(self, missing: list[int]) -> GangStartTimeout:
        return GangStartTimeout(
            f"Waited {self.settings.started_timeout_s:g} s, but {names(missing)} of {self.settings.num_nodes} did not "
            "arrive. Look at the logs of these tasks: they may wait for machines, fail to pull their image, or not reach "
            "the control node. @torchrun(all_nodes_started_timeout=...) changes how long to wait."
        )

    def _port_error(self, port: int | None) -> GangError:
        return GangError(
            f"Port {port} is taken on the control node (host {self.nodes.host(CONTROL)}). Pin another with "
            "master_port, or leave it out: the kernel then chooses a free one."
        )

    def _left_error(self, launch: Launch, gone: list[int]) -> GangError:
        return GangError(
            f"Launch {launch.number} can't begin: the step's code has already ended on {names(gone)}. Every node must "
            "call current.torch.run the same number of times."
        )

    def _dropped_out_error(self, launch: Launch, node: int, number: int) -> GangError:
        return GangError(
            f"Launch {number} can't begin on node {node}: it has dropped out of launch {launch.number}, which goes on "
            "without it, by torchrun's own elasticity. Let the step end there with the error that launch has raised."
        )

    # --- sending --------------------------------------------------------------------------------

    def _say(self, nodes: Iterable[int], text: str) -> None:
        note = Note(text)
        for node in nodes:
            self._send(node, note)

    def _broadcast(self, message: Message) -> None:
        for node in self.nodes.joined:
            self._send(node, message)

    def _send(self, node: int, message: Message) -> None:
        self._out.append((node, message))

    def _flush(self) -> list[Outgoing]:
        out, self._out = self._out, []
        return out
