"""One launch on one node, from the call of `run` to its outcome: read `NodeLaunch.run` from top to bottom.

All that it waits for comes in one queue, its inbox: what the gang says, what the agent does, what interrupts
this node. Each wait is `_next`, which raises what ends the launch here. What runs then is stopped and reaped on the way out.
"""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

from ..errors import LaunchFailed, TorchrunError, TorchrunPreempted
from ..gang.cause import Cause, Failure, cause_of, failure_of
from ..gang.messages import CONTROL, Ended, Failed, Go, OfLaunch, Ready, Report, Stop, Store, Verdict, to_wire
from ..machine.aside import Aside
from ..texts import counted, duration, headline
from .agent import AgentProcess
from .call import Call, Outcome
from .command import bracketed
from .commands import Commands
from .endings import Broken, GivenUp, MustEnd, preempted
from .ends import until_look
from .generation import AGENT_NAME, Generation
from .pipes import Write
from .side import Side
from .warm import WarmNode

_FIRST_LAUNCH = "\nthe first output can take half a minute, since each process imports PyTorch first"
# The classes of causes with which nothing has failed where they arise.
_NO_FAILURE = frozenset({"preempted", "interrupted", "timeout", "store"})
_START_S = 120.0  # for the disk of TMPDIR: a server of files may start again meanwhile


class _Over(Exception):
    """The gang has decided."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__("the launch is over")
        self.outcome = outcome


class NodeLaunch:
    """One launch on one node; `write` writes the workers' output."""

    def __init__(
        self,
        call: Call,
        side: Side,
        launch: int,
        write: Write,
        warm: WarmNode | None = None,
        new_agent: Callable[..., AgentProcess] = AgentProcess,  # another one is for tests
    ) -> None:
        self._call, self._side, self._launch, self._write = call, side, launch, write
        # Its own from the moment that the task asks for it: another launch may come while it ends.
        self._inbox = side.inbox = asyncio.Queue[Any]()
        self._new_agent = partial(new_agent, self._inbox.put_nowait)
        self._warm = None if call.warm == "off" else warm
        self._node = side.node
        self._went_at: float | None = None  # when the first generation began
        self._restarts: list[dict[str, Any]] = []
        self._go = Go(launch, -1, 0, "", 0)  # of the last generation here, as are the next two
        self._command = ""
        self._exit_codes: dict[int, int] = {}
        self._is_preempted = self._stores = False
        self._failing_with: TorchrunError | None = None  # the error that *store* has announced for the verdict
        self.interruptions = 0  # how many it has handled

    async def run(self) -> Outcome:
        """Run the launch to its end on all nodes, and return that; raise what ends it here without a verdict."""
        try:
            if self._side.broken is not None:
                raise self._side.broken
            if self._call.before_run:
                await self._run_commands()
            self._send_ready()
            while True:
                news = await self._next()
                if isinstance(news, Go):
                    await self._run_generation(news)
                elif isinstance(news, Store) and self._go.generation >= 0:
                    self._stores = True
                    self._side.tell_task("store", to_wire(news))
                elif isinstance(news, Stop):
                    self._give_up_storing()
        except _Over as over:
            self._end(over.outcome.verdict.error)
            return over.outcome
        except BaseException as error:
            if not isinstance(error, TorchrunError | GivenUp):  # a bug of ours
                self._report(Cause("call", self._node, self._side.host, exception=str(error)), given_up=True)
            self._end(error)
            # Without a generation: other nodes may be in one that this node has not got *go* for.
            self._side.send(Ended(self._launch, ok=False))
            raise

    def _end(self, error: BaseException | None) -> None:
        if error is not None:
            self._give_up_storing()
        may_go_on = error is None or (isinstance(error, LaunchFailed) and not isinstance(error, TorchrunPreempted))
        if may_go_on and self._warm is not None:
            self._warm.prepare()  # for the step's next launch

    def _give_up_storing(self) -> None:
        if self._stores:
            self._stores = False
            self._side.tell_task("store", None)

    def _report(self, cause: Cause, given_up: bool = False) -> None:
        self._side.send(Failed(self._launch, failures=(Failure(cause),), given_up=given_up))

    # --- the wait ---------------------------------------------------------------------------------

    async def _next(self, with_workers: bool = False) -> Any:
        """Return what comes next, or None when it is time to look at what no news tells; raise what ends the launch here.

        An order to end leaves it to the gang where workers run.
        """
        try:
            news = await asyncio.wait_for(self._inbox.get(), until_look())
        except asyncio.TimeoutError:
            return None
        if isinstance(news, OfLaunch) and news.launch != self._launch:
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
            case MustEnd():
                self.interruptions += 1
                self._interrupt(news, with_workers)
            case Store() if news.error is not None:
                self._failing_with = news.error
        return news

    def _outcome(self, verdict: Verdict) -> Outcome:
        seconds = 0.0 if self._went_at is None else time.monotonic() - self._went_at
        if self._node == CONTROL and self._went_at is not None:
            self._side.say("ended", end_line(self._launch, self._call, seconds, self._go.generation, verdict.error))
            if verdict.alone:
                self._side.say("note", alone_line(self._launch, self._call))
        return Outcome(verdict, self._command, self._exit_codes, tuple(self._restarts), seconds)

    def _interrupt(self, news: MustEnd, with_workers: bool) -> None:
        error = preempted(self._node, self._side.host, news.why)
        is_last = self._is_preempted or not with_workers  # a second order means: end at once
        self._is_preempted = True
        cause = cause_of(error)
        assert cause is not None
        if not is_last:
            self._side.say("stopping", f"{cause.what}; stopping all nodes")
        self._report(cause, given_up=is_last)
        if is_last:
            raise error

    # --- until it is ready ------------------------------------------------------------------------

    async def _run_commands(self) -> None:
        """Run the commands of before_run, and have the task complete the call; after a failure the gang decides."""
        self._side.send(Report("before_run", self._launch))
        try:
            about = self._call, self._side, self._launch, self._write, self._new_agent
            commands = await Aside().within(_START_S, Commands, *about)
        except Exception as error:
            await self._commands_failed(self._no_agent(f"before_run could not be started: {_reason(error)}"))
        try:
            failure = await commands.run(self._next)
            if failure is not None:
                await self._commands_failed(failure)
        finally:
            await commands.close(self._call.grace_s)
        self._side.tell_task("complete")
        while not isinstance(news := await self._next(), Call):
            pass
        self._call = news

    async def _commands_failed(self, cause: Cause) -> NoReturn:
        self._side.say("worker_failed", f"{cause.exception}; no worker starts on any node")
        self._report(cause)
        while True:
            await self._next()

    def _no_agent(self, text: str) -> Cause:
        return Cause("agent", self._node, self._side.host, exception=text)

    def _send_ready(self) -> None:
        call = self._call
        policy = call.policy if self._node == CONTROL else None
        self._side.send(Ready(self._launch, call.nproc, call.digest(), call.facts, call.master_port, policy))

    # --- a generation -----------------------------------------------------------------------------

    async def _run_generation(self, go: Go) -> None:
        """Run this node's workers from *go* to their end, if it takes part."""
        if self._went_at is None:
            self._went_at = time.monotonic()
        if go.cause is not None:
            of_it = {"generation": go.generation, "cause": go.cause.as_dict()}
            self._restarts.append({**of_it, "left": list(go.left), "came": list(go.came)})
        # On one machine the control node says it in the terminal of all.
        if go.generation and go.again and (self._node == CONTROL or not self._call.shares_machine):
            self._side.say("restart", go.again)
        if go.group is not None:
            self._call = replace(self._call, group=go.group)
        self._command, self._exit_codes = "", {}
        if self._call.group_rank is None:  # this node waits
            return
        self._go = go
        try:
            about = self._call, go, self._side, self._write, self._warm, self._new_agent
            workers = await Aside().within(_START_S, Generation, *about)
        except Exception as error:  # a full disk, a zero byte in a variable
            self._agent_failed(error)
            return
        try:
            await self._run_workers(workers)
        finally:
            await workers.close(self._call.grace_s)

    async def _run_workers(self, workers: Generation) -> None:
        go, call = self._go, self._call
        self._command = shlex.join(workers.command)
        if self._node == CONTROL and go.generation == 0:
            self._side.say("facts", start_line(call, go))
            self._side.say("chosen", f"rendezvous at {bracketed(call.main_addr)}:{go.port}", is_detail=True)
        self._side.say("command", f"runs: {self._command}", is_detail=True)
        workers.start()
        while not workers.are_over:
            workers.see(await self._next(with_workers=True))
        ended = await workers.finish()
        self._exit_codes = ended.exit_codes
        self._side.send(ended)

    def _agent_failed(self, error: Exception) -> None:
        text = f"its {AGENT_NAME} could not be started: {_reason(error)}"
        self._side.say("worker_failed", f"{text}; stopping all nodes")
        failures = (Failure(self._no_agent(text)),)
        self._side.send(Ended(self._launch, False, self._go.generation, failures, stores=self._call.stores))


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


# --- the lines with which it begins and ends ------------------------------------------------------


def start_line(call: Call, go: Go) -> str:
    """Return which ranks a launch starts, and where."""
    processes = f"{call.nproc} process{'' if call.nproc == 1 else 'es'}"
    where = f" on {counted(call.group_size, 'node')}, {processes} on each" if call.group_size > 1 else ""
    seen = call.facts.get("devices", "none")
    devices = "" if seen == "none" else f"; this node has {seen}"
    first = _FIRST_LAUNCH if go.launch == 0 else ""
    return f"launch {go.launch} starts {_ranks(call)}{where}{devices}{first}"


def end_line(launch: int, call: Call, seconds: float, restarts: int, error: TorchrunError | None) -> str:
    """Return how a launch has ended; `seconds` are those from *go* to its end."""
    trained = f"trained {duration(seconds)}" + (f", {counted(restarts, 'restart')}" if restarts else "")
    failure = None if error is None else failure_of(error)
    if failure is not None and failure.cause.kind not in ("hang", "timeout"):
        is_told = failure.cause.category in _NO_FAILURE
        how = headline(failure.cause.what) if is_told else "failed first"
        return f"launch {launch} has failed ({trained}): {failure.who} {how}"
    return f"launch {launch} {'has ended well' if error is None else 'has failed'}: {_ranks(call)}, {trained}"


def alone_line(launch: int, call: Call) -> str:
    """Return the warning for a launch whose ranks have trained without a process group, and what to change.

    A process group alone would change nothing but this warning.
    """
    group = (
        "after torch.distributed.init_process_group()" if call.function is None else "with run(process_group='auto')"
    )
    return (
        f"warning: in launch {launch} each of the {call.world_size} ranks has trained by itself: gradients were "
        "computed, but no process group was made for them, so each has a model of its own. That is fine if you mean it. "
        f"If not: {group}, wrap the model in DistributedDataParallel (or FSDP), and give its DataLoader a "
        "DistributedSampler. Without GPUs, Hugging Face's Trainer needs TrainingArguments(use_cpu=True), and Accelerate "
        "needs Accelerator(cpu=True)"
    )


def _ranks(call: Call) -> str:
    return "rank 0" if call.world_size == 1 else f"ranks 0-{call.world_size - 1}"
