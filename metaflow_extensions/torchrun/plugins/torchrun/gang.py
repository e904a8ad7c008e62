"""Who is in, who is ready, what was decided: the control node's view of the gang.

`Gang` is pure: messages and the clock go in, messages come out. It starts no thread, opens no
socket and never sleeps, so every interleaving can be tried in a test. One object decides, so there is
one decision, and every node gets the same.

A launch goes through ``gathering -> running -> over``, after a failure through ``stopping``, and through
``storing`` where values are stored for others when all workers have ended well. A failure before *go* leads from
``gathering`` to ``over`` at once, and a restart from ``stopping`` back to ``running``.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from .errors import GangError, GangStartTimeout, TorchrunError, TorchrunPreempted, from_wire, to_wire
from .failure import Cause, DatedCause
from .launch_state import CONTROL, QUIET_S, REMIND_S, Launch, Message, class_of, headline, names, teller
from .policy import LaunchPolicy

Outgoing = tuple[int, Message]
"""A node's index and a message for it."""

NodeState = Literal["absent", "joined", "done", "left", "lost"]
"""``done``: its step's code has ended well, its results are being stored. ``left``: nothing more will come of it."""

_BACKOFF_LIMIT_S = 30.0
# What an agent says when its store can't listen (TCPStore, torch 2.13).
_PORT_TAKEN = re.compile("EADDRINUSE|address already in use", re.IGNORECASE)
_MAX_MOVES = 3
# What a node needs beyond the workers' grace to kill, reap and read the last bytes.
_STOP_MARGIN_S = 15.0
_SAY_STORES_S = 30.0
# How long the nodes may take to collect the evidence of a hang.
EVIDENCE_S = 15.0


@dataclass
class Settings:
    """What the gang is called, and how patient it is.

    Attributes
    ----------
    num_nodes : int
        Size of the gang.
    started_timeout_s : float
        ``all_nodes_started_timeout``.
    grace_s : float
        Seconds workers have between SIGTERM and SIGKILL.
    name : str
        Its own in the world: part of every rendezvous' id, so that two gangs with the same pinned port
        can't meet in one store.
    """

    num_nodes: int
    started_timeout_s: float = 600.0
    grace_s: float = 30.0
    name: str = "gang"


class _Nodes(dict[int, NodeState]):
    """The state of every node, and how many have which: thousands are not to be looked through at each message."""

    def __init__(self, num_nodes: int) -> None:
        super().__init__(dict.fromkeys(range(num_nodes), "absent"))
        self.count: Counter[NodeState] = Counter(self.values())

    def __setitem__(self, node: int, state: NodeState) -> None:
        self.count[self[node]] -= 1
        self.count[state] += 1
        super().__setitem__(node, state)


def _task_of(join: Message) -> tuple[str, str]:
    """Return which process says *join*, and in which container it is."""
    return str(join.get("task", "")), str(join.get("place", ""))


class Gang:
    """The gang's state machine.

    Parameters
    ----------
    settings : Settings
        Size and patience.
    pick_port : callable
        Takes the pinned port or None and returns a port free on the control node, or None if the
        pinned one is taken.
    clock : callable, optional
        Monotonic seconds.
    """

    def __init__(
        self,
        settings: Settings,
        pick_port: Callable[[int | None], int | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._pick_port = pick_port
        self._clock = clock
        self._nodes = _Nodes(settings.num_nodes)
        self._hosts: dict[int, str] = {}
        self._tasks: dict[int, tuple[str, str]] = {}  # which process it is, and in which container
        self._replaced: set[int] = set()
        self._started_at = clock()
        self._launch: Launch | None = None
        self._verdicts: dict[int, Message] = {}
        self._early: dict[int, Message] = {}  # *ready* of nodes that have given up the launch that still runs
        self._broken: TorchrunError | None = None
        self._defeat: TorchrunError | None = None  # a verdict that a member has failed with
        self._out: list[Outgoing] = []

    # --- what can happen ------------------------------------------------------------------------

    def handle(self, node: int, message: Message) -> list[Outgoing]:
        """Take a message of a node and return what is to be sent.

        Messages from members: ``join``, ``ready``, ``active``, ``failed``, ``ended``, ``storing``, ``stored``, ``done``,
        ``leave``. Messages to members: ``welcome``, ``go``, ``stop``, ``restart``, ``verdict``, ``abort``, ``ack``,
        ``note``, ``bye``, ``replaced``; to the control node besides ``alone``; to one that is turned away ``refused``.
        """
        handler = {
            "join": self._on_join,
            "ready": self._on_ready,
            "active": self._on_active,
            "failed": self._on_failed,
            "ended": self._on_ended,
            "storing": self._on_storing,
            "stored": self._on_stored,
            "done": self._on_done,
            "leave": self._on_leave,
        }.get(str(message.get("type")))
        if handler is not None and node in self._nodes:
            handler(node, message)
        return self._flush()

    def lost(self, node: int, reason: str) -> list[Outgoing]:
        """Note that a node's connection or task ended, or that it fell silent."""
        state = self._nodes.get(node)
        if state in ("absent", "joined", "done"):
            self._nodes[node] = "lost"
            if state == "done":
                reason = f"{reason}, after its step's code but before its results were stored; see its log"
            cause = Cause("lost", node, self._hosts.get(node, "unknown"), exception=reason)
            self._node_is_gone(node, cause)
            self._see_who_is_left()
        return self._flush()

    def give_up(self, error: TorchrunError) -> list[Outgoing]:
        """Break the gang because of something that is no node's fault."""
        self._break(error)
        return self._flush()

    def tick(self) -> list[Outgoing]:
        """Look at the clock; call it a few times a second."""
        now = self._clock()
        overdue = self._nodes.count["absent"] and now - self._started_at > self._settings.started_timeout_s
        if overdue and self._broken is None:
            self._break(self._missing_error(self._in_state("absent")))
        launch = self._launch
        if launch is not None:
            self._tick_launch(launch, now)
        return self._flush()

    def _tick_launch(self, launch: Launch, now: float) -> None:
        if launch.phase == "gathering" and now >= launch.remind_at:
            launch.remind_at = now + REMIND_S
            late = [node for node in self._in_state("joined") if node not in launch.ready]
            absent = self._in_state("absent")
            waits = [f"{names(absent)} to start"] if absent else []
            waits += [f"{names(late)} to call current.torch.run"] if late else []
            self._say(launch.ready, f"launch {launch.number} waits for {' and for '.join(waits)}")
        if launch.stores and now >= launch.say_stores_at:
            launch.say_stores_at = now + _SAY_STORES_S
            if text := launch.who_stores(now, besides=CONTROL):  # which says so itself
                self._say([CONTROL], text)
        if launch.phase in ("running", "storing"):
            overrun = launch.overrun(now)
            if overrun is not None:
                self._overrun(launch, *overrun)
        if launch.phase == "stopping" and launch.restart_at is not None and now >= launch.restart_at:
            self._go(launch)
        elif launch.phase == "stopping" and launch.restart_at is None and now > launch.stop_by:
            self._decide(launch)

    def _overrun(self, launch: Launch, kind: str, text: str) -> None:
        cause = Cause(kind, CONTROL, self._hosts.get(CONTROL, "unknown"), exception=text)
        launch.note_cause(DatedCause(self._clock(), cause))
        self._stop(launch)

    # --- joining --------------------------------------------------------------------------------

    def _on_join(self, node: int, message: Message) -> None:
        self._nodes[node] = "joined"
        self._hosts[node] = str(message.get("host", "unknown"))
        self._tasks[node] = _task_of(message)
        self._send(node, {"type": "welcome", "num_nodes": self._settings.num_nodes, "grace_s": self._settings.grace_s})
        if self._broken is not None:
            self._send(node, {"type": "abort", "error": to_wire(self._broken)})

    def may_join(self, node: int, message: Message) -> bool:
        """Tell whether a newcomer may take the seat `node`: nobody sits there, or itself, without knowing it yet."""
        state, task = self._nodes.get(node), _task_of(message)
        return state == "absent" or (state == "joined" and bool(task[0]) and task == self._tasks[node])

    def turn_away(self, node: int, message: Message) -> tuple[TorchrunError, float, list[Outgoing]]:
        """Say why a newcomer can't take the seat `node`, how long it shall hold its end, and what the nodes have to know.

        A second task of a node comes where a pod is deleted or its machine drained: Kubernetes starts another
        one at once, while the first still has its grace. That one is told, so that all can save meanwhile. The end of the
        newcomer would have all pods killed, so it waits for theirs.
        """
        state, host = self._nodes.get(node), self._hosts.get(node, "unknown")
        who = f"Node {node} (host {message.get('host')}) was turned away by the control node"
        if state is None:
            return GangError(f"{who}: there are {self._settings.num_nodes} nodes in this gang."), 0.0, []
        if _task_of(message)[1] == self._tasks.get(node, ("", ""))[1]:
            return GangError(f"{who}: another task of this attempt has the same node index (host {host})."), 0.0, []
        launch = self._launch
        ending = self._broken is not None or (launch is not None and launch.phase == "stopping")
        if state == "joined" and not ending and node not in self._replaced:
            self._replaced.add(node)
            why = "it is being replaced: another task of this node has started, as when its pod is deleted or drained"
            self._send(node, {"type": "replaced", "why": why})
            self._say([CONTROL], f"node {node} (host {host}) is being replaced: another task of this node has come")
        before = (
            f"still runs (host {host}), and all ranks may save" if state == "joined" else f"has ended (host {host})"
        )
        text = f"{who}: the task that it is to replace {before}. A gang takes no node twice. {TorchrunPreempted.remedy}"
        return TorchrunPreempted(text), self._settings.grace_s + _STOP_MARGIN_S, self._flush()

    @property
    def num_nodes(self) -> int:
        """Size of the gang."""
        return self._settings.num_nodes

    @property
    def absent(self) -> list[int]:
        """Indexes of the nodes that have not arrived."""
        return self._in_state("absent")

    @property
    def broken(self) -> TorchrunError | None:
        """Why nothing can be launched any more, or None."""
        return self._broken

    @property
    def members(self) -> list[int]:
        """Indexes of the nodes, besides the control node, that have joined and not yet left."""
        return [node for node in self._in_state("joined", "done") if node != CONTROL]

    # --- a launch -------------------------------------------------------------------------------

    def _on_ready(self, node: int, message: Message) -> None:
        number = int(message["launch"])
        if number in self._verdicts:
            self._send(node, self._verdicts[number])  # it was over before this node came to it
            return
        if self._broken is not None:
            self._send(node, {"type": "verdict", "launch": number, "error": to_wire(self._broken)})
            return
        if self._launch is None or self._launch.phase == "over":
            self._launch = Launch(number, remind_at=self._clock() + QUIET_S)
        launch = self._launch
        if node in launch.dropped:
            dropped_out = to_wire(self._dropped_out_error(launch, node, number))
            self._send(node, {"type": "verdict", "launch": number, "error": dropped_out})
            return
        if launch.phase != "gathering":
            self._early[node] = message
            return
        launch.note_ready(node, message)
        count = self._nodes.count
        if count["done"] + count["left"] + count["lost"]:
            self._finish(launch, self._left_error(launch, self._in_state("done", "left", "lost")))
        elif len(launch.ready) == self._settings.num_nodes:
            error = launch.contradiction()
            if error is not None:
                self._finish(launch, error)
            else:
                launch.policy = policy = LaunchPolicy.from_wire(launch.ready[CONTROL].get("policy", {}))
                if policy.left_s is not None:
                    launch.deadline = self._clock() + policy.left_s
                self._go(launch)

    def _go(self, launch: Launch) -> None:
        pinned = launch.ready[0].get("master_port")
        port = self._pick_port(pinned)
        if port is None:
            self._finish(launch, self._port_error(pinned))
            return
        launch.phase, launch.restart_at, launch.stop_by = "running", None, float("inf")
        launch.went_at = launch.active_at = self._clock()
        launch.ended.clear()
        launch.stores.clear()
        launch.uploaded.clear()
        launch.causes.clear()
        go = {"type": "go", "launch": launch.number, "generation": launch.generation, "port": port}
        go["gang"] = self._settings.name
        self._broadcast({**go, "restarts": launch.restarts, "max_restarts": launch.policy.max_restarts})

    def _on_active(self, node: int, message: Message) -> None:
        """A worker of `node` has written something or ended."""
        launch = self._current(message)
        if launch is not None:
            launch.active_at = max(launch.active_at, self._clock() - float(message.get("age_s", 0.0)))

    def _on_failed(self, node: int, message: Message) -> None:
        """A worker or agent of `node` has failed; its full report follows with *ended*."""
        launch = self._current(message)
        if launch is None:
            return
        self._note_causes(launch, message)
        if message.get("given_up"):
            launch.given_up.add(node)
            launch.stores.pop(node, None)
        cause = launch.first_cause()
        if launch.phase == "gathering" and cause is not None:
            self._finish(launch, self._too_early_error(launch, cause))
        elif launch.restart_at is not None:  # between two generations nothing runs
            self._end_pause(launch)
        else:
            self._stop_or_drop(launch, node)

    def _on_ended(self, node: int, message: Message) -> None:
        launch = self._current(message)
        if launch is None or launch.phase not in ("running", "stopping"):
            return
        self._note_causes(launch, message)
        launch.ended[node] = {key: value for key, value in message.items() if key != "causes"}
        if message.get("storing") and not (message.get("ok") and launch.phase == "stopping"):
            self._note_storing(launch, node, message["storing"])
        if not message.get("ok"):
            self._stop_or_drop(launch, node)
        if node in launch.dropped:
            self._send_verdict(launch, [node], launch.dropped_error(node))
        self._decide_if_all_ended(launch)

    def _note_storing(self, launch: Launch, node: int, what: str) -> None:
        if not launch.stores:
            launch.stores_since = self._clock()
            launch.say_stores_at = launch.stores_since + _SAY_STORES_S
        launch.stores[node] = what

    def _on_storing(self, node: int, message: Message) -> None:
        """A node whose workers have ended goes on to store another value, or knows how the datastore fails."""
        launch = self._current(message)
        if launch is not None and node in launch.stores:
            launch.stores[node] = message["what"]

    def _on_stored(self, node: int, message: Message) -> None:
        launch = self._current(message)
        if launch is None or launch.stores.pop(node, None) is None:
            return
        launch.uploaded.update(message["keys"])
        self._note_causes(launch, message)
        if message.get("causes"):
            self._stop(launch)
        self._decide_if_all_ended(launch)

    def _current(self, message: Message) -> Launch | None:
        """Return the launch a message speaks of, unless it is over or another generation runs."""
        launch = self._launch
        if launch is None or launch.phase == "over" or message.get("launch") != launch.number:
            return None
        return launch if message.get("generation", launch.generation) == launch.generation else None

    def _note_causes(self, launch: Launch, message: Message) -> None:
        now = self._clock()
        for entry in message.get("causes", ()):
            launch.note_cause(DatedCause(now - float(entry.get("age_s", 0.0)), Cause.from_wire(entry["cause"])))

    def _stop_or_drop(self, launch: Launch, node: int) -> None:
        """Stop all because `node` fails; a launch with torchrun's own elasticity goes on while enough are left."""
        if launch.policy.min_nodes is None:
            self._stop(launch)
            return
        others = [other for other in self._in_state("joined") if other != node and other not in launch.dropped]
        if not launch.can_go_on_with(others):
            self._stop(launch)
        elif node not in launch.dropped:
            launch.dropped.add(node)
            stop = {"type": "stop", "launch": launch.number, "generation": launch.generation, "because": ""}
            cause = launch.cause_of(node)
            if cause is not None and cause.category == "preempted":
                stop["signal"] = launch.policy.preemption_signal
            self._send(node, stop)
            what = f" ({cause.what.splitlines()[0]})" if cause is not None else ""
            self._say(others, f"node {node} has dropped out{what}; the launch goes on with {len(others)} nodes")

    def _stop(self, launch: Launch) -> None:
        if launch.phase in ("running", "storing"):
            launch.phase = "stopping"
            for node in [node for node in launch.stores if launch.ended[node].get("ok")]:
                del launch.stores[node]  # after a failure, only what was raised is wanted
            launch.stop_by = self._clock() + self._settings.grace_s + _STOP_MARGIN_S
            cause = launch.first_cause()
            stop = {"type": "stop", "launch": launch.number, "generation": launch.generation}
            if cause is not None and cause.category == "preempted":
                stop["signal"] = launch.policy.preemption_signal
            if cause is not None and cause.kind == "hang":
                stop["evidence"] = True
                launch.stop_by += EVIDENCE_S
            self._broadcast({**stop, "because": headline(cause), "teller": teller(cause)})
            self._decide_if_all_ended(launch)  # no word of the workers' ends will come, if there are none

    def _decide_if_all_ended(self, launch: Launch) -> None:
        # Each node's message leads here, so what is quickly known comes first.
        if launch.phase not in ("running", "storing", "stopping") or len(launch.ended) < self._nodes.count["joined"]:
            return
        is_storing = any(self._nodes[node] == "joined" for node in launch.stores)
        if (is_storing and launch.phase != "running") or not launch.ended.keys() >= set(self._in_state("joined")):
            return
        if is_storing:
            launch.phase = "storing"
        else:
            self._decide(launch)

    def _decide(self, launch: Launch) -> None:
        """All nodes have ended, or their time is up: success, restart or failure."""
        silent = [node for node in self._in_state("joined") if node not in launch.ended]
        cause = launch.first_cause()
        all_well = all(message.get("ok") for node, message in launch.ended.items() if node not in launch.dropped)
        if (cause is None or launch.dropped) and not silent and all_well:
            self._finish(launch, None)
        elif cause is not None and self._may_move(launch, cause, silent):
            self._move(launch)
        elif cause is not None and self._may_restart(launch, cause, silent):
            self._restart(launch, cause)
        else:
            self._finish(launch, launch.error(cause, silent))

    def _is_whole(self, launch: Launch, silent: list[int]) -> bool:
        """Tell whether all nodes can go on; one that has given the launch up by itself does not listen to it."""
        return not silent and not launch.given_up and self._nodes.count["joined"] == self._settings.num_nodes

    def _may_move(self, launch: Launch, cause: Cause, silent: list[int]) -> bool:
        """Tell whether somebody took the chosen port before the agent did, and another may be chosen."""
        taken = cause.kind == "agent" and _PORT_TAKEN.search(cause.detail) is not None
        unpinned = launch.ready[CONTROL].get("master_port") is None
        whole = self._is_whole(launch, silent)
        return whole and launch.preempted is None and taken and unpinned and launch.moves < _MAX_MOVES

    def _move(self, launch: Launch) -> None:
        launch.generation += 1
        launch.moves += 1
        self._say(
            self._in_state("joined"), "the port chosen for the rendezvous was taken meanwhile; starting on another"
        )
        self._go(launch)

    def _may_restart(self, launch: Launch, cause: Cause, silent: list[int]) -> bool:
        policy = launch.policy
        over = cause.kind == "step_timeout" or self._clock() >= launch.deadline  # as one node's clock has it
        wanted = cause.category in policy.retry_on and not over
        whole = self._is_whole(launch, silent)
        return whole and launch.preempted is None and wanted and launch.restarts < policy.max_restarts

    def _restart(self, launch: Launch, cause: Cause) -> None:
        pause = min(2.0**launch.restarts, _BACKOFF_LIMIT_S)
        launch.generation += 1
        launch.restart_at = self._clock() + pause
        launch.ended.clear()
        restart = {"type": "restart", "launch": launch.number, "generation": launch.restarts, "pause_s": pause}
        self._broadcast({**restart, "of": launch.policy.max_restarts, "cause": cause.to_wire()})

    def _end_pause(self, launch: Launch) -> None:
        launch.restart_at = None
        self._finish(launch, launch.error(launch.first_cause(), []))

    def _finish(self, launch: Launch, error: TorchrunError | None) -> None:
        launch.phase = "over"
        verdict: Message = {"type": "verdict", "launch": launch.number}
        verdict["error"] = None if error is None else to_wire(error)
        self._verdicts[launch.number] = verdict
        self._send_verdict(launch, [node for node in self._in_state("joined") if node not in launch.dropped], error)
        if error is not None and self._in_state("lost"):
            self._break(error)  # without all its nodes the gang can't launch again
        early, self._early = self._early, {}
        for node, message in early.items():
            if self._nodes[node] == "joined":
                self._on_ready(node, message)

    def _send_verdict(self, launch: Launch, nodes: Iterable[int], error: TorchrunError | None) -> None:
        verdict: Message = {"type": "verdict", "error": None if error is None else to_wire(error)}
        made: dict[tuple[int, bool], Message] = {}  # one message for all that get the same
        for node in nodes:
            if node in launch.ready:  # by the number the node itself gave it, which may be the contradiction
                number = launch.ready[node]["launch"]
                key = (number, node == CONTROL)
                if key not in made:
                    made[key] = {**verdict, "launch": number, "deposits": launch.deposits(node, error)}
                self._send(node, made[key])

    # --- leaving --------------------------------------------------------------------------------

    def _on_done(self, node: int, message: Message) -> None:
        """The step's code of `node` has ended well; its results are not stored yet. The control node waits for all."""
        if self._nodes[node] == "joined":
            self._nodes[node] = "done"
            self._go_on_without(node)
            self._see_who_is_left()

    def _on_leave(self, node: int, message: Message) -> None:
        """The task of `node` needs the gang no more, or the step's code has failed there."""
        before = self._nodes[node]
        if before not in ("joined", "done"):
            return
        self._nodes[node] = "left"
        self._send(node, {"type": "ack"})
        cause = message.get("cause")
        if cause is not None:
            self._node_is_gone(node, Cause.from_wire(cause), after_step=before == "done")
        elif before == "joined":
            self._go_on_without(node)
        if message.get("failed") and cause is None and not self._is_dropped(node):
            self._defeat = self._last_error()
        self._see_who_is_left()
        if node == CONTROL:
            self._broadcast({"type": "bye"})

    def _is_dropped(self, node: int) -> bool:
        return self._launch is not None and node in self._launch.dropped

    def _last_error(self) -> TorchrunError | None:
        """Return the verdict of the last launch if that failed."""
        wire = self._verdicts[self._launch.number]["error"] if self._launch and self._launch.phase == "over" else None
        return None if wire is None else from_wire(wire)

    def _see_who_is_left(self) -> None:
        """Tell a control node whose step has ended that a member's failed, or that no member is left.

        A member that raises the verdict of a launch, as all do, fails the run; the control node's step may have
        caught it, or have ended before that launch.
        """
        if self._nodes[CONTROL] != "done":
            return
        if self._defeat is not None:
            self._break(self._defeat)
        if self._nodes.count["joined"] + self._nodes.count["done"] == 1:
            self._send(CONTROL, {"type": "alone"})

    def _go_on_without(self, node: int) -> None:
        """See what it means for the launch that no more can be expected of `node`."""
        if self._launch is not None and self._launch.phase == "gathering":
            self._finish(self._launch, self._left_error(self._launch, [node]))
        elif self._launch is not None:
            self._decide_if_all_ended(self._launch)

    def _node_is_gone(self, node: int, cause: Cause, after_step: bool = False) -> None:
        """Stop everything, since a node failed outside of its workers."""
        launch = self._launch
        if launch is None or launch.phase == "over":
            last = self._last_error()
            if last is not None and last.cause is not None and cause.is_same_event(last.cause):
                self._break(last)
                return
            place = "in the call of" if cause.kind == "call" else "outside of"
            when = (
                f"{place} current.torch.run"
                if not after_step
                else "after the step's code, before its results were stored"
            )
            text = f"{cause.describe()}\nIt happened {when}; the other nodes were stopped."
            self._break(class_of(cause)(text, cause.to_wire()))
        elif launch.phase == "gathering":
            error = self._too_early_error(launch, cause)
            self._finish(launch, error)
            self._break(error)
        else:
            launch.note_cause(DatedCause(self._clock(), cause))
            if launch.restart_at is not None:  # between two generations nothing runs
                self._end_pause(launch)
            else:
                self._stop_or_drop(launch, node)
                self._decide_if_all_ended(launch)

    def _break(self, error: TorchrunError) -> None:
        """Nothing can be launched any more: tell every node, wherever its code is."""
        if self._broken is None:
            self._broken = error
            abort = {"type": "abort", "error": to_wire(error)}
            self._broadcast(abort)
            if self._nodes[CONTROL] == "done":  # it waits for the others
                self._send(CONTROL, abort)

    # --- texts and sending ----------------------------------------------------------------------

    def _missing_error(self, missing: list[int]) -> GangStartTimeout:
        return GangStartTimeout(
            f"Waited {self._settings.started_timeout_s:g} s, but {names(missing)} of {self._settings.num_nodes} did not "
            "arrive. Look at the logs of these tasks: they may wait for machines, fail to pull their image, or not reach "
            "the control node. @torchrun(all_nodes_started_timeout=...) changes how long to wait."
        )

    def _port_error(self, port: int | None) -> GangError:
        return GangError(
            f"Port {port} is taken on the control node (host {self._hosts.get(CONTROL, 'unknown')}). Pin another with "
            "master_port, or leave it out: the kernel then chooses a free one."
        )

    def _left_error(self, launch: Launch, gone: list[int]) -> GangError:
        return GangError(
            f"Launch {launch.number} can't begin: the step's code has already ended on {names(gone)}. Every node must "
            "call current.torch.run the same number of times."
        )

    def _too_early_error(self, launch: Launch, cause: Cause) -> TorchrunError:
        text = f"{cause.describe()}\nIt happened before launch {launch.number} began."
        return class_of(cause)(text, cause.to_wire())

    def _dropped_out_error(self, launch: Launch, node: int, number: int) -> GangError:
        return GangError(
            f"Launch {number} can't begin on node {node}: it has dropped out of launch {launch.number}, which goes on "
            "without it, by torchrun's own elasticity. Let the step end there with the error that launch has raised."
        )

    def _in_state(self, *states: NodeState) -> list[int]:
        return [node for node, state in self._nodes.items() if state in states]

    def _say(self, nodes: Iterable[int], text: str) -> None:
        note = {"type": "note", "text": text}
        for node in nodes:
            self._send(node, note)

    def _broadcast(self, message: Message) -> None:
        for node in self._in_state("joined"):
            self._send(node, message)

    def _send(self, node: int, message: Message) -> None:
        self._out.append((node, message))

    def _flush(self) -> list[Outgoing]:
        out, self._out = self._out, []
        return out
