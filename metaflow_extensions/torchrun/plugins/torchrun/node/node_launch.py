"""One launch on one node: obeys the gang, watches the agent, reports to the gang.

`NodeLaunch.run` reports *ready*, obeys *go*, *stop* and the *verdict*, and reports what happens to the workers.
Everything that it waits for arrives in one queue, the launch's inbox: the gang's messages, the agent's events, and what
the task says. A table says what is done with each in which `Phase`, and `phases.NEXT` which phase may follow.
"""

from __future__ import annotations

import asyncio
import inspect
import shlex
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from ..errors import LaunchFailed, TorchrunError, TorchrunPreempted
from ..events import Event, Kind
from ..gang.cause import Cause, Failure, cause_of
from ..gang.endings import Interruption, TimedOut
from ..gang.protocol import (
    CONTROL,
    Ask,
    Ended,
    Failed,
    Go,
    Prepares,
    Ready,
    Restart,
    Started,
    Stop,
    Store,
    Verdict,
    Wrote,
)
from ..gang.seat import GivenUp, Seat
from .agent import AgentProcess
from .agent_end import AGENT_NAME
from .agent_events import End, Refused
from .commands import CommandNews, Commands, send_failure
from .generation import Generation
from .headlines import alone_line, end_line, facts_line, say_left
from .outcome import Outcome
from .phases import LIVING, Life, Phase
from .plan import Plan
from .start import AgentNews, prepare

_LOOK_S = 0.5  # the longest wait for news before the features are polled


@dataclass(frozen=True)
class Completed:
    """The plan after its commands, which may have made the entrypoint, or installed torch; it goes to the inbox."""

    plan: Plan


class NodeLaunch:
    """One launch on one node; an agent other than `AgentProcess` is for tests.

    `complete` asks the task for `Completed`. `store` has it store what the workers have left, and answer the gang;
    without an argument, it gives that up.
    """

    def __init__(
        self,
        plan: Plan,
        member: Seat,
        launch: int,
        complete: Callable[[], None],
        store: Callable[[Store | None], None],
        new_agent: Callable[..., AgentProcess] = AgentProcess,
    ) -> None:
        self._plan = plan
        self._member = member
        self._new_agent = new_agent
        self._complete, self._store = complete, store
        self._commands: Commands | None = None  # while they run
        self._launch = launch
        self.life = Life()
        self._generation: Generation | None = None  # the latest; see `_living`
        self._failing_with: TorchrunError | None = None  # the error that *store* has announced for the verdict
        self._verdict: Verdict | None = None
        self._is_preempted = False
        self._went_at: float | None = None
        self._restarts: list[dict[str, Any]] = []

    async def run(self) -> Outcome:
        """Run the launch to its end on all nodes, and return that; raise what ends it here without a verdict."""
        try:
            self._member.begin_launch()
            self._begin()
            while self._verdict is None:
                await self._handle(await self._next())
                self._send_told()
            await self._say_end(self._verdict.error)
        except BaseException as error:
            await self._give_up(error)
            raise
        if self._verdict.error is not None:
            await self._give_up(self._verdict.error)
        else:
            self.life.enter(Phase.OVER)
            self._plan.prepare_warm()
        generation = self._generation
        return Outcome(
            self._verdict,
            "" if generation is None else shlex.join(generation.command),
            {} if generation is None else generation.exits.codes,
            tuple(self._restarts),
            0.0 if self._went_at is None else time.monotonic() - self._went_at,
        )

    def _begin(self) -> None:
        """Report *ready*, or begin with the commands of before_run."""
        if not self._plan.commands:
            self._send_ready()
            return
        self.life.enter(Phase.PREPARING)
        self._member.send(Prepares(self._launch, self._plan.spec.nproc))
        try:
            self._commands = Commands(self._plan, self._member, self._launch, self._new_agent)
            self._commands.start()
        except Exception as error:
            text = f"before_run could not be started: {_reason(error)}"
            cause = Cause("agent", self._member.node, self._member.host, exception=text)
            send_failure(self._member, self._launch, cause)

    def _send_ready(self) -> None:
        self.life.enter(Phase.READY)
        spec, plan = self._plan.spec, self._plan
        policy = plan.policy if self._member.node == CONTROL else None
        facts, port = dict(plan.facts), spec.master_port
        self._member.send(Ready(self._launch, spec.nproc, spec.digest(), facts, port, policy))

    async def _next(self) -> Any:
        """Return the next news, or None if none has come for `_LOOK_S` seconds."""
        try:
            return await asyncio.wait_for(self._member.inbox.get(), _LOOK_S)
        except asyncio.TimeoutError:
            return None

    def _send_told(self) -> None:
        """Poll the commands and the features, and send what they hand out."""
        if self._commands is not None:
            self._commands.send_ended()
        generation = self._living
        if generation is None:
            return
        told = generation.watchers.poll()  # also while they are stopped, and perhaps save
        if generation.watchers.saw_workers_at is not None and self.life.phase is Phase.RUNNING:
            self._say_started(generation)
        for each in told:
            self._member.send(each)

    @property
    def _living(self) -> Generation | None:
        """The generation that has begun and has not ended."""
        return self._generation if self.life.phase in LIVING else None

    async def _handle(self, news: Any) -> None:
        if isinstance(news, Go | Ask | Stop | Restart | Store | Verdict) and news.launch != self._launch:
            return  # late news of a launch that the step's code gave up
        do = HANDLERS[type(news)].get(self.life.phase)  # else it is late, or about what this node does not have
        done = None if do is None else do(self, news)
        if inspect.isawaitable(done):
            await done

    # --- what the gang decides --------------------------------------------------------------------

    async def _on_go(self, go: Go) -> None:
        if self._went_at is None:
            self._went_at = time.monotonic()
        self.life.enter(Phase.STARTING)
        self._generation = None
        try:
            self._generation = generation = prepare(self._plan, go, self._member, self._new_agent, self.life)
            self._say_begin(go, generation)
            generation.start()
        except Exception as error:  # a full disk, no more processes, a zero byte in a variable
            await self._could_not_start(go, error)

    def _say_begin(self, go: Go, generation: Generation) -> None:
        if self._member.node == CONTROL and go.generation == 0:
            self._emit("facts", facts_line(self._plan, go))
        self._emit("command", f"runs: {shlex.join(generation.command)}", is_detail=True)

    async def _say_end(self, error: TorchrunError | None) -> None:
        await self._member.settle_lines()  # first write the lines of the other nodes' workers
        if self._member.node == CONTROL and self._went_at is not None:
            seconds = time.monotonic() - self._went_at
            text = end_line(self._launch, self._plan.spec, seconds, len(self._restarts), error)
            self._emit("ended", text)
            if self._verdict is not None and self._verdict.alone:
                self._emit("note", alone_line(self._launch, self._plan))

    async def _could_not_start(self, go: Go, error: Exception) -> None:
        await self._close_generation(0.0)
        text = f"its {AGENT_NAME} could not be started: {_reason(error)}"
        self._emit("worker_failed", f"{text}; stopping all nodes")
        failure = Failure(Cause("agent", self._member.node, self._member.host, exception=text))
        self._member.send(Ended(self._launch, False, go.generation, (failure,), stores=self._plan.stores))

    async def _on_stop(self, stop: Stop) -> None:
        self._say_why_it_stops(stop)
        if (generation := self._living) is not None:
            for told in await generation.watchers.before_stop(stop.kind):
                self._member.send(told)
            generation.stop(stop.signal)

    def _say_why_it_stops(self, stop: Stop) -> None:
        # Then another node has logged the reason in this terminal.
        is_told = stop.teller != CONTROL and self._plan.shares_machine
        if self._member.node == CONTROL and stop.because and not is_told:
            self._emit("stopping", f"{stop.because}; stopping all nodes")

    def _on_ask(self, ask: Ask) -> None:
        generation = self._living
        if generation is not None and generation.number == ask.generation:
            generation.watchers.asked(ask.feature, ask.data)

    def _on_restart(self, restart: Restart) -> None:
        cause = restart.cause
        self._restarts.append({"generation": restart.number, "cause": cause.as_dict()})
        text = (
            f"restart {restart.number} of {restart.of}: all workers start again in {restart.pause_s:g} s, "
            f"because {cause.who[0].lower()}{cause.who[1:]} {cause.what}"
        )
        self._emit("restart", text)

    def _on_store(self, store: Store) -> None:
        self._keep_error(store)
        self.life.enter(Phase.STORING)
        self._store(store)

    def _keep_error(self, store: Store) -> None:
        """Do no more where workers have not ended in time, so that nobody waits for this node."""
        if store.error is not None:
            self._failing_with = store.error
            store.error.events = [event.as_dict() for event in store.events]

    def _on_verdict(self, verdict: Verdict) -> None:
        self._verdict = verdict
        if verdict.error is not None:
            self._say_why_commands_end(verdict.error)

    # --- what interrupts this node ----------------------------------------------------------------

    def _on_interruption(self, interruption: Interruption) -> None:
        """End the launch here; no worker has to be stopped before."""
        if interruption is Interruption.BROKEN:
            assert self._member.broken is not None
            # If the control node was lost after it had sent *store*, the error there came first.
            raise self._failing_with or self._member.broken
        raise self._member.terminated()

    def _on_interruption_of_workers(self, interruption: Interruption) -> None:
        if interruption is Interruption.BROKEN or self._is_preempted:  # a second order means: end at once
            self._on_interruption(interruption)
        self._is_preempted = True
        error = self._member.terminated()
        what = self._member.cause_of(error).what
        self._emit("stopping", f"{what}; stopping all nodes")
        self._report(error)

    def _on_timed_out(self, news: TimedOut) -> None:
        raise self._member.timed_out(news.text)

    def _on_timed_out_workers(self, news: TimedOut) -> None:
        self._report(self._member.timed_out(news.text))

    def _on_given_up(self, news: GivenUp) -> None:
        raise news

    def _report(self, error: BaseException, given_up: bool = False) -> None:
        """Report this node's failure to the gang, unless it knows; the launch goes on until the verdict."""
        if not self._member.gang_knows(error):
            failure = Failure(self._member.cause_of(error))
            self._member.send(Failed(self._launch, failures=(failure,), given_up=given_up))

    # --- what happens to the commands of before_run -----------------------------------------------

    async def _on_command_news(self, news: CommandNews) -> None:
        if self._commands is not None and self._commands.handle(news.event):
            await self._close_commands(0.0)
            self.life.enter(Phase.COMPLETING)
            self._complete()

    def _on_completed(self, news: Completed) -> None:
        self._plan = news.plan
        self._send_ready()

    def _say_why_commands_end(self, error: TorchrunError) -> None:
        """Log why the commands are stopped, unless this node or another one in this terminal has logged it."""
        cause, is_logged = cause_of(error), self._plan.shares_machine
        if self._commands is not None and cause is not None and cause.node != self._member.node and not is_logged:
            self._emit("stopping", f"{cause.who} {cause.what}; stopping before_run")

    async def _close_commands(self, grace_s: float) -> None:
        commands, self._commands = self._commands, None
        if commands is not None:
            await commands.close(grace_s)

    # --- what happens to the workers --------------------------------------------------------------

    async def _on_agent_news(self, news: AgentNews) -> None:
        generation = self._living
        if generation is None or generation.number != news.generation:
            return
        failed = generation.handle(news.event)
        if isinstance(news.event, Refused):
            self._emit("note", f"torchrun starts cold: {news.event.reason}")
        if generation.all_run:
            self._say_started(generation)
        if failed is not None:
            self._fail(generation, failed)
        if isinstance(news.event, End):
            await self._generation_ended(generation, news.event)

    def _on_quiet(self, _: None) -> None:
        """Check what causes no event: the workers' first output."""
        if (generation := self._living) is not None:
            self._say_output(generation)

    def _fail(self, generation: Generation, what: str) -> None:
        """Report a failure on this node at once, and stop its workers."""
        self._emit("worker_failed", f"{what}; stopping all nodes")
        self._member.send(Failed(self._launch, generation.number, generation.failures()))
        generation.stop()

    def _say_started(self, generation: Generation) -> None:
        """Report to the gang, once, that all workers of this node run."""
        if not generation.said_started:
            generation.said_started = True
            self._member.send(Started(self._launch, generation.number))
            if generation.go.restarts < generation.go.max_restarts:
                self._plan.prepare_warm()

    def _say_output(self, generation: Generation) -> None:
        """Report to the gang, once, that workers of this node have written."""
        if generation.active_at is not None:
            self._say_started(generation)
            if not generation.said_output:
                generation.said_output = True
                self._member.send(Wrote(self._launch, generation.number))

    async def _generation_ended(self, generation: Generation, end: End) -> None:
        told = generation.watchers.ended()
        await generation.close()
        for each in told:
            self._member.send(each)
        if not generation.was_stopped:
            self._say_output(generation)
        say_left(self._member, end, "workers")
        message = Ended(
            self._launch,
            generation.ended_well,
            generation.number,
            generation.failures(),
            exit_codes=generation.exits.codes,
            stores=self._plan.stores,
            alone=self._trained_alone(generation),
        )
        self._member.send(message)
        generation.remove_files()

    def _trained_alone(self, generation: Generation) -> bool:
        """Return whether every rank has trained by itself, unless the call means that, as by gathering values."""
        plan = self._plan
        is_meant = plan.may_train_alone or plan.spec.world_size == 1
        return generation.ended_well and not is_meant and generation.exits.trained_alone()

    # --- the end ----------------------------------------------------------------------------------

    async def _give_up(self, error: BaseException) -> None:
        """Report to the gang, unless it has decided; then stop everything here."""
        if self._verdict is None:
            self._report(error, given_up=True)
        self._give_up_upload()
        await self._close_commands(self._plan.grace_s)
        await self._close_generation(self._plan.grace_s)
        if isinstance(error, LaunchFailed) and not isinstance(error, TorchrunPreempted):  # the step may go on
            self._plan.prepare_warm()
        if self._verdict is None:
            # Without a generation: other nodes may be in one that this node has not got *go* for.
            self._member.send(Ended(self._launch, ok=False))
        self.life.enter(Phase.OVER)

    def _give_up_upload(self, _: Stop | None = None) -> None:
        if self.life.phase is Phase.STORING:
            self.life.enter(Phase.ENDED)
            self._store(None)

    async def _close_generation(self, grace_s: float) -> None:
        if (generation := self._living) is not None:
            try:
                await generation.close(grace_s)
            finally:
                generation.remove_files()
        elif self.life.phase is Phase.STARTING:  # it could not be made
            self.life.enter(Phase.ENDED)

    def _emit(self, kind: Kind, text: str, is_detail: bool = False) -> None:
        self._member.emit(Event(kind, self._member.node, text, is_detail))


_Handler: TypeAlias = "Callable[[NodeLaunch, Any], Awaitable[None] | None]"


def _in(phases: Iterable[Phase], handler: _Handler) -> dict[Phase, _Handler]:
    return dict.fromkeys(phases, handler)


_WITH_WORKERS = (Phase.RUNNING, Phase.STOPPING)
_WITHOUT_WORKERS = [phase for phase in Phase if phase not in _WITH_WORKERS]

HANDLERS: dict[type, dict[Phase, _Handler]] = {
    Go: _in((Phase.READY, Phase.ENDED), NodeLaunch._on_go),
    Ask: _in(_WITH_WORKERS, NodeLaunch._on_ask),
    Stop: {
        Phase.RUNNING: NodeLaunch._on_stop,
        Phase.STOPPING: NodeLaunch._say_why_it_stops,
        Phase.STORING: NodeLaunch._give_up_upload,
    },
    Restart: _in(Phase, NodeLaunch._on_restart),
    Store: _in(Phase, NodeLaunch._keep_error) | _in((Phase.ENDED, Phase.STORING), NodeLaunch._on_store),
    Verdict: _in(Phase, NodeLaunch._on_verdict),
    CommandNews: _in((Phase.PREPARING,), NodeLaunch._on_command_news),
    Completed: _in((Phase.COMPLETING,), NodeLaunch._on_completed),
    AgentNews: _in(_WITH_WORKERS, NodeLaunch._on_agent_news),
    type(None): _in((Phase.RUNNING,), NodeLaunch._on_quiet),
    Interruption: _in(_WITHOUT_WORKERS, NodeLaunch._on_interruption)
    | _in(_WITH_WORKERS, NodeLaunch._on_interruption_of_workers),
    TimedOut: _in(_WITHOUT_WORKERS, NodeLaunch._on_timed_out) | _in(_WITH_WORKERS, NodeLaunch._on_timed_out_workers),
    GivenUp: _in(Phase, NodeLaunch._on_given_up),
}
"""What is done with each news in each phase; where there is nothing, it is late or about what this node does not have."""


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
