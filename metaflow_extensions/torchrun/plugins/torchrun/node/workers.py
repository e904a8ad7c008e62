"""The table of the workers of one agent."""

from __future__ import annotations

import math

from ..machine import processes


class Worker:
    """A worker that the agent has started."""

    def __init__(self, rank: int, local_rank: int, pid: int) -> None:
        self.rank, self.local_rank, self.pid = rank, local_rank, pid
        self.began = processes.began(pid)
        self.status: int | None = None  # its exit code, negative for a signal, as soon as it is known
        self.stopped_at = math.inf  # when torchrun was about to stop it, in monotonic seconds

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return processes.is_alive(self.pid, self.began)


class Workers:
    """The workers of one agent."""

    def __init__(self) -> None:
        self._by_pid: dict[int, Worker] = {}

    def get(self, pid: int) -> Worker | None:
        """Return the worker that had this pid last."""
        return self._by_pid.get(pid)

    def living(self) -> list[int]:
        """Return the pids of those that have not ended."""
        return [worker.pid for worker in self._by_pid.values() if worker.is_alive]

    def add(self, rank: int, local_rank: int, pid: int) -> Worker:
        """Add a worker and return it."""
        worker = self._by_pid[pid] = Worker(rank, local_rank, pid)
        return worker
