"""What happens to one agent and its workers. Times are seconds of this machine's monotonic clock.

An exit code is negative for a signal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias


class Refused(NamedTuple):
    """A spare could not become this agent, which starts cold instead; no process of it exists yet."""

    reason: str


class WorkerStarted(NamedTuple):
    """A worker runs."""

    rank: int
    local_rank: int
    pid: int


class WorkerEnded(NamedTuple):
    """A worker has ended."""

    rank: int
    local_rank: int
    pid: int
    status: int
    stopped: bool  # whether it may have ended because it was told to stop
    at: float
    stopped_at: float | None = None  # when torchrun was about to stop it; None if it was not

    @property
    def has_failed(self) -> bool:
        """Whether this end shows that it has failed by itself."""
        return self.status != 0 and not self.stopped


class Unreached(NamedTuple):
    """The agent gets no answer from torch's store on the control node; it tries on, as torch does."""

    why: str


class AgentEnded(NamedTuple):
    """The agent has ended by itself; what it has left running is stopped now."""

    status: int
    at: float


class End(NamedTuple):
    """The last event: nothing is left of the agent and its workers."""

    status: int | None  # the agent's exit code
    error: str | None = None  # why it has none
    left: Sequence[str] = ()  # what the agent had left running when it ended by itself


AgentEvent: TypeAlias = Refused | Unreached | WorkerStarted | WorkerEnded | AgentEnded | End


class AgentNews(NamedTuple):
    """An event in the launch's inbox."""

    generation: int  # its number; -1 for the commands before
    event: AgentEvent
