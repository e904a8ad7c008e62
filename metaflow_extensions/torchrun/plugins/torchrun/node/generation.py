"""One generation of workers on this node, from *go* to the end of its last process, and its failures."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from ..events import Event
from ..gang.cause import Failure, first_failure
from ..gang.messages import Ended, Go, Report, Stop
from ..launch.command import shown_command
from ..logs.pipes import LogReader
from ..machine.aside import STUCK_S
from .agent import AgentProcess
from .agent_end import AgentEnd
from .agent_events import AgentEnded, AgentEvent, End, Refused, Unreached, WorkerEnded, WorkerStarted
from .exits import Exits
from .headlines import left_behind
from .news import Seen, WorkersEnded
from .plan import Plan
from .watchers import Here, Watchers

_NEVER = float("inf")


class Generation:
    """The workers between one *go* and their end, on this node."""

    def __init__(
        self,
        plan: Plan,
        host: str,
        go: Go,
        folder: str,
        command: list[str],
        agent: AgentProcess,
        logs: LogReader,
        say: Callable[..., None] = lambda text, is_detail=True: None,  # writes a line to the log, or to its details
    ) -> None:
        self.go = go
        self.number = go.generation
        self.command = shown_command(command)  # the agent's argv, as a user would type it
        self.exits = Exits(folder, plan.spec, host, logs.tail)
        self._plan = plan
        self._host = host
        self._folder, self._say = folder, say  # torchrun's --log-dir
        self._agent = agent
        self._agent_end = AgentEnd(plan, host, logs.tail)
        self._logs = logs
        self._pids: dict[int, int] = {}  # global rank -> pid
        self._worker_ended_at: float | None = None  # the last one
        self._stopped_at = _NEVER
        self._left: Sequence[str] = ()  # what the agent had left running when it ended by itself
        self._is_closed = False
        self.watchers = Watchers(plan.watches, self._here(say), go.launch, go.generation)

    def _here(self, say: Callable[..., None]) -> Here:
        plan, go = self._plan, self.go
        return Here(
            plan,
            self._folder,
            pid=lambda: self._agent.pid,
            has_ended=self.exits.has_ended,
            say=say,
            show=partial(say, is_detail=False),
            running=self._running,
            active_at=self._last_sign_of_life,
            written=self._logs.written_bytes,
            is_held_up=lambda: self._logs.is_held_up,
            host=self._host,
            port=go.port,
            files=self.exits.files,
        )

    # --- its life -------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the agent. All further news arrives as events."""
        self._logs.start()
        self._agent.start()

    async def obey(self, stop: Stop) -> Seen:
        """Let the watchers examine the workers, and stop these; return what the watchers tell."""
        told = await self.watchers.before_stop(stop.kind)
        self.stop(stop.signal)
        return Seen(told)

    def stop(self, first_signal: int | None = None) -> None:
        """Stop all processes, unless that has begun. The workers alone get `first_signal` before, so that they can save."""
        if not self._is_stopping:
            self._begin_stop(time.monotonic())
            self._agent.stop(self._plan.grace_s, first_signal)

    def _begin_stop(self, at: float) -> None:
        self._stopped_at = at
        self._logs.let_end()

    @property
    def _is_stopping(self) -> bool:
        return self._stopped_at < _NEVER

    @property
    def _ended_well(self) -> bool:
        return self._agent_end.exit_code == 0 and self._agent_end.failed_at is None

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
            self.watchers.close()
            for end in self.exits.failed():  # also those of which torchrun alone has said so
                self._logs.read_now(end.local_rank, failed=True)
            known = any(self.exits.causes(self._stopped_at))
            # torchrun prints a box that names our script. After a good end, or beside a known cause, it would only mislead.
            self._logs.finish(explained=self._ended_well or known)

    async def finish(self) -> WorkersEnded:
        """Read the last output of workers that have ended, and return how they did."""
        trained_alone, told = await asyncio.gather(self.exits.trained_alone(), self.watchers.ended())
        self._tell_of_disk()
        await self._close()
        plan, ok = self._plan, self._ended_well
        ended = Ended(
            self.go.launch,
            ok,
            self.number,
            self._failures(),
            self.exits.codes,
            plan.stores,
            # Unless the call means that, as by gathering values.
            ok and not plan.may_train_alone and plan.spec.world_size > 1 and trained_alone,
            () if ok else self.exits.early,
        )
        left = left_behind(plan.spec.node_index, self._left, "workers")
        return WorkersEnded(ended, [*told, *left], self.active_at is not None)

    @property
    def active_at(self) -> float | None:
        """When its workers were last found to have written."""
        return self._logs.last_output_at

    def _running(self) -> dict[int, int]:
        return {rank: pid for rank, pid in self._pids.items() if not self.exits.has_ended(rank)}

    def _last_sign_of_life(self) -> float | None:
        seen = (self.active_at, self._worker_ended_at, self.watchers.saw_workers_at)
        return max((at for at in seen if at is not None), default=None)

    # --- what its agent tells -------------------------------------------------------------------

    def poll(self, is_quiet: bool) -> Seen:
        """Return what causes no event; of the workers' first output only if there is no other news."""
        self._tell_of_disk()
        told = self.watchers.poll()  # also while the workers are stopped, and perhaps save
        all_run = self.watchers.saw_workers_at is not None and not self._is_stopping
        return Seen(told, all_run, has_written=is_quiet and self.active_at is not None)

    def _tell_of_disk(self) -> None:
        if self.exits.files.is_stuck():
            text = f"the disk of {self._folder} has not answered for {STUCK_S:g} s; until it does, there are no new metrics"
            self._say(f"{text}, and of a failure only the exit code is known", is_detail=False)

    def handle(self, event: AgentEvent) -> Seen:
        """Handle an event; return what is known by it."""
        failed = self._record(event)
        all_run = len(self._pids) >= self._plan.spec.nproc or self.active_at is not None
        if isinstance(event, Refused):
            note = Event("note", self._plan.spec.node_index, f"torchrun starts cold: {event.reason}")
            return Seen([note], all_run)
        if isinstance(event, Unreached):
            about = {"address": self._plan.main_addr, "port": self.go.port, "why": event.why}
            return Seen([Report("unreached", self.go.launch, self.number, about)])
        failures = () if failed is None else self._failures()
        return Seen((), all_run, failed=failed or "", failures=failures, is_over=isinstance(event, End))

    def _record(self, event: AgentEvent) -> str | None:
        """Record an event; return the failure that it reports, for the log, or None."""
        match event:
            case WorkerStarted():
                self._pids[event.rank] = event.pid
            case WorkerEnded():
                return self._on_worker_ended(event)
            case AgentEnded():
                return self._on_agent_ended(event)
            case End():
                self._on_end(event)
        return None

    def _on_worker_ended(self, event: WorkerEnded) -> str | None:
        failed = self.exits.record(event)
        self._logs.read_now(event.local_rank, failed)  # its last lines stand before the line of its end
        self._worker_ended_at = event.at
        if failed and not self._is_stopping:
            # Which rank failed first is decided when all nodes have told, so this names none.
            return f"a worker {self._agent_end.machine.how_ended(event.status)}"
        return None

    def _on_agent_ended(self, event: AgentEnded) -> str | None:
        """Handle an agent that ended by itself: well, by its own failure, or by a worker's that it saw first."""
        self._agent_end.exit_code = event.status
        if self._is_stopping or (event.status == 0 and self._has_started()):
            return None
        self._agent_end.failed_at = event.at
        self._begin_stop(event.at)
        failed = next(iter(self.exits.failed()), None)
        if failed is not None:
            return f"a worker {self._agent_end.machine.how_ended(failed.status)}"
        return self._agent_end.describe(event.status)

    def _has_started(self) -> bool:
        """Return whether the agent has started anything: with some arguments torchrun only prints, and ends well."""
        return bool(self._pids or self.exits.codes) or self._logs.written_bytes() > 0

    def _on_end(self, event: End) -> None:
        self._left = event.left
        if self._agent_end.exit_code is None:  # it was stopped
            self._agent_end.record(event)
            if event.status != 0 and not self._is_stopping:
                self._agent_end.failed_at = time.monotonic()

    def _failures(self) -> tuple[Failure, ...]:
        """Return this node's first failure; the agent's own counts only if no worker is known to have failed."""
        agent = self._agent_end
        dated = [(at, agent.machine.explained(cause)) for at, cause in self.exits.causes(self._stopped_at)]
        if not dated and agent.failed_at is not None:
            dated = [(agent.failed_at, agent.cause(has_workers=bool(self._pids)))]
        now = time.monotonic()
        first = first_failure(Failure(cause, now - at) for at, cause in dated)
        if first is None:
            return ()
        alike = (cause.rank for _, cause in dated if cause.way == first.cause.way)
        return (replace(first, ranks=tuple(rank for rank in alike if rank is not None)),)
