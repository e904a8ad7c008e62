"""What this node uses while the workers of one generation run.

The supervisor asks, in the thread that calls `run`; the workers notice nothing of it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from ...logs.follower import LogFollower, new_logs
from ...machine.memory import memory_limit_bytes
from ...node.plan import Plan
from .consumption import Container, ProcessTree
from .nvidia import Gpus, NvidiaSmi
from .series import step_s
from .traffic import traffic

_FIRST_S = 1.0  # so that a card shows something soon
_MIB, _KIB = 2**20, 2**10


@dataclass(frozen=True)
class Used:
    """What this node uses now, or has used since the last time."""

    of: str  # whose CPU and memory it is: "container", or the launch's "processes"
    values: dict[str, float] = field(default_factory=dict)  # by `series.KINDS`; what is not measured is left out
    limits: dict[str, float] = field(default_factory=dict)  # by `series.LIMITS`


class _Totals(NamedTuple):
    """What has been used in all until now, by the names of the rates that are made of it; None is not known."""

    at: float
    values: dict[str, float | None]


class UsageMeter:
    """Measures one generation on this node; `look` is called now and then, in one thread."""

    def __init__(
        self,
        plan: Plan,
        log_dir: str,
        follower: LogFollower,
        guardian: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log_dir = log_dir
        self._logs: set[str] = set()  # the workers' files that are there
        self._clock = clock
        # Nodes of one machine can't be told apart by its cgroups, or by its network.
        self._shares_machine = plan.shares_machine
        container = None if self._shares_machine else Container.find()
        self._of = "processes" if container is None else "container"
        self._meter = container or ProcessTree(guardian)
        shows_all = all(plan.label(local_rank) is not None for local_rank in range(plan.spec.nproc))
        self._follower = follower if shows_all else None
        self._gpus = NvidiaSmi(gpus_of(plan))
        self._limits = _limits(plan)
        self._before, self._memory = self._totals()
        self._step_s = step_s(plan.spec.num_nodes)
        self._due_at = self._before.at + _FIRST_S

    def look(self) -> Used | None:
        """Return what was used since the last time, or None if it is not time yet."""
        now = self._clock()
        if now < self._due_at:
            return None
        # At fixed times, so that each part of a series gets one; but none is made up for.
        self._due_at = max(self._due_at + self._step_s, now)
        before, (self._before, self._memory) = self._before, self._totals()
        values = _rates(before, self._before)
        if self._memory is not None:
            values["memory_mib"] = self._memory / _MIB
        gpus = self._gpus.look(now)
        if gpus is not None:
            values.update(_of_gpus(gpus))
            self._limits["gpus"] = gpus.count
            if gpus.memory_total_mib is not None:
                self._limits["gpu_memory_mib"] = gpus.memory_total_mib
        return Used(self._of, {kind: round(value, 3) for kind, value in values.items()}, dict(self._limits))

    def close(self) -> None:
        """Measure no more; safe to call more than once."""
        self._gpus.close()

    def _totals(self) -> tuple[_Totals, int | None]:
        """Return what has been used in all until now, and the memory that is used now."""
        used = self._meter.look()
        network = None if self._shares_machine else traffic()
        values = {
            "cpus": used.cpu_s,
            "received_kib_s": None if network is None else network.received / _KIB,
            "sent_kib_s": None if network is None else network.sent / _KIB,
            "output_bytes_s": self._written(),
            "output_lines_s": None if self._follower is None else self._follower.shown_lines,
        }
        return _Totals(self._clock(), values), used.memory_bytes

    def _written(self) -> int:
        """Return how many bytes all workers have written, also those whose lines are not shown."""
        self._logs.update(path for path, _, _ in new_logs(self._log_dir, self._logs))
        total = 0
        for path in self._logs:
            with suppress(OSError):
                total += os.stat(path).st_size
        return total


def gpus_of(plan: Plan) -> tuple[str, ...]:
    """Return the accelerators that the workers of this node see, as ``CUDA_VISIBLE_DEVICES`` names them."""
    return plan.machine.seen_by(dict(plan.spec.env))


def _limits(plan: Plan) -> dict[str, float]:
    memory = memory_limit_bytes()
    return {"cpus": plan.machine.cpus, **({} if memory is None else {"memory_mib": round(memory / _MIB)})}


def _rates(before: _Totals, after: _Totals) -> dict[str, float]:
    """Return how much of each was used in a second; a total that has fallen, as of a process lost, counts as none."""
    seconds = max(after.at - before.at, 1e-3)
    found = {}
    for kind, value in after.values.items():
        earlier = before.values[kind]
        if value is not None and earlier is not None:
            found[kind] = max(0.0, value - earlier) / seconds
    return found


def _of_gpus(gpus: Gpus) -> dict[str, float]:
    values = {"gpu_percent": gpus.percent, "gpu_memory_mib": gpus.memory_mib}
    return {kind: value for kind, value in values.items() if value is not None}
