"""Measures the usage of this node while the workers of one generation run, without help from the workers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

from ..gang.wire import Plain
from ..machine.cgroup import container_folder, memory_limit_bytes
from .consumption import of_container, of_processes, traffic
from .nvidia import NvidiaSmi
from .observers import Here, Observer

_FIRST_S = 1.0  # so that a card shows something soon
# How often a node of a small gang measures, and of a large one at most: each sample wakes the control node.
STEP_S, SAMPLES_PER_S = 5.0, 10
_MIB, _KIB = 2**20, 2**10

_Totals: TypeAlias = dict[str, float]
"""The totals so far, by the kind of the rate computed from them; unknown ones are missing."""


class UsageObserver(Observer):
    """Measures the node while the agent runs, the root of all processes of a launch."""

    def __init__(self, here: Here, clock: Callable[[], float] = time.monotonic) -> None:
        call = here.call
        self._here, self._clock = here, clock
        # Nodes of one machine share its cgroup and its network counters.
        self._shares_machine = call.shares_machine
        self._container = None if self._shares_machine else container_folder()
        self._gpus = NvidiaSmi(call.machine.seen_by(call.env))
        memory = memory_limit_bytes()
        self._limits: dict[str, float] = {"cpus": call.machine.cpus}
        if memory is not None:
            self._limits["memory_mib"] = round(memory / _MIB)
        self._step_s = max(STEP_S, call.num_nodes / SAMPLES_PER_S)
        self._due_at = float("-inf")
        self._before: tuple[float, _Totals] | None = None  # the time and totals of the last sample

    def poll(self) -> Plain | None:
        """Return the usage since the last sample, if the next one is due."""
        now, pid = self._clock(), self._here.pid()
        if pid is None or now < self._due_at:
            return None
        totals, memory_bytes = self._measure(pid)
        before, self._before = self._before, (now, totals)
        if before is None:
            self._due_at = now + _FIRST_S
            return None
        # At fixed times, so that each part of a series gets one sample. Missed samples are not repeated.
        self._due_at = max(self._due_at + self._step_s, now)
        values = _rates(*before, now, totals)
        if memory_bytes is not None:
            values["memory_mib"] = memory_bytes / _MIB
        values |= self._of_gpus(now)
        return {
            "of": "processes" if self._container is None else "container",  # whose CPU and memory it is
            "values": {kind: round(value, 3) for kind, value in values.items()},  # those that could be measured
            "limits": dict(self._limits),
        }

    def close(self) -> None:
        """Stop measuring; safe to call more than once."""
        self._gpus.close()

    def _measure(self, pid: int) -> tuple[_Totals, int | None]:
        """Return the totals so far, and the memory in use now."""
        cpu_s, memory_bytes = of_processes(pid) if self._container is None else of_container(self._container)
        found = {"cpus": cpu_s, "output_bytes_s": self._here.written()}
        network = None if self._shares_machine else traffic()
        if network is not None:
            found["received_kib_s"], found["sent_kib_s"] = (count / _KIB for count in network)
        return {kind: value for kind, value in found.items() if value is not None}, memory_bytes

    def _of_gpus(self, now: float) -> dict[str, float]:
        gpus = self._gpus.look(now)
        if gpus is None:
            return {}
        self._limits["gpus"] = gpus.count
        if gpus.memory_total_mib is not None:
            self._limits["gpu_memory_mib"] = gpus.memory_total_mib
        values = {"gpu_percent": gpus.percent, "gpu_memory_mib": gpus.memory_mib}
        return {kind: value for kind, value in values.items() if value is not None}


def _rates(began: float, before: _Totals, now: float, after: _Totals) -> dict[str, float]:
    """Return the rates per second; a total that has fallen, as after the loss of a process, counts as 0."""
    seconds = max(now - began, 1e-3)
    return {kind: max(0.0, after[kind] - before[kind]) / seconds for kind in before.keys() & after.keys()}
