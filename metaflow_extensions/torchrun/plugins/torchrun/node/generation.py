"""One generation of workers on this node: its life from *go* to its end, and why it failed.

A generation is in one `Phase` at a time, and it alone changes that. Everything here belongs to the thread that calls
`Supervisor.run`: what the agent tells arrives there as an `AgentEvent`.
"""

from __future__ import annotations

import enum
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from ..gang.cause import Cause, Failure, describe_exit, first_failure, signal_name
from ..gang.protocol import Go
from ..guardian.agent_events import AgentEnded, AgentEvent, End, Frozen, Terminated, WorkerEnded, WorkerStarted
from ..logs.follower import LogFollower
from .agent import AgentProcess
from .exits import Exits, read_agent_report
from .machine_faults import MachineFaults
from .plan import Plan
from .watchers import Here, Watchers

_NEVER = float("inf")


class Phase(enum.Enum):
    """Where a generation stands."""

    STARTING = "its agent is not started yet"
    RUNNING = "its agent runs"
    STOPPING = "it was told to stop, or its agent has failed"
    ENDED = "no process of it is left, and all output is shown"


_NEXT = {
    Phase.STARTING: {Phase.RUNNING, Phase.ENDED},
    Phase.RUNNING: {Phase.STOPPING, Phase.ENDED},
    Phase.STOPPING: {Phase.ENDED},
    Phase.ENDED: set[Phase](),
}


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
        follower: LogFollower,
        say: Callable[..., None] = lambda text, is_detail=True: None,  # takes a line for the log, or for its details
    ) -> None:
        self.go = go
        self.number = go.generation
        self.command = command  # the agent's argv
        self.phase = Phase.STARTING
        self.said_started = self.said_output = False  # what the gang has heard of its workers
        self.exits = Exits(folder, replace(plan.spec, nproc=plan.nproc), host)
        self._plan = plan
        self._node, self._host = plan.spec.node_index, host
        self._folder = folder  # torchrun's --log-dir
        self._agent = agent
        self._follower = follower
        self._machine = MachineFaults(folder)
        self._pids: dict[int, int] = {}  # global rank -> pid
        self._worker_ended_at: float | None = None  # the last one
        self._stopped_at = _NEVER
        self._fault: tuple[float, Cause] | None = None  # of what was frozen, or of the guardian
        self._agent_exit: int | None = None
        self._agent_failed_at: float | None = None
        self._end: End | None = None
        self.watchers = Watchers(plan.features, self._here(say), go.launch, go.generation)

    def _here(self, say: Callable[..., None]) -> Here:
        plan, go = self._plan, self.go
        return Here(
            plan,
            self._folder,
            self._follower,
            pid=lambda: self._agent.pid,
            # torchrun may start an elastic launch's ranks again.
            has_ended=(lambda rank: False) if plan.is_elastic else self.exits.has_ended,
            say=say,
            show=partial(say, is_detail=False),
            running=self._running,
            active_at=self._last_sign_of_life,
            name=f"node{self._node}-launch{go.launch}-{go.generation}",
            host=self._host,
        )

    # --- its life -------------------------------------------------------------------------------

    def _enter(self, phase: Phase) -> None:
        assert phase in _NEXT[self.phase], f"a generation can't go from {self.phase.name} to {phase.name}"
        self.phase = phase

    def start(self) -> None:
        """Start the agent; what becomes of it arrives as events."""
        self._follower.start()
        self._agent.start()
        self._enter(Phase.RUNNING)

    def stop(self, first_signal: int | None = None) -> None:
        """Have all processes end, unless that has begun. The workers alone get `first_signal` before, to save."""
        if self.phase is not Phase.RUNNING:
            return
        self._enter(Phase.STOPPING)
        self._stopped_at = time.monotonic()
        if first_signal is None:
            self._agent.stop(self._plan.grace_s)
        else:
            self._agent.preempt(self._plan.grace_s, first_signal)

    @property
    def was_stopped(self) -> bool:
        """Whether we had begun to stop it before its end."""
        return self._stopped_at < _NEVER

    @property
    def ended_well(self) -> bool:
        """Whether the agent, and so all its workers, have ended well."""
        return self._agent_exit == 0

    def close(self, grace_s: float = 0.0) -> None:
        """Stop what still runs, and show the last output; safe to call more than once."""
        if self.phase is Phase.ENDED:
            return
        try:
            self._agent.close(grace_s)
        finally:
            self.watchers.close()
        known = self._fault is not None or any(self.exits.causes(self._stopped_at))
        # What torchrun says of an end that was good or is known would hide the cause (a box that names our script).
        self._follower.finish(explained=self.ended_well or known)
        self._enter(Phase.ENDED)

    def remove_files(self) -> None:
        """Remove the log files, unless the user keeps them."""
        if self._plan.spec.log_dir is None:
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def all_run(self) -> bool:
        """Whether all its workers are known to have begun; where they are not seen, what they have written tells."""
        return len(self._pids) >= self._plan.spec.nproc or self.active_at is not None

    @property
    def active_at(self) -> float | None:
        """When its workers were last found to have written."""
        return self._follower.last_output_at

    def _running(self) -> dict[int, int]:
        return {rank: pid for rank, pid in self._pids.items() if not self.exits.has_ended(rank)}

    def _last_sign_of_life(self) -> float | None:
        return max((at for at in (self.active_at, self._worker_ended_at) if at is not None), default=None)

    # --- what its agent tells -------------------------------------------------------------------

    def handle(self, event: AgentEvent) -> str | None:
        """Handle what the agent tells; return what has failed by that while it ran, in words for the log."""
        match event:
            case WorkerStarted():
                self._pids[event.rank] = event.pid
            case WorkerEnded():
                return self._on_worker_ended(event)
            case Frozen() | Terminated():
                return self._on_fault(event)
            case AgentEnded():
                return self._on_agent_ended(event)
            case End():
                self._on_end(event)
        return None

    def unseen_failure(self) -> str | None:
        """Return what has failed as torchrun alone has seen, in words for the log."""
        if self.phase is not Phase.RUNNING or self._plan.is_elastic:  # an elastic agent may start workers again
            return None
        unseen = self.exits.failed_unseen()
        return None if unseen is None else f"rank {unseen.rank} failed"

    def _on_worker_ended(self, event: WorkerEnded) -> str | None:
        failed = self.exits.note(event)
        self._worker_ended_at = event.at
        if event.status is None:
            return None  # who was reaped before the others is not known yet
        if failed and self.phase is Phase.RUNNING and not self._plan.is_elastic:
            return f"rank {event.rank} {self._machine.how_ended(event.status)}"
        return self.unseen_failure()

    def _on_fault(self, event: Frozen | Terminated) -> str | None:
        if self.phase is not Phase.RUNNING:
            return None
        if isinstance(event, Terminated):
            text = "its guardian process got SIGTERM, which nobody of the gang has sent"
            cause = Cause("agent_ended", self._node, self._host, exception=text)
        else:
            whose = f"its {self._plan.agent} " if event.rank is None else ""
            text = (
                f"{whose}was stopped by a signal (SIGSTOP or the like) and not continued for {self._plan.silence_s:g} s"
            )
            cause = Cause("frozen", self._node, self._host, event.rank, event.local_rank, exception=text)
        self._fault = (event.at, cause)
        return f"{cause.who} {cause.what}"

    def _on_agent_ended(self, event: AgentEnded) -> str | None:
        """Take that the agent has ended by itself: well, or it saw a worker fail before us, or it failed itself."""
        self._agent_exit = event.status
        if event.status == 0 or self.phase is not Phase.RUNNING:
            return None
        self.exits.complete(event.status, stopping=False)
        self._enter(Phase.STOPPING)
        self._stopped_at = self._agent_failed_at = event.at
        failed = self.exits.first_failed()
        if failed is not None and failed.status is not None:
            return f"rank {failed.rank} {self._machine.how_ended(failed.status)}"
        cause = self._program_cause()
        return f"the {self._plan.agent} {describe_exit(event.status)}" if cause is None else str(cause.exception)

    def _on_end(self, event: End) -> None:
        if self._agent_exit is None:  # it has not ended by itself
            self._agent_exit, self._end = event.status, event
            if event.status != 0 and not self.was_stopped:
                self._agent_failed_at = time.monotonic()
        self.exits.complete(self._agent_exit, self.was_stopped)

    # --- why it failed --------------------------------------------------------------------------

    def failures(self) -> tuple[Failure, ...]:
        """Return what has failed on this node, of many the first; the agent itself only where no worker is known to."""
        dated = [] if self._fault is None else [self._fault]
        dated += [(at, self._machine.explained(cause)) for at, cause in self.exits.causes(self._stopped_at)]
        if not dated and self._agent_failed_at is not None:
            dated = [(self._agent_failed_at, self._agent_cause())]
        now = time.monotonic()
        first = first_failure(Failure(cause, now - at) for at, cause in dated)
        return () if first is None else (first,)

    def _agent_cause(self) -> Cause:
        cause = self._program_cause() or self._torchrun_cause()
        if self._machine.is_disk_full():
            cause = replace(cause, exception=f"{cause.exception}, on {self._machine.full_disk}")
        return cause

    def _program_cause(self) -> Cause | None:
        if self._plan.program is None:
            return None
        return self._plan.program.cause(self._folder, self._node, self._host, self._machine.how_ended)

    def _torchrun_cause(self) -> Cause:
        report, code, who = read_agent_report(self._folder), self._agent_exit, f"its {self._plan.agent}"
        guardian_gone = self._end is not None and self._end.guardian_gone
        if guardian_gone:
            code, who, how = None, "its guardian process", self._machine.how_vanished()
        elif report.got_signal is not None:  # without a guardian it gets SIGTERM from the kernel
            how = f"got {signal_name(report.got_signal)}, which nobody of the gang has sent, and gave up"
        elif self._end is not None and self._end.error is not None:
            how = self._end.error
        else:
            how = "vanished" if code is None else self._machine.how_ended(code)
        # One that has started its workers did start; it was ended, or lost its own connections.
        kind = "agent_ended" if self._pids or guardian_gone else "agent"
        return Cause(kind, self._node, self._host, None, None, code, f"{who} {how}", report.tail)
