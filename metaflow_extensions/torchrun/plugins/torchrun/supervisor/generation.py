"""One generation of workers on this node, from *go* to the end of its last process, and its failures."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

from ..compat.renamed import harmless
from ..events import label
from ..gang.cause import Cause, Failure, describe_exit, first_failure, signal_name
from ..gang.messages import CONTROL, Ask, Ended, Failed, Go, Report, Stop, StopAt
from ..gang.wire import Plain
from . import recorders
from .agent import (
    AgentEnded,
    AgentEvent,
    AgentProcess,
    End,
    Options,
    Refused,
    Unreached,
    WorkerEnded,
    WorkerStarted,
    left_behind_line,
)
from .call import Call
from .calls import CallCounts
from .command import HALT_SIGNAL, agent_command, agent_environment, make_folder, shown_command
from .ends import Held
from .hang_observer import HangObserver, stacks_of
from .pipes import AGENT, LogReader, Write, pipe_path
from .profiles import profile
from .progress_observer import FOLDER, ProgressObserver, metrics_folder
from .side import Side
from .usage_observer import UsageObserver
from .warm import WarmNode
from .workers import MachineFaults, Workers, last_lines, without_labels

AGENT_NAME = "torchrun agent"
"""What messages call torchrun's own process."""
# `_terminate_process_handler` in torch/distributed/elastic/multiprocessing/api.py, torch 2.13.
_GOT_SIGNAL = re.compile(r"SignalException: Process \d+ got signal: (\d+)")
_NEVER = float("inf")
# By the kind of their reports. An observer has a `poll`, called at least twice a second, that returns the data to send now,
# so mostly None. It shares the supervisor's loop, so it may not wait for long. It decides nothing.
_OBSERVERS: dict[str, Callable[[Workers], Any]] = {
    "progress": ProgressObserver,
    "hangs": HangObserver,
    "usage": UsageObserver,
}


class Generation:
    """The workers between one *go* and their end, on this node; with `warm` they may start warm."""

    def __init__(
        self,
        call: Call,
        go: Go,
        side: Side,
        write: Write,
        warm: WarmNode | None,
        new_agent: Callable[..., AgentProcess],
    ) -> None:
        """Make all that it needs, or raise if it can't start. What its agent tells comes to `see`."""
        self._call, self._go, self._side, self._warm = call, go, side, warm
        self.are_over = False  # no process is left
        self._faults = MachineFaults()
        self._end: End | None = None  # of the agent, as soon as its exit code is known
        self._failed_at: float | None = None  # the agent itself
        self._stopped_at = _NEVER
        self._left: Sequence[str] = ()  # what the agent had left running when it ended by itself
        self._said: set[str] = set()  # which reports were sent that are sent once
        self._answers = Held()  # to commands that ask what the workers do
        self._is_closed = False
        if (function := call.function) is not None:  # a former generation may have left values
            shutil.rmtree(function.values, ignore_errors=True)
            os.makedirs(function.values)
        with ExitStack() as failed:
            folder = make_folder(call, f"launch{go.launch}-{go.generation}")
            failed.callback(shutil.rmtree, folder, ignore_errors=True)
            pipes = os.path.join(folder, "pipes")
            os.mkdir(pipes)
            os.mkdir(metrics_folder(folder))
            command = agent_command(call, go, folder, pipes)
            self.command = shown_command(command)  # as a user would type it
            env = {**agent_environment(call, go, side.own_address), FOLDER: metrics_folder(folder)}
            env.update(recorders.environment(call.nproc))
            shown = {rank: (f"[rank {call.global_rank(rank)}] ", call.hides(rank)) for rank in range(call.nproc)}
            self._logs = LogReader(pipes, shown, label(call.node_index, call.num_nodes), write, holds_report=True)
            failed.callback(self._logs.finish)
            news, stdout, stderr = (pipe_path(pipes, AGENT, name) for name in ("workers", "stdout", "stderr"))
            options = Options(stdout, stderr, call.grace_s, HALT_SIGNAL, call.cwd, news)
            begin = None
            if warm is not None:
                begin = partial(warm.start, command, call.nproc if call.has_warm_workers else 0)
            self._agent = new_agent(command, env, options, begin)
            self._workers = Workers(call, go, side, folder, self._logs, self._agent)
            self._calls = CallCounts(self._workers)
            self._observers = dict[str, Any]()
            for kind, make in _OBSERVERS.items():
                with self._guarded(kind):
                    self._observers[kind] = make(self._workers)
            failed.pop_all()

    # --- its life -------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the agent. All further news comes to `see`."""
        self._logs.start()
        self._agent.start()

    def see(self, news: Any) -> None:
        """Handle what has come for the workers, and tell the gang what is seen of them, also while they are stopped."""
        failed = None
        if isinstance(news, AgentEvent):
            failed = self._handle(news)
        elif isinstance(news, Stop):
            self._obey(news)
        elif isinstance(news, Ask) and news.generation == self._go.generation:
            self._answer(news.id, self._asked(news))
        elif isinstance(news, StopAt) and news.generation == self._go.generation:
            self._calls.stop_at(news.call)
        if not self._is_stopping or failed:
            self._report_signs()
        for kind, observer in list(self._observers.items()):
            with self._guarded(kind):
                self._report(kind, observer.poll())
        if failed:
            self._side.say("worker_failed", f"{failed}; stopping all nodes")
            self._side.send(Failed(self._go.launch, self._go.generation, self._failures()))
            self._stop()

    def _asked(self, question: Ask) -> Awaitable[Any]:
        match question.what:
            case "stop":
                return self._calls.hold(**question.of)
            case "profile":
                return profile(self._workers, question.id, **question.of)
        return stacks_of(self._workers, question.id)

    def _answer(self, asked: str, found: Awaitable[Any]) -> None:
        """Report what is found for a question, when that is known; None: the task reports it."""

        async def tell() -> None:
            with harmless(lambda error: self._report("answer", {"id": asked, "found": f"failed: {error!r}"})):
                if (data := await found) is not None:
                    self._report("answer", {"id": asked, "found": data})

        self._answers.begin(tell())

    def _obey(self, stop: Stop) -> None:
        # Another node may have logged the reason in this terminal.
        is_told = stop.teller != CONTROL and self._call.shares_machine
        if self._side.node == CONTROL and stop.because and not is_told:
            self._side.say("stopping", f"{stop.because}; stopping all nodes")
        # Ranks that call `stopping` save at the call that the control node names; the others by the signal.
        running = self._workers.running()
        self._stop(stop.signal, [running[rank] for rank in self._calls.calling() if rank in running])

    def _stop(self, first_signal: int | None = None, spared: Collection[int] = ()) -> None:
        """Stop all processes, unless that has begun. The workers alone get `first_signal` before, so that they can save."""
        if not self._is_stopping:
            self._begin_stop(time.monotonic())
            self._agent.stop(self._call.grace_s, first_signal, spared)

    def _begin_stop(self, at: float) -> None:
        self._stopped_at = at
        self._logs.let_end()

    @property
    def _is_stopping(self) -> bool:
        return self._stopped_at < _NEVER

    @property
    def _ended_well(self) -> bool:
        return self._end is not None and self._end.status == 0 and self._failed_at is None

    async def close(self, grace_s: float = 0.0) -> None:
        """Stop what still runs, read the last output, and remove the files; safe to call more than once."""
        if self._is_closed:
            return
        self._is_closed = True
        self._answers.cancel()
        self._logs.let_end()
        try:
            await self._agent.close(grace_s)
            await self._tell_last_progress()
        finally:
            for end in self._workers.failed():  # also those of which torchrun alone has said so
                self._logs.read_now(end.local_rank, failed=True)
            known = any(self._workers.causes(self._stopped_at))
            # torchrun prints a box that names our script. After a good end, or beside a known cause, it would only mislead.
            self._logs.finish(explained=self._ended_well or known)
            shutil.rmtree(self._workers.folder, ignore_errors=True)

    async def finish(self) -> Ended:
        """Read the last output of workers that have ended, tell the gang of it, and return how they did."""
        trained_alone = await self._workers.trained_alone()
        await self.close()
        call, ok = self._call, self._ended_well
        if self._left:
            self._side.say("left_behind", left_behind_line(self._left, "workers"))
        if not self._is_stopping:
            self._report_signs()
        return Ended(
            self._go.launch,
            ok,
            self._go.generation,
            self._failures(),
            self._workers.codes,
            call.stores,
            ok and not (call.function and call.function.gathers) and call.world_size > 1 and trained_alone,
            () if ok else self._workers.early,
            self._calls.have_stopped(),
        )

    # --- what is told of it ---------------------------------------------------------------------

    def _report(self, kind: str, data: Plain | None) -> None:
        if data is not None:
            self._side.send(Report(kind, self._go.launch, self._go.generation, data))

    async def _tell_last_progress(self) -> None:
        if (progress := self._observers.get("progress")) is not None:
            with self._guarded("progress"):
                self._report("progress", await progress.ended())

    def _guarded(self, kind: str) -> AbstractContextManager[None]:
        """Leave an observer that raises out of this generation, with a line in the log's details; it ends no launch."""

        def leave_out(error: Exception) -> None:
            text = f"this node reports nothing more of its {kind}: {type(error).__name__}: {error}"
            self._side.say("note", text, is_detail=True)
            self._observers.pop(kind, None)

        return harmless(leave_out)

    def _report_signs(self) -> None:
        """Report to the gang, once each, that all workers of this node run, or have run, and that some have written."""
        has_written = self._logs.last_output_at is not None
        run = len(self._workers.pids) >= self._call.nproc or has_written
        for kind in [kind for kind, is_seen in (("started", run), ("wrote", has_written)) if is_seen]:
            if kind not in self._said:
                self._said.add(kind)
                self._report(kind, {})
                if kind == "started" and self._warm is not None and self._go.generation < self._go.max_restarts:
                    self._warm.prepare()

    # --- what its agent tells -------------------------------------------------------------------

    def _handle(self, event: AgentEvent) -> str | None:
        """Handle an event; return the failure that it reports, for the log, or None."""
        match event:
            case Refused():
                is_detail = not self._call.has_warm_workers  # what nobody has asked for
                self._side.say("note", f"torchrun starts cold: {event.reason}", is_detail)
            case Unreached():
                about = {"address": self._call.main_addr, "port": self._go.port, "why": event.why}
                self._report("unreached", about)
            case WorkerStarted():
                self._workers.pids[event.rank] = event.pid
            case WorkerEnded():
                return self._on_worker_ended(event)
            case AgentEnded():
                return self._on_agent_ended(event)
            case End():
                self._on_end(event)
                self.are_over = True
                return f"its {AGENT_NAME} {event.error}" if event.error else None
        return None

    def _on_worker_ended(self, event: WorkerEnded) -> str | None:
        failed = self._workers.record(event)
        self._logs.read_now(event.local_rank, failed)  # its last lines stand before the line of its end
        if failed and not self._is_stopping:
            # Which rank failed first is decided when all nodes have told, so this names none.
            return f"a worker {self._faults.how_ended(event.status)}"
        return None

    def _on_agent_ended(self, event: AgentEnded) -> str | None:
        """Handle an agent that ended by itself: well, by its own failure, or by a worker's that it saw first."""
        self._end = End(event.status)
        # With some arguments torchrun only prints, and ends well.
        has_started = self._workers.pids or self._workers.codes or self._logs.last_output_at is not None
        if self._is_stopping or (event.status == 0 and has_started):
            return None
        self._failed_at = event.at
        self._begin_stop(event.at)
        failed = next(iter(self._workers.failed()), None)
        if failed is not None:
            return f"a worker {self._faults.how_ended(failed.status)}"
        return f"the {AGENT_NAME} {describe_exit(event.status)}"

    def _on_end(self, event: End) -> None:
        self._left = event.left
        if self._end is None:  # it was stopped
            self._end = event
            if event.status != 0 and not self._is_stopping:
                self._failed_at = time.monotonic()

    def _failures(self) -> tuple[Failure, ...]:
        """Return this node's first failure; the agent's own counts only if no worker is known to have failed."""
        dated = [(at, self._faults.explained(cause)) for at, cause in self._workers.causes(self._stopped_at)]
        if not dated and self._failed_at is not None:
            dated = [(self._failed_at, self._why_agent_failed())]
        now = time.monotonic()
        first = first_failure(Failure(cause, now - at) for at, cause in dated)
        return () if first is None else (first,)

    def _why_agent_failed(self) -> Cause:
        end = self._end or End(None)
        code, text = end.status, without_labels(self._logs.tail(AGENT, "stderr"))
        if (got := _GOT_SIGNAL.search(text)) is not None:
            how = f"got {signal_name(int(got[1]))} from outside of the gang, and gave up"
        elif end.error is not None:
            how = end.error
        elif code == 0:
            how = "exited with code 0 and has started no worker"
        else:
            how = "vanished" if code is None else self._faults.how_ended(code)
        # An agent with workers did start: it was killed, or lost its own connections.
        kind = "agent_ended" if self._workers.pids else "agent"
        who = kind, self._side.node, self._side.host, None, None, code
        return Cause(*who, f"its {AGENT_NAME} {how}", last_lines(text))
