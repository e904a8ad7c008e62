"""What the guardian tells of an agent and its workers, as types.

Times are seconds of this machine's monotonic clock. An exit code is negative for a signal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True)
class AgentStarted:
    """The agent runs; `began` tells its process from a later one with the same pid."""

    pid: int
    began: str


@dataclass(frozen=True)
class WorkerStarted:
    """A worker runs; `began` as for the agent."""

    rank: int
    local_rank: int
    pid: int
    began: str


@dataclass(frozen=True)
class WorkerEnded:
    """A worker has ended; `stopped`: while everything was being stopped."""

    rank: int
    local_rank: int
    pid: int
    status: int
    stopped: bool
    at: float


@dataclass(frozen=True)
class WorkerReaped:
    """A worker has ended, but torchrun alone knows how."""

    rank: int
    local_rank: int
    pid: int
    at: float


@dataclass(frozen=True)
class Frozen:
    """Somebody has stopped a worker (or, without a rank, the agent) and has not continued it in time."""

    rank: int | None
    local_rank: int | None
    pid: int
    at: float


@dataclass(frozen=True)
class Terminated:
    """Somebody has sent SIGTERM to the guardian, which now stops everything."""

    at: float


@dataclass(frozen=True)
class AgentEnded:
    """The agent has ended by itself; what it has left running is stopped now."""

    status: int
    at: float


@dataclass(frozen=True)
class End:
    """The last event: nothing is left of the agent and its workers."""

    status: int | None  # the agent's exit code
    error: str | None = None  # why it has none
    left: Sequence[str] = ()  # what the agent had left running when it ended by itself
    guardian: int | None = None  # the guardian's exit code if it was killed; 0 if that is not known


AgentEvent: TypeAlias = (
    AgentStarted | WorkerStarted | WorkerEnded | WorkerReaped | Frozen | Terminated | AgentEnded | End
)


_WORKER = ("rank", "local_rank", "pid")
# What the guardian calls an event -> its class, and what the guardian calls the fields.
_EVENTS: dict[str, tuple[type[Any], tuple[str, ...]]] = {
    "agent": (AgentStarted, ("pid", "began")),
    "worker": (WorkerStarted, (*_WORKER, "began")),
    "worker_end": (WorkerEnded, (*_WORKER, "status", "stopped", "t")),
    "worker_reaped": (WorkerReaped, (*_WORKER, "t")),
    "frozen": (Frozen, (*_WORKER, "t")),
    "terminated": (Terminated, ("t",)),
    "agent_end": (AgentEnded, ("status", "t")),
    "end": (End, ("status", "error", "left")),
}


def event_of(said: Mapping[str, Any]) -> AgentEvent:
    """Return what the guardian has said as an event. Raises ValueError if it is none."""
    try:
        cls, names = _EVENTS[said["event"]]
        event: AgentEvent = cls(*(said[name] for name in names))
    except (KeyError, TypeError) as error:
        raise ValueError(f"this is no event: {str(said)[:200]}") from error
    return event
