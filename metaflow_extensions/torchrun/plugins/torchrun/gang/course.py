"""One launch on the control node, from *go* to the verdict, with its restarts. Pure.

`Gang` owns the nodes and what happens outside of launches; it hands the reports of a launch that runs to its `Course`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from typing import Any

from ..errors import TorchrunError
from . import obstacles
from .agreement import devices, without_devices
from .cause import Cause, Failure, cause_of, describe_exit
from .history import History, Kind, Record, of_the_gang
from .keepers import Keepers, Where
from .launch import BACKOFF_LIMIT_S, Launch, Next, Phase, decide, reason, summary, teller, verdicts
from .nodes import Nodes, NodeState
from .policy import Rules
from .protocol import (
    CONTROL,
    WORKERS,
    Ask,
    Ended,
    Failed,
    Go,
    Message,
    Note,
    Restart,
    Save,
    Started,
    Stop,
    Stored,
    Storing,
    Told,
    Wrote,
)
from .texts import counted, headline, names

Outgoing = tuple[int, Message]
"""A node's index and a message for it."""

# How long storing the outputs of a failed launch may take, and then the list of them. All nodes wait meanwhile, and
# the user pays for them.
SAVE_S = 120.0
_LIST_S = 15.0


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
            self.fail_as_a_whole("timeout", text)
        if launch.phase is Phase.PAUSING and now >= launch.until:
            self.go()
        elif launch.phase is Phase.STOPPING and now > launch.until:
            self._decide()
        elif launch.phase is Phase.SAVING and now > launch.until:
            self.finish(launch.failing_with)
        if launch.phase is Phase.RUNNING:
            self.keepers.tick(self.age_s, self._where)

    def go(self) -> None:
        """Send *go*: all nodes start a generation of workers."""
        launch = self.launch
        pinned = launch.ready[CONTROL].master_port
        port = self._pick_port(pinned)
        if port is None:
            self.finish(obstacles.port_taken(pinned, self.nodes.host(CONTROL)))
            return
        launch.begin_generation(self._clock())
        self.keepers.begin(launch.number, launch.policy.features, self.age_s)
        limit = launch.policy.max_restarts
        if (runs := launch.ready[CONTROL].runs) != WORKERS:
            self.note(runs, text=f"{runs} on {counted(self.nodes.size, 'node')}")
        else:
            nproc = launch.ready[CONTROL].nproc
            self.note("go", text=f"{counted(self.nodes.size, 'node')}, {nproc} process{'es' * (nproc != 1)} on each")
            if launch.generation == 0 and (without := without_devices(launch.ready)):
                hides = f"warning: run(env=...) hides the accelerators on {names(without)}"
                self.send(Note(f"{hides}: the workers there compute on the CPU, the others do not"), CONTROL)
        seen = devices(launch.ready)
        self.broadcast(Go(launch.number, launch.generation, port, self.rules.name, launch.restarts, limit, seen))

    # --- what the nodes report -------------------------------------------------------------------

    def handle(self, node: int, report: Message) -> None:
        """Handle a node's report; a report about another launch or generation is late and is ignored."""
        handler, launch = _HANDLERS.get(type(report)), self.launch
        if handler is None or launch.phase is Phase.OVER:
            return
        about: Any = report
        if about.launch == launch.number and about.generation in (None, launch.generation):
            handler(self, node, report)

    def _on_started(self, node: int, started: Started) -> None:
        self.note("started", node=node)

    def _on_wrote(self, node: int, wrote: Wrote) -> None:
        self.note("output", node=node)

    def _on_told(self, node: int, told: Told) -> None:
        self.keepers.handle(node, told, self.age_s)

    def _on_failed(self, node: int, failed: Failed) -> None:
        launch = self.launch
        self.add_failures(failed.failures)
        if failed.given_up:
            launch.given_up.add(node)
            launch.stores.pop(node, None)
        cause = launch.first_cause()
        if launch.phase is Phase.GATHERING and cause is not None:
            self.finish(obstacles.too_early(cause, launch.number))
        elif launch.phase is Phase.SAVING:
            self.decide_if_all_ended()
        else:
            self.stop_or_drop(node)

    def _on_ended(self, node: int, ended: Ended) -> None:
        launch = self.launch
        if launch.phase not in (Phase.RUNNING, Phase.STOPPING):
            return
        self.add_failures(ended.failures)
        for rank, code in ended.exit_codes.items() if node not in launch.ended else ():
            self.note("exited", node=node, rank=rank, exit_code=code, text=describe_exit(code))
        self.note("stopped", node=node)
        self.keepers.ended(node, ended.ok)
        launch.ended[node] = replace(ended, failures=())
        if ended.storing and not (ended.ok and launch.phase is Phase.STOPPING):
            launch.add_storing(node, ended.storing, self._clock())
        if not ended.ok:
            self.stop_or_drop(node)
        if node in launch.dropped:
            self._send_verdict([node], launch.dropped_error(node))
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

    def stop_or_drop(self, node: int) -> None:
        """Stop all because `node` fails; a launch with torchrun's own elasticity goes on while enough are left."""
        launch = self.launch
        if launch.phase is Phase.PAUSING:  # nothing runs, and nothing can start any more
            self.fail(launch.error(self._first_cause(), []))
            return
        wanted = launch.policy.min_nodes
        if wanted is None:  # first, since the rest looks at every node
            self._stop()
            return
        others = [other for other in self.nodes.joined if other != node and other not in launch.dropped]
        if launch.phase is not Phase.RUNNING or CONTROL not in others or len(others) < wanted:
            self._stop()
        elif node not in launch.dropped:
            launch.dropped.add(node)
            cause = launch.cause_of(node)
            self.send(Stop(launch.number, launch.generation, signal=launch.signal_for(cause)), node)
            self.note("dropped", node=node)
            what = f" ({cause.what.splitlines()[0]})" if cause is not None else ""
            text = f"node {node} has dropped out{what}; the launch goes on with {len(others)} nodes"
            self.send(Note(text), *others)

    def _stop(self) -> None:
        launch = self.launch
        if launch.phase not in (Phase.RUNNING, Phase.STORING):
            return
        launch.enter(Phase.STOPPING)
        for node in [node for node in launch.stores if launch.ended[node].ok]:
            del launch.stores[node]  # after a failure, only raised exceptions are stored
        cause = launch.first_cause()
        kind = "" if cause is None else cause.kind
        launch.until = self._clock() + self.rules.stop_s + self.keepers.find_out_s(kind)
        number = launch.signal_for(cause)
        self.note("stopping", text="" if cause is None else summary(cause))
        self.broadcast(Stop(launch.number, launch.generation, reason(cause), teller(cause), number, kind))
        self.decide_if_all_ended()  # without members, no report of an end will come

    def decide_if_all_ended(self) -> None:
        """Decide what follows, once all nodes have reported their end."""
        # This runs for each node's message, thousands of times in a large gang, so the cheap checks come first.
        launch = self.launch
        if launch.phase is Phase.SAVING and not any(self.nodes[node] is NodeState.JOINED for node in launch.stores):
            self.finish(launch.failing_with)
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
        launch, now = self.launch, self._clock()
        silent = [node for node in self.nodes.joined if node not in launch.ended]
        cause = self._first_cause()
        follows = decide(launch, cause, silent, self.nodes.count(NodeState.JOINED) == self.nodes.size, now)
        if follows is Next.FINISH:
            self.finish(None)
        elif follows is Next.MOVE:
            launch.generation += 1
            launch.moves += 1
            self.broadcast(
                Note("another program took the port of the rendezvous; all workers start again with another port")
            )
            self.go()
        elif follows is Next.RESTART and cause is not None:
            self._restart(cause, now)
        else:
            self.fail(launch.error(cause, silent))

    def _restart(self, cause: Cause, now: float) -> None:
        launch = self.launch
        self._record_cause(cause)
        self.history.report(None, cause.describe(), cause.as_dict(), launch.number, launch.generation)
        pause_s = launch.begin_pause(now, min(2.0**launch.restarts, BACKOFF_LIMIT_S))
        self.note("restart", text=f"restart {launch.restarts} of {launch.policy.max_restarts} in {pause_s:g} s")
        self.broadcast(Restart(launch.number, launch.restarts, launch.policy.max_restarts, pause_s, cause))

    def _first_cause(self) -> Cause | None:
        """Return the first failure, with what features have found out about it."""
        cause = self.launch.first_cause()
        detail = "" if cause is None else self.keepers.detail(cause.kind)
        return replace(cause, detail=detail) if cause is not None and detail else cause

    def fail_as_a_whole(self, kind: str, text: str) -> None:
        """Stop the launch for a reason that concerns all nodes, such as a time limit."""
        self.note(kind, text=text)
        cause = Cause(kind, CONTROL, self.nodes.host(CONTROL), exception=text)
        self.launch.add_failures([Failure(cause)], self._clock())
        self._stop()

    def fail(self, error: TorchrunError) -> None:
        """End the launch with an error, after the nodes have stored their outputs."""
        launch = self.launch
        nodes = [node for node in launch.saved_by(error) if self.nodes[node] is NodeState.JOINED]
        now = self._clock()
        # After the step's @timeout the workers may use the grace to end, and storing their outputs as long again.
        within_s = min(SAVE_S, max(launch.deadline - now, self.rules.grace_s))
        if not nodes or within_s <= 0:
            self.finish(error)
            return
        self._record_error(error)
        launch.begin_saving(nodes, error, now, now + within_s + _LIST_S)
        about = (launch.number, launch.generation, error)
        events = of_the_gang(self.events())
        self.send(Save(*about, within_s, events), *nodes)
        self.send(Save(*about, None, events), *(node for node in self.nodes.joined if node not in launch.stores))

    def _record_error(self, error: TorchrunError) -> None:
        if (cause := cause_of(error)) is not None:
            self._record_cause(cause)
        self.report(error, self.launch.number, self.launch.generation)

    def finish(self, error: TorchrunError | None) -> None:
        """End the launch with its verdict; None: all has gone well."""
        launch = self.launch
        if error is not None and launch.phase is not Phase.SAVING:  # else `fail` has recorded it
            self._record_error(error)
        launch.enter(Phase.OVER)
        launch.verdict = error
        launch.stores.clear()  # no node waits for it any more
        if error is None:
            self.note("done")
        else:
            self.note("failed", text=headline(error.message))
        self._send_verdict([node for node in self.nodes.joined if node not in launch.dropped], error)
        self._over(error)

    def _send_verdict(self, nodes: Iterable[int], error: TorchrunError | None) -> None:
        told = self.keepers.verdict
        number = self.launch.number
        for node, verdict in verdicts(
            self.launch, nodes, error, self.events(), lambda to_control: told(number, to_control, error)
        ):
            self.send(verdict, node)

    # --- the history -----------------------------------------------------------------------------

    def events(self) -> tuple[Record, ...]:
        """Return what has happened in the last launch and after it."""
        return self.history.since(self.launch.mark)

    def note(self, kind: Kind | str, **facts: Any) -> None:
        """Add a record about the launch to the history."""
        self.history.note(kind, **{"launch": self.launch.number, "generation": self.launch.generation, **facts})

    def _record_cause(self, cause: Cause) -> None:
        self.note("cause", node=cause.node, rank=cause.rank, exit_code=cause.exit_code, text=summary(cause))

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
        node = rank // (self.launch.nproc or 1)
        return Where(node, rank, self.nodes.host(node))

    def _send_remarks(self) -> None:
        for feature, data in self.keepers.pop_asks():
            if self.launch.phase is Phase.RUNNING:
                self.broadcast(Ask(self.launch.number, self.launch.generation, feature, data))
        for remarks in self.keepers.pop_remarks():
            for each in remarks.happened:
                self.note(**asdict(each))
            for line in remarks.lines:
                self.send(Note(line), CONTROL)
            if remarks.failing is not None and self.launch.phase is Phase.RUNNING:
                self.fail_as_a_whole(remarks.failing.kind, remarks.failing.text)

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
    Started: Course._on_started,
    Wrote: Course._on_wrote,
    Told: Course._on_told,
    Failed: Course._on_failed,
    Ended: Course._on_ended,
    Storing: Course._on_storing,
    Stored: Course._on_stored,
}
