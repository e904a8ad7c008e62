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
        self._looks: list[tuple[float, float, int]] = []
        self.look()
        self._began = self._of_children()

    def look(self) -> None:
        """End a window."""
        pid = self._process.pid
        # The kernel's clock of another process's CPU time, in nanoseconds (clock_getcpuclockid(3)).
        self._looks.append((time.monotonic(), time.clock_gettime((~pid << 3) | 2), _wakeups(pid)))

    def _of_children(self) -> float:
        times = self._process.cpu_times()
        return times.children_user + times.children_system

    def figures(self) -> dict[str, tuple[list[float], str]]:
        """Return values and unit of all that it has used: CPU of each window, the rest over all or now."""
        seconds, memory = self._looks[-1][0] - self._looks[0][0], self._process.memory_full_info()
        cpu = [100 * (after[1] - before[1]) / (after[0] - before[0]) for before, after in pairwise(self._looks)]
        return {
            "CPU": (cpu, "%"),  # of a core
            "wakeups": ([(self._looks[-1][2] - self._looks[0][2]) / seconds], "/s"),
            "threads": ([self._process.num_threads()], ""),
            "RSS": ([memory.rss / 1e6], "MB"),
            "PSS": ([memory.pss / 1e6], "MB"),
            # Those that it has started and waited for.
            "CPU of processes that have ended": ([100 * (self._of_children() - self._began) / seconds], "%"),
        }


def _wakeups(pid: int) -> int:
    """Return how often the living threads of a process have waited for something and gone on."""
    texts = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/status")]
    return sum(int(text.partition("\nvoluntary_ctxt_switches:")[2].split()[0]) for text in texts)
