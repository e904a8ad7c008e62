"""Events that the guardian sends to its task. Each is a line of JSON with the event's name and fields.

Times are seconds of this machine's monotonic clock. An exit code is negative for a signal.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias, get_args

CONFIRMED = b"\n"
"""What a guardian that waited writes back on the socket of its commands when it has read a request."""


class Refused(NamedTuple):
    """A spare could not become this agent, which starts cold instead; no process of it exists yet."""

    reason: str


class AgentStarted(NamedTuple):
    """The agent runs; `began` tells its process from a later one with the same pid."""

    pid: int
    began: str


class WorkerStarted(NamedTuple):
    """A worker runs; `began` as for the agent."""

    rank: int
    local_rank: int
    pid: int
    began: str


class WorkerEnded(NamedTuple):
    """A worker has ended."""

    rank: int
    local_rank: int
    pid: int
    status: int
    stopped: bool  # whether it may have ended because it was told to stop
    at: float
    stopped_at: float | None = None  # when torchrun was about to stop it; None if it was not


class Frozen(NamedTuple):
    """Another program has stopped a worker (or, without a rank, the agent) and has not continued it in time."""

    rank: int | None
    local_rank: int | None
    pid: int
    at: float


class Terminated(NamedTuple):
    """The guardian got SIGTERM from outside, and now stops everything."""

    at: float


class AgentEnded(NamedTuple):
    """The agent has ended by itself; what it has left running is stopped now."""

    status: int
    at: float


class End(NamedTuple):
    """The last event: nothing is left of the agent and its workers."""

    status: int | None  # the agent's exit code
    error: str | None = None  # why it has none
    left: Sequence[str] = ()  # what the agent had left running when it ended by itself
    guardian_gone: bool = False  # whether the guardian ended unexpectedly; then the task makes this event in its place


AgentEvent: TypeAlias = Refused | AgentStarted | WorkerStarted | WorkerEnded | Frozen | Terminated | AgentEnded | End
_EVENTS = {event.__name__: event for event in get_args(AgentEvent)}


def as_line(event: AgentEvent) -> bytes:
    """Return an event as the guardian writes it."""
    return json.dumps([type(event).__name__, *event]).encode() + b"\n"


def from_line(line: bytes) -> AgentEvent:
    """Return the event that the guardian has written."""
    name, *fields = json.loads(line)
    event: AgentEvent = _EVENTS[name](*fields)
    return event
