"""What one process uses while it runs: CPU, wakeups, threads and memory, as the kernel counts them."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path

import psutil


class Meter:
    """Looks at one process now and then; each look ends a window."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._looks = [self._look()]
        self._began = self._of_children()

    def look(self) -> None:
        """End a window."""
        self._looks.append(self._look())

    def _look(self) -> tuple[float, float, int]:
        pid = self._process.pid
        # The kernel's clock of another process's CPU time, in nanoseconds (clock_getcpuclockid(3)).
        return time.monotonic(), time.clock_gettime((~pid << 3) | 2), _wakeups(pid)

    def _of_children(self) -> float:
        times = self._process.cpu_times()
        return times.children_user + times.children_system

    @property
    def seconds(self) -> float:
        """Between the first look and the last."""
        return self._looks[-1][0] - self._looks[0][0]

    def cpu_percent(self) -> list[float]:
        """Return how much of a core it has used in each window, in %."""
        return [100 * (after[1] - before[1]) / (after[0] - before[0]) for before, after in pairwise(self._looks)]

    def cpu_of_ended_children(self) -> float:
        """Return what those processes have used that it has started and waited for, in % of a core."""
        return 100 * (self._of_children() - self._began) / self.seconds

    def wakeups_per_s(self) -> float:
        """Return how often in a second a thread has waited for something and gone on."""
        return (self._looks[-1][2] - self._looks[0][2]) / self.seconds

    def threads(self) -> int:
        """Return how many threads it has now."""
        return int(self._process.num_threads())

    def memory_mb(self) -> tuple[float, float]:
        """Return its RSS and its PSS now."""
        memory = self._process.memory_full_info()
        return memory.rss / 1e6, memory.pss / 1e6


def _wakeups(pid: int) -> int:
    """Return how often the living threads of a process have waited for something and gone on."""
    texts = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/status")]
    return sum(int(text.partition("\nvoluntary_ctxt_switches:")[2].split()[0]) for text in texts)
