"""One launch on one node, from the call of `run` to its outcome: read `NodeLaunch.run` from top to bottom.

All that it waits for comes in one queue, the seat's inbox: what the gang says, what the agent does, what interrupts this
node. Each wait is `_next`, which raises what ends the launch here. What runs then is stopped and reaped on the way out.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

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
    Message,
    Ready,
    Report,
    Restart,
    Stop,
    Store,
    Verdict,
)
from ..gang.texts import headline, names
from ..machine.aside import Aside
from .agent import AgentProcess
from .agent_end import AGENT_NAME
from .agent_events import AgentNews
from .call import Call, Outcome
from .commands import Commands
from .endings import Broken, GivenUp, MustEnd, TimedOut, preempted, timed_out
from .generation import Generation
from .headlines import alone_line, details_line, end_line, start_line
from .pipes import Write
from .seat import Seat
from .start import prepare
from .warm import WarmNode

_START_S = 120.0  # for the disk of TMPDIR: a server of files may start again meanwhile


@dataclass(frozen=True)
class Tools:
    """What the launches of one node are run with."""

    write: Write  # writes the workers' output
    complete: Callable[[], None]  # asks the task for the call after its commands; it comes as a `Call`
    store: Callable[[Store | None], None]  # has the task store what the workers have left, or give that up
    warm: WarmNode | None = None
    new_agent: Callable[..., AgentProcess] = AgentProcess  # another one is for tests


class _Over(Exception):
    """The gang has decided."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__("the launch is over")
        self.outcome = outcome


class NodeLaunch:
    """One launch on one node."""

    def __init__(self, call: Call, seat: Seat, launch: int, tools: Tools) -> None:
        self._call, self._seat, self._launch, self._tools = call, seat, launch, tools
        self._node = seat.node
        self._went_at: float | None = None  # when the first generation began
        self._restarts: list[dict[str, Any]] = []
        self._go = Go(launch, -1, 0, "", 0, 0)  # of the last generation here, as are the next three
        self._command = ""
        self._exit_codes: dict[int, int] = {}
        self._said: set[str] = set()  # which reports were sent
        self._is_preempted = self._stores = False
        self._failing_with: TorchrunError | None = None  # the error that *store* has announced for the verdict
        self.interruptions = 0  # how many it has handled

    async def run(self) -> Outcome:
        """Run the launch to its end on all nodes, and return that; raise what ends it here without a verdict."""
        self._seat.begin_launch()
        try:
            if self._seat.broken is not None:
                raise self._seat.broken
            if self._call.before_run:
                await self._run_commands()
            self._send_ready()
            while True:
                news = await self._next()
                if isinstance(news, Go):
                    await self._run_generation(news)
                elif isinstance(news, Store) and self._go.generation >= 0:
                    self._stores = True
                    self._tools.store(news)
                elif isinstance(news, Stop):
                    self._give_up_storing()
        except _Over as over:
            self._end(over.outcome.verdict.error)
            return over.outcome
        except BaseException as error:
            if not isinstance(error, TorchrunError | GivenUp):  # a bug of ours
                self._report(Cause("call", self._node, self._seat.host, exception=str(error)), given_up=True)
            self._end(error)
            # Without a generation: other nodes may be in one that this node has not got *go* for.
            self._send(Ended(self._launch, ok=False))
            raise

    def _end(self, error: BaseException | None) -> None:
        if error is not None:
            self._give_up_storing()
        if error is None or (isinstance(error, LaunchFailed) and not isinstance(error, TorchrunPreempted)):
            self._prepare_warm()  # the step may go on

    def _give_up_storing(self) -> None:
        if self._stores:
            self._stores = False
            self._tools.store(None)

    def _prepare_warm(self) -> None:
        """Prepare a spare for the next agent of this step: of a restart, or of the next launch."""
        if self._tools.warm is not None and self._call.warm != "off":
            self._tools.warm.prepare()

    # --- what is said -----------------------------------------------------------------------------

    def _send(self, *told: Message | Event) -> None:
        """Send messages to the control node; an event is written to the log."""
        for each in told:
            if isinstance(each, Event):
                self._seat.emit(each)
            else:
                self._seat.link.send(each)

    def _say(self, kind: Kind, text: str, is_detail: bool = False) -> None:
        self._send(Event(kind, self._node, text, is_detail))

    def _report(self, cause: Cause, given_up: bool = False) -> None:
        self._send(Failed(self._launch, failures=(Failure(cause),), given_up=given_up))

    # --- the wait ---------------------------------------------------------------------------------

    async def _next(self, with_workers: bool = False) -> Any:
        """Return what comes next, or None when it is time to look at what no news tells; raise what ends the launch here.

        An order to end, and the end of the step's time, leave it to the gang where workers run.
        """
        news = await self._seat.next()
        if isinstance(news, Go | Ask | Stop | Restart | Store | Verdict) and news.launch != self._launch:
            return None  # late news of a launch that the step's code gave up
        match news:
            case Verdict():
                raise _Over(self._outcome(news))
            case Broken():
                # If the control node was lost after it had sent *store*, the error there came first.
                raise self._failing_with or news.error
            case GivenUp():
                if news.cause is not None:
                    self._report(news.cause, given_up=True)
                raise news
            case MustEnd() | TimedOut():
                self.interruptions += 1
                self._interrupt(news, with_workers)
            case Restart():
                self._on_restart(news)
            case Store() if news.error is not None:
                self._failing_with = news.error
        return news

    def _outcome(self, verdict: Verdict) -> Outcome:
        seconds = 0.0 if self._went_at is None else time.monotonic() - self._went_at
        if self._node == CONTROL and self._went_at is not None:
            self._say("ended", end_line(self._launch, self._call, seconds, self._go.restarts, verdict.error))
            if verdict.alone:
                self._say("note", alone_line(self._launch, self._call))
        return Outcome(verdict, self._command, self._exit_codes, tuple(self._restarts), seconds)

    def _interrupt(self, news: MustEnd | TimedOut, with_workers: bool) -> None:
        if isinstance(news, TimedOut):
            error: TorchrunError = timed_out(self._node, self._seat.host, news.text)
            is_last = not with_workers
        else:
            may_go_on = self._node != CONTROL and self._call.policy.max_restarts > 0
            error = preempted(self._node, self._seat.host, news.why, may_go_on)
            is_last = self._is_preempted or not with_workers  # a second order means: end at once
            self._is_preempted = True
        cause = cause_of(error)
        assert cause is not None
        if not is_last and isinstance(news, MustEnd):
            self._say("stopping", f"{cause.what}; stopping all nodes")
        self._report(cause, given_up=is_last)
        if is_last:
            raise error

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
        if self._node == CONTROL or not self._call.shares_machine:  # else the control node says it in this terminal
            self._say("restart", text)

    # --- until it is ready ------------------------------------------------------------------------

    async def _run_commands(self) -> None:
        """Run the commands of before_run, and have the task complete the call; after a failure the gang decides."""
        self._send(Report("before_run", self._launch))
        try:
            about = self._call, self._seat, self._launch, self._tools.write, self._tools.new_agent
            commands = await Aside().within(_START_S, Commands, *about)
        except Exception as error:
            self._commands_failed(f"before_run could not be started: {_reason(error)}")
            while True:
                await self._next()
        try:
            failure = await commands.run(self._next)
            if failure is not None:
                self._commands_failed(f"{failure.exception}", failure)
                while True:
                    await self._next()
        finally:
            await commands.close(self._call.grace_s)
        self._tools.complete()
        while not isinstance(news := await self._next(), Call):
            pass
        self._call = news

    def _commands_failed(self, text: str, cause: Cause | None = None) -> None:
        self._say("worker_failed", f"{text}; no worker starts on any node")
        self._send(Failed(self._launch, failures=(Failure(cause or self._no_agent(text)),)))

    def _no_agent(self, text: str) -> Cause:
        return Cause("agent", self._node, self._seat.host, exception=text)

    def _send_ready(self) -> None:
        call = self._call
        policy = call.policy if self._node == CONTROL else None
        self._send(Ready(self._launch, call.nproc, call.digest(), call.facts, call.master_port, policy))

    # --- a generation -----------------------------------------------------------------------------

    async def _run_generation(self, go: Go) -> None:
        """Run this node's workers from *go* to their end, if it takes part."""
        if self._went_at is None:
            self._went_at = time.monotonic()
        if self._restarts and (go.left or go.came):
            self._restarts[-1] |= {"left": list(go.left), "came": list(go.came)}
            self._say_of_restart(change_of_nodes(go.left, go.came, 0 if go.group is None else go.group.size))
        if go.group is not None:
            self._call = replace(self._call, group=go.group)
        self._command, self._exit_codes = "", {}
        if self._call.group_rank is None:  # this node waits
            return
        self._go, self._said = go, set()
        try:
            about = self._call, go, self._seat, self._tools.write, self._tools.warm, self._tools.new_agent
            workers = await Aside().within(_START_S, prepare, *about)
        except Exception as error:  # a full disk, a zero byte in a variable
            self._agent_failed(error)
            return
        try:
            await self._run_workers(workers)
        finally:
            await workers.close(self._call.grace_s)

    async def _run_workers(self, workers: Generation) -> None:
        go = self._go
        self._command = shlex.join(workers.command)
        if self._node == CONTROL and go.generation == 0:
            self._say("facts", start_line(self._call, go))
            self._say("chosen", details_line(self._call, go), is_detail=True)
        self._say("command", f"runs: {self._command}", is_detail=True)
        try:
            workers.start()
        except Exception as error:  # no more processes
            self._agent_failed(error)
            return
        while not workers.are_over:
            await self._see(workers, await self._next(with_workers=True))
        is_stopping = workers.is_stopping
        told, ended = await workers.finish()
        self._send(*told)
        if not is_stopping:
            self._report_signs(workers)
        self._exit_codes = ended.exit_codes
        self._send(ended)

    def _agent_failed(self, error: Exception) -> None:
        text = f"its {AGENT_NAME} could not be started: {_reason(error)}"
        self._say("worker_failed", f"{text}; stopping all nodes")
        failures = (Failure(self._no_agent(text)),)
        self._send(Ended(self._launch, False, self._go.generation, failures, stores=self._call.stores))

    async def _see(self, workers: Generation, news: Any) -> None:
        """Handle what has come for the workers, and what is seen of them."""
        failed = None
        if isinstance(news, AgentNews) and news.generation == workers.number:
            failed = workers.handle(news.event)
        elif isinstance(news, Stop):
            # Another node may have logged the reason in this terminal.
            is_told = news.teller != CONTROL and self._call.shares_machine
            if self._node == CONTROL and news.because and not is_told:
                self._say("stopping", f"{news.because}; stopping all nodes")
            workers.stop(news.signal)
        elif isinstance(news, Ask) and news.generation == workers.number:
            await workers.ask(news)
        told = workers.poll()
        if not workers.is_stopping or failed:
            self._report_signs(workers)
        self._send(*told)
        if failed:
            self._say("worker_failed", f"{failed}; stopping all nodes")
            self._send(Failed(self._launch, workers.number, workers.failures()))
            workers.stop()

    def _report_signs(self, workers: Generation) -> None:
        """Report to the gang, once each, that all workers of this node run, and that some have written."""
        signs = {"started": workers.are_running, "wrote": workers.active_at is not None}
        for kind in [kind for kind, is_seen in signs.items() if is_seen and kind not in self._said]:
            self._said.add(kind)
            self._send(Report(kind, self._launch, self._go.generation))
            if kind == "started" and self._go.restarts < self._go.max_restarts:
                self._prepare_warm()


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
