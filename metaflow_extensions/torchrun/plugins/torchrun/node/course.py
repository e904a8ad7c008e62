"""One launch on one node, from the call of `run` to its end: what follows on each news. Pure.

`NodeCourse` reports *ready*, obeys *go*, *stop* and the *verdict*, and reports what happens to the workers. News and the
clock go in, effects come out (`news`); `node_launch` carries them out. A table says what is done with each news in which
`Phase`, and `phases.NEXT` which phase may follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeAlias

from ..errors import LaunchFailed, TorchrunError, TorchrunPreempted
from ..events import Event, Kind
from ..gang.cause import Cause, Failure, FailureText, cause_of
from ..gang.failures import change_of_nodes
from ..gang.messages import (
    CONTROL,
    Ask,
    Ended,
    Failed,
    Go,
    Ready,
    Report,
    Restart,
    Stop,
    Store,
    Verdict,
)
from ..gang.texts import headline, names
from ..gang.view import as_dicts
from .agent_end import AGENT_NAME
from .endings import Broken, GivenUp, MustEnd, TimedOut, preempted, timed_out
from .headlines import alone_line, details_line, end_line, start_line
from .news import Begun, Called, Completed, Crashed, Do, Effect, News, NotBegun, Prepared, Seen, WorkersEnded
from .outcome import Outcome
from .phases import LIVING, NEXT, Phase
from .plan import Plan


class NodeCourse:
    """The state machine of one launch on one node."""

    def __init__(self, plan: Plan, launch: int, node: int, host: str) -> None:
        self.plan = plan
        self.phase = Phase.BEGINNING
        self._launch, self._node, self._host = launch, node, host
        self._went_at: float | None = None  # when the first generation began
        self._restarts: list[dict[str, Any]] = []
        self._go = Go(launch, -1, 0, "", 0, 0)  # of the latest generation, as are the next four; there is none yet
        self._command = ""
        self._said_started = self._said_output = False  # whether *started* and *wrote* were sent
        self._exit_codes: dict[int, int] = {}
        self._is_preempted = False
        self._failing_with: TorchrunError | None = None  # the error that *store* has announced for the verdict
        self._now = 0.0
        self._out: list[Effect] = []

    def handle(self, news: News, now: float) -> list[Effect]:
        """Return what is to be done for news at the time `now`, in this order.

        An answer to an effect is to be handled before the next effect is carried out.
        """
        self._now, self._out = now, []
        if isinstance(news, Go | Ask | Stop | Restart | Store | Verdict) and news.launch != self._launch:
            return []  # late news of a launch that the step's code gave up
        do = HANDLERS[type(news)].get(self.phase)
        if do is not None:
            do(self, news)
        return self._out

    def _enter(self, phase: Phase) -> None:
        assert phase in NEXT[self.phase], f"a node can't go from {self.phase.name} to {phase.name}"
        self.phase = phase

    def _do(self, *effects: Effect) -> None:
        self._out += effects

    def _say(self, kind: Kind, text: str, is_detail: bool = False) -> None:
        self._out.append(Event(kind, self._node, text, is_detail))

    # --- until it is ready ------------------------------------------------------------------------

    def _on_called(self, called: Called) -> None:
        if called.broken is not None:
            self._end(called.broken)
        elif not self.plan.commands:
            self._send_ready()
        else:
            self._enter(Phase.PREPARING)
            self._do(Ready(self._launch, self.plan.spec.nproc, prepares=True), Do.START_COMMANDS)

    def _send_ready(self) -> None:
        self._enter(Phase.READY)
        spec, plan = self.plan.spec, self.plan
        policy = plan.policy if self._node == CONTROL else None
        self._do(Ready(self._launch, spec.nproc, spec.digest(), dict(plan.facts), spec.master_port, policy))

    def _on_commands(self, seen: Seen) -> None:
        self._do(*seen.told)  # after a failure the gang would not heed it
        if seen.failed:  # the gang's verdict is the error
            self._say("worker_failed", f"{seen.failed}; no worker starts on any node")
            self._do(Failed(self._launch, failures=seen.failures))
        if seen.is_over:
            self._enter(Phase.COMPLETING)
            self._do(Do.CLOSE_NOW, Do.COMPLETE)

    def _commands_not_begun(self, news: NotBegun) -> None:
        text = f"before_run could not be started: {news.why}"
        self._on_commands(Seen(failed=text, failures=(self._no_agent(text),)))

    def _no_agent(self, text: str) -> Failure:
        return Failure(Cause("agent", self._node, self._host, exception=text))

    def _on_completed(self, news: Completed) -> None:
        self.plan = news.plan
        self._send_ready()

    # --- what the gang decides --------------------------------------------------------------------

    def _on_go(self, go: Go) -> None:
        if self._went_at is None:
            self._went_at = self._now
        if self._restarts and (go.left or go.came):
            self._restarts[-1] |= {"left": list(go.left), "came": list(go.came)}
            self._say_of_restart(change_of_nodes(go.left, go.came, 0 if go.group is None else go.group.size))
        if go.group is not None:
            self.plan = replace(self.plan, spec=replace(self.plan.spec, group=go.group))
        self._command, self._exit_codes = "", {}
        if self.plan.spec.group_rank is None:  # this node waits
            return
        self._go = go
        self._said_started = self._said_output = False
        self._enter(Phase.STARTING)
        self._do(go)

    def _on_stop(self, stop: Stop) -> None:
        self._say_why_it_stops(stop)
        self._enter(Phase.STOPPING)
        self._do(stop)

    def _say_why_it_stops(self, stop: Stop) -> None:
        # Then another node has logged the reason in this terminal.
        is_told = stop.teller != CONTROL and self.plan.shares_machine
        if self._node == CONTROL and stop.because and not is_told:
            self._say("stopping", f"{stop.because}; stopping all nodes")

    def _on_ask(self, ask: Ask) -> None:
        if ask.generation == self._go.generation:
            self._do(ask)

    def _on_restart(self, restart: Restart) -> None:
        cause, waits_for = restart.cause, restart.waits_for
        self._restarts.append({"generation": restart.number, "cause": cause.as_dict(), "left": [], "came": []})
        has = "has" if len(waits_for) == 1 else "have"
        when = f" in {restart.pause_s:g} s" if restart.pause_s else ""
        when = f" when {names(waits_for)} {has} started again" if waits_for else when
        is_counted = cause.category != "preempted"  # `max_restarts` does not count others
        which = f"restart {restart.counted} of {restart.of}: " if is_counted else ""
        why = f"because {FailureText(cause).who} {headline(cause.what)}"
        self._say_of_restart(f"{which}all workers start again{when}, {why}")

    def _say_of_restart(self, text: str) -> None:
        if self._node == CONTROL or not self.plan.shares_machine:  # else the control node says it in this terminal
            self._say("restart", text)

    def _on_store(self, store: Store) -> None:
        self._keep_error(store)
        self._enter(Phase.STORING)
        self._do(store)

    def _keep_error(self, store: Store) -> None:
        """Do no more where workers have not ended in time, so that nobody waits for this node."""
        if store.error is not None:
            self._failing_with = store.error
            store.error.events = as_dicts(store.events)

    def _on_verdict(self, verdict: Verdict) -> None:
        cause, is_logged = cause_of(verdict.error), self.plan.shares_machine  # by another node in this terminal
        if self.phase is Phase.PREPARING and cause is not None and cause.node != self._node and not is_logged:
            self._say("stopping", f"{cause.who} {cause.what}; stopping before_run")
        seconds = 0.0 if self._went_at is None else self._now - self._went_at
        if self._node == CONTROL and self._went_at is not None:
            self._say("ended", end_line(self._launch, self.plan.spec, seconds, self._go.restarts, verdict.error))
            if verdict.alone:
                self._say("note", alone_line(self._launch, self.plan))
        self._end(Outcome(verdict, self._command, self._exit_codes, tuple(self._restarts), seconds))

    # --- what interrupts this node ----------------------------------------------------------------

    def _on_broken(self, broken: Broken) -> None:
        # If the control node was lost after it had sent *store*, the error there came first.
        if self._failing_with is None:
            self._end(broken.error)
        else:
            self._fail_here(self._failing_with)

    def _preempted(self, order: MustEnd) -> TorchrunPreempted:
        may_go_on = self._node != CONTROL and self.plan.policy.max_restarts > 0
        return preempted(self._node, self._host, order.why, may_go_on)

    def _on_must_end(self, order: MustEnd) -> None:
        """End the launch here, at once."""
        self._fail_here(self._preempted(order))

    def _on_must_end_workers(self, order: MustEnd) -> None:
        if self._is_preempted:  # a second order means: end at once
            self._on_must_end(order)
            return
        self._is_preempted = True
        cause = self._cause_of(self._preempted(order))
        self._say("stopping", f"{cause.what}; stopping all nodes")
        self._report(cause)  # and go on until the verdict

    def _on_timed_out(self, news: TimedOut) -> None:
        self._fail_here(timed_out(self._node, self._host, news.text))

    def _on_timed_out_workers(self, news: TimedOut) -> None:
        self._report(self._cause_of(timed_out(self._node, self._host, news.text)))

    def _on_given_up(self, news: GivenUp) -> None:
        self._end(news, news.cause)

    def _on_crashed(self, news: Crashed) -> None:
        self._fail_here(news.error)

    def _report(self, cause: Cause, given_up: bool = False) -> None:
        self._do(Failed(self._launch, failures=(Failure(cause),), given_up=given_up))

    def _cause_of(self, error: BaseException) -> Cause:
        found = cause_of(error) if isinstance(error, TorchrunError) else None
        return found or Cause("call", self._node, self._host, exception=str(error))

    # --- what happens to the workers --------------------------------------------------------------

    def _on_prepared(self, news: Prepared) -> None:
        self._command = news.command
        if self._node == CONTROL and self._go.generation == 0:
            self._say("facts", start_line(self.plan, self._go))
            self._say("chosen", details_line(self.plan, self._go), is_detail=True)
        self._say("command", f"runs: {news.command}", is_detail=True)
        self._do(Do.START)

    def _on_begun(self, _: Begun) -> None:
        self._enter(Phase.RUNNING)

    def _not_begun(self, news: NotBegun) -> None:
        self._enter(Phase.ENDED)
        self._do(Do.CLOSE_NOW)
        text = f"its {AGENT_NAME} could not be started: {news.why}"
        self._say("worker_failed", f"{text}; stopping all nodes")
        self._do(Ended(self._launch, False, self._go.generation, (self._no_agent(text),), stores=self.plan.stores))

    def _on_workers(self, seen: Seen) -> None:
        if seen.all_run:
            self._say_started()
        if seen.has_written:
            self._say_output()
        self._do(*seen.told)
        if seen.failed and self.phase is Phase.RUNNING:
            self._say("worker_failed", f"{seen.failed}; stopping all nodes")
            self._do(Failed(self._launch, self._go.generation, seen.failures), Do.STOP)
            self._enter(Phase.STOPPING)
        if seen.is_over:
            self._do(Do.FINISH)

    def _say_started(self) -> None:
        """Report to the gang, once, that all workers of this node run."""
        if not self._said_started:
            self._said_started = True
            self._do(Report("started", self._launch, self._go.generation))
            if self._go.restarts < self._go.max_restarts:
                self._do(Do.PREPARE_WARM)

    def _say_output(self) -> None:
        """Report to the gang, once, that workers of this node have written, unless they are being stopped."""
        if self.phase is not Phase.RUNNING:
            return
        self._say_started()
        if not self._said_output:
            self._said_output = True
            self._do(Report("wrote", self._launch, self._go.generation))

    def _on_workers_ended(self, news: WorkersEnded) -> None:
        self._do(*news.told)
        if news.has_written:
            self._say_output()
        self._exit_codes = news.ended.exit_codes
        self._enter(Phase.ENDED)
        self._do(news.ended, Do.CLOSE_NOW)

    # --- the end ----------------------------------------------------------------------------------

    def _fail_here(self, error: BaseException) -> None:
        """End the launch here with an error that the gang does not know."""
        self._end(error, self._cause_of(error))

    def _end(self, end: Outcome | BaseException, cause: Cause | None = None) -> None:
        """Stop everything here; report it to the gang, unless that has decided."""
        error = end.verdict.error if isinstance(end, Outcome) else end
        if cause is not None:
            self._report(cause, given_up=True)
        if error is not None:
            self._give_up_upload()
        if self.phase is Phase.PREPARING or self.phase in LIVING:
            self._do(Do.CLOSE)
        if self.phase in LIVING:
            self._enter(Phase.ENDED)
        if error is None or (isinstance(error, LaunchFailed) and not isinstance(error, TorchrunPreempted)):
            self._do(Do.PREPARE_WARM)  # the step may go on
        if not isinstance(end, Outcome):
            # Without a generation: other nodes may be in one that this node has not got *go* for.
            self._do(Ended(self._launch, ok=False))
        self._enter(Phase.OVER)
        self._do(end)

    def _give_up_upload(self, _: Stop | None = None) -> None:
        if self.phase is Phase.STORING:
            self._enter(Phase.ENDED)
            self._do(Do.GIVE_UP_STORING)


_Handler: TypeAlias = "Callable[[NodeCourse, Any], None]"


def _in(phases: Iterable[Phase], handler: _Handler) -> dict[Phase, _Handler]:
    return dict.fromkeys(phases, handler)


_NOT_OVER = [phase for phase in Phase if phase is not Phase.OVER]
_WITH_WORKERS = (Phase.RUNNING, Phase.STOPPING)
_WITHOUT_WORKERS = [phase for phase in _NOT_OVER if phase not in _WITH_WORKERS]

HANDLERS: dict[type, dict[Phase, _Handler]] = {
    Called: _in((Phase.BEGINNING,), NodeCourse._on_called),
    Completed: _in((Phase.COMPLETING,), NodeCourse._on_completed),
    NotBegun: {Phase.PREPARING: NodeCourse._commands_not_begun, Phase.STARTING: NodeCourse._not_begun},
    Go: _in((Phase.READY, Phase.ENDED), NodeCourse._on_go),
    Prepared: _in((Phase.STARTING,), NodeCourse._on_prepared),
    Begun: _in((Phase.STARTING,), NodeCourse._on_begun),
    Seen: {Phase.PREPARING: NodeCourse._on_commands} | _in(_WITH_WORKERS, NodeCourse._on_workers),
    WorkersEnded: _in(_WITH_WORKERS, NodeCourse._on_workers_ended),
    Ask: _in(_WITH_WORKERS, NodeCourse._on_ask),
    Stop: {
        Phase.RUNNING: NodeCourse._on_stop,
        Phase.STOPPING: NodeCourse._say_why_it_stops,
        Phase.STORING: NodeCourse._give_up_upload,
    },
    Restart: _in(_NOT_OVER, NodeCourse._on_restart),
    Store: _in(_NOT_OVER, NodeCourse._keep_error) | _in((Phase.ENDED, Phase.STORING), NodeCourse._on_store),
    Verdict: _in(_NOT_OVER, NodeCourse._on_verdict),
    Broken: _in(_NOT_OVER, NodeCourse._on_broken),
    MustEnd: _in(_WITHOUT_WORKERS, NodeCourse._on_must_end) | _in(_WITH_WORKERS, NodeCourse._on_must_end_workers),
    TimedOut: _in(_WITHOUT_WORKERS, NodeCourse._on_timed_out) | _in(_WITH_WORKERS, NodeCourse._on_timed_out_workers),
    GivenUp: _in(_NOT_OVER, NodeCourse._on_given_up),
    Crashed: _in(_NOT_OVER, NodeCourse._on_crashed),
}
"""What is done with each news in each phase; where there is nothing, it is late or about what this node does not have."""
