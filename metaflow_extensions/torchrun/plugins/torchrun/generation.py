"""What has become of the agent and the workers of one generation on this node, and why."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from .failure import (
    TAIL_LINES,
    Cause,
    WorkerEnd,
    agent_stopped_workers_at,
    describe_exit,
    ends_reported_by_agent,
    pids_stopped_by_agent,
    read_tail,
    signal_got_by_agent,
    signal_name,
    worker_cause,
)
from .launch_spec import LaunchSpec
from .logs import LogFollower, worker_folder
from .memory import describe_oom, memory_limit, oom_kills
from .process import AgentProcess

# What is left of a disk that can't take another block.
_FULL_BYTES = 64 * 1024


def evidence_folder(folder: str) -> str:
    """Return where the workers whose logs lie in `folder` leave their stacks when asked for them."""
    return os.path.join(folder, "evidence")


def _is_full(folder: str) -> bool:
    with suppress(OSError):
        status = os.statvfs(folder)
        return status.f_bavail * status.f_frsize < _FULL_BYTES
    return False


@dataclass
class Generation:
    """The workers between one *go* and their end, on this node."""

    spec: LaunchSpec
    host: str
    number: int
    folder: str
    command: list[str]
    agent: AgentProcess
    follower: LogFollower
    agent_stderr: str
    oom_kills_before: int | None = field(default_factory=oom_kills)
    pids: dict[int, int] = field(default_factory=dict)  # global rank -> pid
    ends: dict[int, WorkerEnd] = field(default_factory=dict)
    ended_at: dict[int, float] = field(default_factory=dict)
    reaped: dict[int, int] = field(default_factory=dict)  # local rank -> pid, of ends that torchrun alone saw
    reaped_failed: bool = False
    fault: Cause | None = None  # of a process that is no worker, or of one that was stopped
    evidence: dict[str, Any] | None = None
    stopped_at: float = float("inf")  # when we began to stop it
    preempted: bool = False
    agent_exit: int | None = None
    guardian_exit: int | None = None
    error: str | None = None

    @property
    def node(self) -> int:
        """This node's index."""
        return self.spec.node_index

    @property
    def evidence_folder(self) -> str:
        """Where workers leave their stacks when asked for them."""
        return evidence_folder(self.folder)

    @property
    def stopping(self) -> bool:
        """Whether we have begun to stop it."""
        return self.stopped_at < float("inf")

    def has_ended(self, rank: int) -> bool:
        """Tell whether a worker's end is known."""
        local_rank = rank - self.spec.global_rank(0)
        return local_rank in self.ends or local_rank in self.reaped

    def note_end(self, event: dict[str, Any]) -> WorkerEnd:
        """Take the guardian's word of a worker's end."""
        # If torchrun stopped this one, it has seen another fail that we did not see.
        stopped = event["stopped"] or self.stopped_by_agent(event)
        end = WorkerEnd(event["local_rank"], event["rank"], event["status"], stopped, 0.0)
        self.ends[end.local_rank] = end
        self.ended_at[end.local_rank] = event["t"]
        return end

    def stopped_by_agent(self, event: dict[str, Any]) -> bool:
        """Tell whether torchrun itself stopped the worker whose end `event` tells."""
        return event["status"] != 0 and event["pid"] in pids_stopped_by_agent(self.agent_stderr)

    def failed_unseen(self) -> int | None:
        """Return the local rank of a failure that torchrun alone has seen, and acts upon; None if there is none."""
        stopped = pids_stopped_by_agent(self.agent_stderr)
        seen = any(end.exit_code != 0 and not end.stopped for end in self.ends.values())
        if stopped and not seen and set(self.reaped.values()) - stopped:
            return self.last_reaped()
        return None

    def last_reaped(self) -> int:
        """Return the local rank that was reaped last of those that torchrun had not stopped itself.

        Ranks reaped before it ended well; torchrun stops the others at the first failure.
        """
        stopped = pids_stopped_by_agent(self.agent_stderr)
        own = [rank for rank, pid in self.reaped.items() if pid not in stopped] or list(self.reaped)
        return max(own, key=self.ended_at.__getitem__)

    def first_failure(self, agent_status: int) -> str:
        """Return what the log says of an agent that ended before the guardian saw why."""
        failed = [end for end in self.ends.values() if end.exit_code != 0 and not end.stopped]
        if not failed:
            return f"the torchrun agent {describe_exit(agent_status)}"
        return f"rank {failed[0].rank} {self.how_ended(failed[0].exit_code)}"

    def add_unseen_ends(self) -> None:
        """Fill in the workers whose end the guardian did not see from what torchrun says."""
        reported = ends_reported_by_agent(self.agent_stderr)
        if self.agent_exit == 0:
            reported = dict.fromkeys(range(self.spec.nproc), 0)
        for local_rank, code in reported.items():
            if local_rank not in self.ends:
                rank = self.spec.global_rank(local_rank)
                stopped = code == -signal.SIGTERM or (self.stopping and local_rank not in self.reaped)
                self.ends[local_rank] = WorkerEnd(local_rank, rank, code, stopped, 0.0)

    # --- why ------------------------------------------------------------------------------------

    def causes(self, final: bool) -> Iterator[dict[str, Any]]:
        """Yield this node's failures with their age, the earliest first.

        The agent's own comes only in the `final` report, when no worker's is known.
        """
        now, found = time.monotonic(), False
        if self.fault is not None:
            found = True
            yield {"cause": self.fault.to_wire(), "age_s": 0.0}
        for cause, ended_at in self._worker_causes(now):
            found = True
            yield {"cause": cause.to_wire(), "age_s": now - ended_at}
        if self.reaped_failed and not found:
            found = True
            yield {"cause": self._reaped_cause().to_wire(), "age_s": 0.0}
        agent_failed = final and not self.stopping and self.agent_exit != 0
        if agent_failed and not found:
            yield {"cause": self._agent_cause().to_wire(), "age_s": 0.0}

    def _worker_causes(self, now: float) -> Iterator[tuple[Cause, float]]:
        # Of an end that we did not see, what the worker left may tell; its exit code is not known yet.
        unseen = [
            WorkerEnd(local_rank, self.spec.global_rank(local_rank), -signal.SIGTERM, True, 0.0)
            for local_rank in self.reaped.keys() - self.ends.keys()
        ]
        stopped_at, found = self._told_to_stop_at(), []
        for end in [*self.ends.values(), *unseen]:
            folder = worker_folder(self.folder, end.local_rank)
            failed = worker_cause(end, self.node, self.host, folder, stopped_at)
            if failed is not None:
                cause, raised_at = failed
                at = self.ended_at.get(end.local_rank, now) if raised_at is None else raised_at
                found.append((self._explained(cause, end), at))
        yield from sorted(found, key=lambda each: each[1])

    def _told_to_stop_at(self) -> float:
        """Return the first moment at which a worker of this node can have been told to stop.

        torchrun does so, too, but not before a worker has failed.
        """
        failed = [end.local_rank for end in self.ends.values() if end.exit_code != 0 and not end.stopped]
        failed += [self.last_reaped()] if self.reaped_failed else []
        told = [self.stopped_at, agent_stopped_workers_at(self.agent_stderr)]
        return min([*told, *(self.ended_at[rank] for rank in failed if rank in self.ended_at)])

    def _explained(self, cause: Cause, end: WorkerEnd) -> Cause:
        """Return `cause` with what the machine knows of it, where the worker itself has said nothing."""
        if cause.exception is None and _is_full(self.folder):
            text = f"a full disk: nothing more can be written to {self.folder}, where its output goes"
            cause = replace(cause, exception=text)
        if cause.kind == "signal" and self._out_of_memory(end.exit_code):
            cause = replace(cause, kind="oom", exception=describe_oom(memory_limit()))
        return cause

    def _reaped_cause(self) -> Cause:
        """Return what can be said of a worker that left no exception and whose exit code nobody told."""
        local_rank = self.last_reaped()
        tail = read_tail(os.path.join(worker_folder(self.folder, local_rank), "stderr.log"))
        rank = self.spec.global_rank(local_rank)
        return Cause("exit", self.node, self.host, rank, local_rank, detail="\n".join(tail[-TAIL_LINES:]))

    def _agent_cause(self) -> Cause:
        tail = read_tail(self.agent_stderr)
        code, who = self.agent_exit, "its torchrun agent"
        if self.guardian_exit is not None:
            code, who = self.guardian_exit, "its guardian process"
        how = self.error or (self.how_ended(code) if code is not None else "vanished")
        number = signal_got_by_agent(tail)
        if self.guardian_exit is None and number is not None:  # without a guardian it gets SIGTERM from the kernel
            how = f"got {signal_name(number)}, which nobody of the gang has sent, and gave up"
        if _is_full(self.folder):
            how = f"{how}, on a full disk: nothing more can be written to {self.folder}"
        # One that has started its workers did start; it was ended, or lost its own connections.
        kind = "agent_ended" if self.pids or self.guardian_exit is not None else "agent"
        detail = "\n".join(tail[-TAIL_LINES:])
        return Cause(kind, self.node, self.host, None, None, code, f"{who} {how}", detail)

    def frozen_cause(self, rank: int | None, local_rank: int | None, silence_s: float) -> Cause:
        """Return the cause for a process that somebody has stopped and not continued."""
        whose = "its torchrun agent " if rank is None else ""
        text = f"{whose}was stopped by a signal (SIGSTOP or the like) and not continued for {silence_s:g} s"
        return Cause("frozen", self.node, self.host, rank, local_rank, exception=text)

    def guardian_cause(self) -> Cause:
        """Return the cause for a guardian that somebody told to end."""
        text = "its guardian process got SIGTERM, which nobody of the gang has sent"
        return Cause("agent_ended", self.node, self.host, exception=text)

    def how_ended(self, exit_code: int) -> str:
        """Say how a process of this generation ended."""
        return f"ran {describe_oom(memory_limit())}" if self._out_of_memory(exit_code) else describe_exit(exit_code)

    def _out_of_memory(self, exit_code: int) -> bool:
        """Tell whether it was the kernel's out-of-memory killer: its counter has moved since *go*."""
        before, now = self.oom_kills_before, oom_kills()
        return exit_code == -signal.SIGKILL and before is not None and now is not None and now > before

    # --- the end --------------------------------------------------------------------------------

    def close(self, grace_s: float) -> None:
        """Stop what still runs and show the last output."""
        self.agent.close(grace_s)
        known = self.fault is not None or any(self._worker_causes(time.monotonic()))
        # What torchrun says of an end that was good or is known would hide the cause (a box that names our script).
        self.follower.finish(explained=self.agent_exit == 0 or known)

    def remove_files(self) -> None:
        """Remove the log files, unless the user keeps them."""
        if self.spec.log_dir is None:
            shutil.rmtree(self.folder, ignore_errors=True)
