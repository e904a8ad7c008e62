"""Processes that another program has stopped (SIGSTOP)."""

from __future__ import annotations

from collections.abc import Iterable

from . import processes
from .looks import WATCH_S

STOPPED = "was stopped by a signal (SIGSTOP or the like) and not continued for"
"""Says so; the number of seconds follows."""


def is_stopped_with_parent(pid: int) -> bool:
    """Return whether a task and its parent are stopped, as by Ctrl-Z on a local run: whoever does so goes on later.

    Ctrl-Z does not reach workers, which are in sessions of their own. They go on until their pipes are full.
    """
    task = processes.find(pid)
    parent = None if task is None or task.state != "T" else processes.find(task.parent)
    return parent is not None and parent.state == "T"


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
        pids = list(pids)
        self._since = {pid: since for pid, since in self._since.items() if pid in pids}
        return [pid for pid in pids if self._is_overdue(pid, now)]

    def _is_overdue(self, pid: int, now: float) -> bool:
        process = processes.find(pid)
        if process is None or process.state != "T":
            self._since.pop(pid, None)
        elif now - self._since.setdefault(pid, now) >= self._silence_s:
            self._since[pid] = float("inf")  # reported once
            return True
        return False
