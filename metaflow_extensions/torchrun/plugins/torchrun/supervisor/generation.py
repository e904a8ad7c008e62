"""One generation of workers on this node, from *go* to the end of its last process, and its failures."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace

from ..events import Event
from ..gang.cause import Failure, describe_exit, first_failure
from ..gang.messages import Ask, Ended, Go, Message, Report
from ..machine.aside import STUCK_S
from .agent import AgentProcess
from .agent_end import AGENT_NAME, MachineFaults, agent_failure
from .agent_events import AgentEnded, AgentEvent, End, Refused, Unreached, WorkerEnded, WorkerStarted
from .call import Call
from .command import shown_command
from .exits import Exits
from .hang_observer import HangObserver, StacksObserver
from .headlines import left_behind
from .observers import Here, Observers
from .pipes import LogReader
from .progress_observer import ProgressObserver
from .seat import Seat
from .usage_observer import UsageObserver

_NEVER = float("inf")
_OBSERVERS = {  # by the kind of their reports
    "progress": ProgressObserver,
    "hangs": HangObserver,
    "stacks": StacksObserver,
    "usage": UsageObserver,
}


class Generation:
    """The workers between one *go* and their end, on this node."""

    def __init__(
        self,
        call: Call,
        seat: Seat,
        go: Go,
        folder: str,
        command: list[str],
        agent: AgentProcess,
        logs: LogReader,
    ) -> None:
        self._go, self._seat = go, seat
        self.number = go.generation
        self.command = shown_command(command)  # the agent's argv, as a user would type it
        self.are_over = False  # no process is left
        self._exits = Exits(folder, call, seat.host, logs.tail)
        self._call = call
        self._folder = folder  # torchrun's --log-dir
        self._agent, self._logs = agent, logs
        self._faults = MachineFaults()
        self._end: End | None = None  # of the agent, as soon as its exit code is known
        self._failed_at: float | None = None  # the agent itself
        self._stopped_at = _NEVER
        self._left: Sequence[str] = ()  # what the agent had left running when it ended by itself
        self._is_closed = False
        self._here = Here(call, go, seat, folder, agent, logs, self._exits)
        self._observers = Observers(self._here, _OBSERVERS)

    # --- its life -------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the agent. All further news arrives as events."""
        self._logs.start()
        self._agent.start()

    def stop(self, first_signal: int | None = None) -> None:
        """Stop all processes, unless that has begun. The workers alone get `first_signal` before, so that they can save."""
        if not self.is_stopping:
            self._begin_stop(time.monotonic())
            self._agent.stop(self._call.grace_s, first_signal)

    async def ask(self, ask: Ask) -> None:
        """Begin to find out what the workers do; `poll` tells it later."""
        await self._observers.ask("stacks", lambda observer: observer.ask(ask.asked))

    def _begin_stop(self, at: float) -> None:
        self._stopped_at = at
        self._logs.let_end()

    @property
    def is_stopping(self) -> bool:
        """Whether all processes are to end."""
        return self._stopped_at < _NEVER

    @property
    def _ended_well(self) -> bool:
        return self._end is not None and self._end.status == 0 and self._failed_at is None

    async def close(self, grace_s: float = 0.0) -> None:
        """Stop what still runs, read the last output, and remove the files; safe to call more than once."""
        try:
            await self._close(grace_s)
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _close(self, grace_s: float = 0.0) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._logs.let_end()
        try:
            await self._agent.close(grace_s)
        finally:
            for end in self._exits.failed():  # also those of which torchrun alone has said so
                self._logs.read_now(end.local_rank, failed=True)
            known = any(self._exits.causes(self._stopped_at))
            # torchrun prints a box that names our script. After a good end, or beside a known cause, it would only mislead.
            self._logs.finish(explained=self._ended_well or known)

    async def finish(self) -> tuple[list[Message | Event], Ended]:
        """Read the last output of workers that have ended; return what is told of that, and how they did."""
        trained_alone, told = await asyncio.gather(
            self._exits.trained_alone(), self._observers.ask("progress", ProgressObserver.ended)
        )
        self._tell_of_disk()
        await self._close()
        call, ok = self._call, self._ended_well
        ended = Ended(
            self._go.launch,
            ok,
            self.number,
            self.failures(),
            self._exits.codes,
            call.stores,
            # Unless the call means that, as by gathering values.
            ok and not call.may_train_alone and call.world_size > 1 and trained_alone,
            () if ok else self._exits.early,
        )
        return [*told, *left_behind(self._seat.node, self._left, "workers")], ended

    @property
    def are_running(self) -> bool:
        """Whether all workers of this node run, or have run."""
        signs = (self.active_at, self._exits.reported_at)
        return len(self._exits.pids) >= self._call.nproc or any(at is not None for at in signs)

    @property
    def active_at(self) -> float | None:
        """When its workers were last found to have written."""
        return self._logs.last_output_at

    # --- what its agent tells -------------------------------------------------------------------

    def poll(self) -> list[Report]:
        """Return what is observed now, also while the workers are stopped, and perhaps save."""
        self._tell_of_disk()
        return self._observers.poll()

    def _tell_of_disk(self) -> None:
        if self._exits.files.is_stuck():
            text = f"the disk of {self._folder} has not answered for {STUCK_S:g} s; until it does, there are no new metrics"
            self._here.say(f"{text}, and of a failure only the exit code is known", is_detail=False)

    def handle(self, event: AgentEvent) -> str | None:
        """Handle an event; return the failure that it reports, for the log, or None."""
        match event:
            case Refused():
                self._here.say(f"torchrun starts cold: {event.reason}", is_detail=False)
            case Unreached():
                about = {"address": self._call.main_addr, "port": self._go.port, "why": event.why}
                self._seat.link.send(Report("unreached", self._go.launch, self.number, about))
            case WorkerStarted():
                self._exits.pids[event.rank] = event.pid
            case WorkerEnded():
                return self._on_worker_ended(event)
            case AgentEnded():
                return self._on_agent_ended(event)
            case End():
                self._on_end(event)
                self.are_over = True
        return None

    def _on_worker_ended(self, event: WorkerEnded) -> str | None:
        failed = self._exits.record(event)
        self._logs.read_now(event.local_rank, failed)  # its last lines stand before the line of its end
        if failed and not self.is_stopping:
            # Which rank failed first is decided when all nodes have told, so this names none.
            return f"a worker {self._faults.how_ended(event.status)}"
        return None

    def _on_agent_ended(self, event: AgentEnded) -> str | None:
        """Handle an agent that ended by itself: well, by its own failure, or by a worker's that it saw first."""
        self._end = End(event.status)
        if self.is_stopping or (event.status == 0 and self._has_started()):
            return None
        self._failed_at = event.at
        self._begin_stop(event.at)
        failed = next(iter(self._exits.failed()), None)
        if failed is not None:
            return f"a worker {self._faults.how_ended(failed.status)}"
        return f"the {AGENT_NAME} {describe_exit(event.status)}"

    def _has_started(self) -> bool:
        """Return whether the agent has started anything: with some arguments torchrun only prints, and ends well."""
        return bool(self._exits.pids or self._exits.codes) or self._logs.written_bytes() > 0

    def _on_end(self, event: End) -> None:
        self._left = event.left
        if self._end is None:  # it was stopped
            self._end = event
            if event.status != 0 and not self.is_stopping:
                self._failed_at = time.monotonic()

    def failures(self) -> tuple[Failure, ...]:
        """Return this node's first failure; the agent's own counts only if no worker is known to have failed."""
        dated = [(at, self._faults.explained(cause)) for at, cause in self._exits.causes(self._stopped_at)]
        if not dated and self._failed_at is not None:
            about = self._call, self._seat.host, self._logs.tail, self._end or End(None), self._faults
            dated = [(self._failed_at, agent_failure(*about, has_workers=bool(self._exits.pids)))]
        now = time.monotonic()
        first = first_failure(Failure(cause, now - at) for at, cause in dated)
        if first is None:
            return ()
        alike = (cause.rank for _, cause in dated if cause.way == first.cause.way)
        return (replace(first, ranks=tuple(rank for rank in alike if rank is not None)),)
