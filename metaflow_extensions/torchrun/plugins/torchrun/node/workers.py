"""Finds the workers of an agent, and processes that somebody has frozen. The guardian uses it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from ..machine import processes
from ..machine.libc import FolderWatch

SEARCH_S = 0.05  # between looks while workers appear
WATCH_S = 0.5  # between looks while none appear, or all are known
_SLOWER = 1.05  # a factor that makes of the former the latter within 10 s


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

    def facts(self) -> dict[str, Any]:
        """Return what every event about it says."""
        return {"rank": self.rank, "local_rank": self.local_rank, "pid": self.pid, "began": self.began}


class Workers:
    """The workers of one agent."""

    def __init__(self, count: int, restarts: bool, log_dir: str) -> None:
        self._count = count  # how many the agent will start
        self._restarts = restarts  # whether it may start them again
        self._log_dir = log_dir  # torchrun's --log-dir
        self._by_pid: dict[int, Worker] = {}
        self._unrelated: set[int] = set()  # pids that are known to be no children of the agent
        self._search_s = SEARCH_S
        self.folders = FolderWatch()
        self._watch_folders()

    def get(self, pid: int) -> Worker | None:
        """Return the worker that had this pid last."""
        return self._by_pid.get(pid)

    def living(self) -> list[int]:
        """Return the pids of those that have not ended."""
        return [worker.pid for worker in self._by_pid.values() if worker.is_alive]

    @property
    def any_reaped(self) -> bool:
        """Whether torchrun has reaped one before we could see how it ended."""
        return any(worker.reaped for worker in self._by_pid.values())

    def expects_more(self) -> bool:
        """Tell whether the agent has not started all its workers yet, or may start them again."""
        return len(self.living() if self._restarts else self._by_pid) < self._count

    @property
    def pause_s(self) -> float:
        """Seconds until the next look.

        An agent takes minutes to import torch where a pod has a tenth of a CPU, and we share that. So we look ever more
        seldom, until a worker appears or torchrun makes a folder.
        """
        return self._search_s if self.expects_more() else WATCH_S

    def find(self, agent: int) -> list[Worker]:
        """Return the workers that are new among the children of process `agent`."""
        self._search_s = min(self._search_s * _SLOWER, WATCH_S)
        pids, found = set(processes.pids()), []
        self._unrelated &= pids  # whoever gets the number of one that is gone is somebody else
        for pid in pids - self._unrelated:
            process, known = processes.find(pid), self._by_pid.get(pid)
            if process is None or process.parent != agent:
                self._unrelated.add(pid)
            elif known is None or not known.is_alive:
                found += self._recognised(pid)
        if found:
            self._search_s = SEARCH_S  # their siblings come now
        return found

    def _recognised(self, pid: int) -> list[Worker]:
        env = processes.environment(pid)
        # Between fork and exec a child still shows its parent's environment, without a rank.
        if "RANK" not in env or "LOCAL_RANK" not in env:
            return []
        self._by_pid[pid] = Worker(int(env["RANK"]), int(env["LOCAL_RANK"]), pid)
        return [self._by_pid[pid]]

    def on_folder_made(self) -> None:
        """Look often again: torchrun is about to start workers."""
        self.folders.drain()
        self._watch_folders()  # a restart's is below that of the first start
        self._search_s = SEARCH_S

    def _watch_folders(self) -> None:
        """Be woken when torchrun makes folders for its workers' output.

        It does so right before it starts them (`reify` in ``torch/distributed/elastic/multiprocessing/api.py``, 2.13).
        Where that can't be watched, or another version does otherwise, we find them a moment later.
        """
        with suppress(OSError), os.scandir(self._log_dir) as entries:
            self.folders.add([self._log_dir, *(entry.path for entry in entries if entry.is_dir())])


class FrozenWatch:
    """Finds processes that somebody else has stopped (SIGSTOP) and not continued in time.

    A frozen worker keeps all others waiting, a frozen agent never ends, and a frozen task does not hear its gang. A
    debugger's stop is another state (t).
    """

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._since: dict[int, float] = {}
        self._looked_at = 0.0

    def look(self, pids: Iterable[int], now: float) -> list[int]:
        """Return those of `pids` that have been frozen for too long, each once; `now` is the monotonic clock."""
        since_last = now - self._looked_at
        if since_last < WATCH_S / 2:  # too soon to look again
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
            self._since[pid] = float("inf")  # told once
            return True
        return False
