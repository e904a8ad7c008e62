"""The guardian's table of workers, and its check for processes that were stopped by SIGSTOP."""

from __future__ import annotations

from collections.abc import Iterable

from ..machine import processes

SEARCH_S = 0.05  # between two searches while workers are expected
WATCH_S = 0.5  # between two searches when all are known


class Worker:
    """A worker that was found."""

    def __init__(self, rank: int, local_rank: int, pid: int) -> None:
        self.rank, self.local_rank, self.pid = rank, local_rank, pid
        self.began = processes.began(pid)
        self.status: int | None = None  # its exit code, negative for a signal, as soon as it is known
        self.reaped = False  # whether torchrun took its exit code before we could read it

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return processes.is_alive(self.pid, self.began)


class Workers:
    """The workers of one agent."""

    def __init__(self, count: int, restarts: bool) -> None:
        self._count = count  # how many the agent will start
        self._restarts = restarts  # whether it may start them again
        self._by_pid: dict[int, Worker] = {}

    def get(self, pid: int) -> Worker | None:
        """Return the worker that had this pid last."""
        return self._by_pid.get(pid)

    def living(self) -> list[int]:
        """Return the pids of those that have not ended."""
        return [worker.pid for worker in self._by_pid.values() if worker.is_alive]

    @property
    def any_reaped(self) -> bool:
        """Whether torchrun has reaped one before its exit code could be read."""
        return any(worker.reaped for worker in self._by_pid.values())

    def expects_more(self) -> bool:
        """Return whether the agent has not started all its workers yet, or may start them again."""
        return len(self.living() if self._restarts else self._by_pid) < self._count

    @property
    def pause_s(self) -> float:
        """Seconds until the next search."""
        return SEARCH_S if self.expects_more() else WATCH_S

    def find(self, agent: int) -> list[Worker]:
        """Return the workers that are new among the children of process `agent`."""
        found = []
        for pid in processes.children_of_main_thread(agent):  # where torchrun starts its workers
            known, env = self._by_pid.get(pid), processes.environment(pid)
            # Between fork and exec a child still shows its parent's environment, without a rank.
            if (known is None or not known.is_alive) and "RANK" in env and "LOCAL_RANK" in env:
                found.append(self._add(int(env["RANK"]), int(env["LOCAL_RANK"]), pid))
        return found

    def add_told(self, rank: int, local_rank: int, pid: int) -> list[Worker]:
        """Add a worker that the agent has listed; return it, unless it is known."""
        known = self._by_pid.get(pid)
        return [] if known is not None and known.is_alive else [self._add(rank, local_rank, pid)]

    def _add(self, rank: int, local_rank: int, pid: int) -> Worker:
        worker = self._by_pid[pid] = Worker(rank, local_rank, pid)
        return worker


class FrozenWatch:
    """Finds processes that another program has stopped (SIGSTOP) and not continued in time.

    A frozen worker keeps all others waiting, a frozen agent never ends, and a frozen task reads no messages of its gang.
    A process under a debugger has another state (t).
    """

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._since: dict[int, float] = {}
        self._looked_at = 0.0

    def overdue(self, pids: Iterable[int], now: float) -> list[int]:
        """Return those of `pids` that have been frozen for too long, each once; `now` is the monotonic clock."""
        since_last = now - self._looked_at
        if since_last < WATCH_S / 2:  # too soon to check again
            return []
        self._looked_at = now
        if since_last > 4 * WATCH_S:  # we were frozen ourselves, perhaps as part of a whole container
            self._since.clear()
        return [pid for pid in pids if self._is_overdue(pid, now)]

    def _is_overdue(self, pid: int, now: float) -> bool:
        process = processes.find(pid)
        if process is None or process.state != "T":
            self._since.pop(pid, None)
        elif now - self._since.setdefault(pid, now) >= self._silence_s:
            self._since[pid] = float("inf")  # reported once
            return True
        return False
