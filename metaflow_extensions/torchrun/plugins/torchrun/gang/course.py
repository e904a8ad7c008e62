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
from .keepers import Failing, Keepers, Where
from .launch import BACKOFF_LIMIT_S, Launch, Next, Phase, decide, reason, summary, teller, verdicts
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
    Restart,
    Started,
    Stop,
    Store,
    Stored,
    Storing,
    Told,
    Wrote,
)
from .texts import counted, headline, names

Outgoing = tuple[int, Message]
"""A node's index and a message for it."""

# How long storing what a failed launch has left may take, and then the index of it. All nodes wait meanwhile, and the
# user pays for them.
SAVE_S = 120.0
_INDEX_S = 15.0


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
            self.fail_with(Failing("timeout", text))
        if launch.phase is Phase.PAUSING and now >= launch.until:
            self.go()
        elif launch.phase is Phase.STOPPING and now > launch.until:
            self._decide()
        elif launch.phase is Phase.SAVING and now > launch.until:
            self.finish(launch.failing_with)
        if launch.phase is Phase.RUNNING:
            self.keepers.tick(self.age_s, self._where)
        self.keepers.overdue(self.age_s)

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
                self.finish(obstacles.too_early(cause, launch.number))
        elif launch.phase is Phase.SAVING:
            self.decide_if_all_ended()
        else:
            self.stop()

    def end_if_commands_failed(self) -> None:
        """End a launch whose commands have failed, once all nodes have called `run`.

        Earlier, the control node could be gone before a late node has heard why.
        """
        launch, cause = self.launch, self.launch.first_cause()
        if cause is not None and len(launch.preparing) + len(launch.ready) == self.nodes.size:
            self.finish(obstacles.commands_failed(cause))

    def first_error(self, error: TorchrunError | None) -> TorchrunError | None:
        """Return with what the launch ends: commands that failed while it gathered were before anything else."""
        launch, cause = self.launch, self.launch.first_cause()
        is_first = launch.phase is Phase.GATHERING and cause is not None and cause.node in launch.without_commands
        return obstacles.commands_failed(cause) if is_first and cause is not None else error

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
            self.fail(launch.error(self._first_cause(), []))
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
        self.note("stopping", text="" if cause is None else summary(cause))
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
            has_all = len(launch.ended) >= self.nodes.count(NodeState.JOINED)
            if has_all and launch.ended.keys() >= set(self.nodes.joined):
                self._decide()

    def _decide(self) -> None:
        """All nodes have ended, or their time is up: success, restart or failure."""
        launch, now = self.launch, self._clock()
        silent = [node for node in self.nodes.joined if node not in launch.ended]
        cause = self._first_cause()
        follows = decide(launch, cause, silent, self.nodes.count(NodeState.JOINED) == self.nodes.size, now)
        if follows is Next.FINISH:
            self._store(None)
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
        self.broadcast(Store(launch.number, launch.generation, error, within_s, events))

    def _record_error(self, error: TorchrunError) -> None:
        if (cause := cause_of(error)) is not None:
            self._record_cause(cause)
        self.report(error, self.launch.number, self.launch.generation)

    def finish(self, error: TorchrunError | None) -> None:
        """End the launch with its verdict; None: all has gone well."""
        launch, error = self.launch, self.first_error(error)
        if error is not None and launch.phase is not Phase.SAVING:  # else `fail` has recorded it
            self._record_error(error)
        launch.enter(Phase.OVER)
        launch.verdict = error
        launch.stores.clear()  # no node waits for it any more
        if error is None:
            self.note("done")
        else:
            self.note("failed", text=headline(error.message))
        told, number = self.keepers.verdict, launch.number
        for node, verdict in verdicts(
            launch, self.nodes.joined, error, self.events(), lambda to_control: told(number, to_control, error)
        ):
            self.send(verdict, node)
        self._over(error)

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
