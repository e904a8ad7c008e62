"""Measures what this node uses while the workers of one generation run, without help from the workers.

A container has its own cgroup, with everything that counts towards its limits. Elsewhere a cgroup contains other
programs too, and nodes of one machine share it: there the processes of the launch are added up.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress

from ..gang.wire import Plain
from ..machine.cgroup import container_folder, memory_limit_bytes
from ..machine.processes import HELPERS, children, read
from .workers import Workers

_FIRST_S = 1.0  # so that a card shows something soon
# How often a node of a small gang measures, and of a large one at most: each sample wakes the control node.
STEP_S, SAMPLES_PER_S = 5.0, 10
# Each run of nvidia-smi takes a part of a second of CPU, and seconds if the driver is loaded for it.
_GPUS_EVERY_S = 20.0
_MIB = 2**20
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class UsageObserver:
    """Measures the node while the agent runs, the root of all processes of a launch."""

    def __init__(self, workers: Workers, clock: Callable[[], float] = time.monotonic) -> None:
        call = workers.call
        self._workers, self._clock = workers, clock
        self._container = None if call.shares_machine else container_folder()
        self._limits: dict[str, float] = {"cpus": call.machine.cpus}
        if (memory := memory_limit_bytes()) is not None:
            self._limits["memory_mib"] = round(memory / _MIB)
        self._step_s = max(STEP_S, call.num_nodes / SAMPLES_PER_S)
        self._due_at = float("-inf")
        self._before: tuple[float, float] | None = None  # time and core seconds of the last sample
        self._gpus = _Gpus(call.machine.seen_by(call.env))

    def poll(self) -> Plain | None:
        """Return the usage since the last sample, if the next one is due."""
        now, pid = self._clock(), self._workers.agent.pid
        if pid is None or now < self._due_at:
            return None
        cpu_s, memory_bytes = of_processes(pid) if self._container is None else of_container(self._container)
        before, self._before = self._before, (now, cpu_s)
        if before is None:
            self._due_at = now + _FIRST_S
            return None
        self._due_at = now + self._step_s
        # A total that has fallen, as after the loss of a process, counts as 0.
        cpus = max(0.0, cpu_s - before[1]) / max(now - before[0], 1e-3)
        values = {"cpus": cpus, "memory_mib": memory_bytes / _MIB, **self._gpus.poll(now)}
        self._limits |= {name: values.pop(limit) for name, limit in _GPU_LIMITS.items() if limit in values}
        return {
            "of": "processes" if self._container is None else "container",  # whose CPU and memory it is
            "values": {kind: round(value, 3) for kind, value in values.items()},
            "limits": dict(self._limits),
        }


def of_container(folder: str) -> tuple[float, int]:
    """Return the core seconds that a container has used so far, and its memory in bytes, from its cgroup.

    As in Kubernetes, memory excludes cached files that the kernel can drop at once.
    """
    memory, files = _number(folder, "memory.current"), _number(folder, "memory.stat", "inactive_file ")
    return _number(folder, "cpu.stat", "usage_usec ") / 1e6, max(0, memory - files)


def _number(folder: str, file: str, before: str = "") -> int:
    found = re.search(rf"^{before}(\d+)$", read(os.path.join(folder, file)), re.MULTILINE)
    return 0 if found is None else int(found[1])


def of_processes(root: int) -> tuple[float, int]:
    """Return the same for a process and its descendants, without shared memory.

    Orphans and children of other threads than the main one are not included: finding them requires reading the whole
    process table.
    """
    ticks, pages, found = 0, 0, [root]
    for pid in found:  # it grows meanwhile
        found += children(pid, of_main_thread=True)
        # See proc(5). The second field may contain spaces and parentheses, so fields[0] is the third.
        fields = read(f"/proc/{pid}/stat").rpartition(")")[2].split()
        # Its own time and that of its ended children. So ended processes are counted, and only once.
        ticks += sum(map(int, fields[11:15]))
        sizes = read(f"/proc/{pid}/statm").split()
        pages += int(sizes[1]) - int(sizes[2]) if sizes else 0
    return ticks / _TICKS_PER_S, pages * _PAGE_BYTES


# --- GPUs ---------------------------------------------------------------------------------------

_GPU_VALUES = {"gpu_percent": "utilization.gpu", "gpu_memory_mib": "memory.used", "gpu_total_mib": "memory.total"}
_GPU_LIMITS = {"gpus": "gpu_count", "gpu_memory_mib": "gpu_total_mib"}


class _Gpus:
    """What ``nvidia-smi`` says of the GPUs that workers see; it comes with the driver. Nothing waits for it."""

    _smi: subprocess.Popen[bytes] | None = None  # of the supervisor: the next generation may find one that hangs

    def __init__(self, seen: tuple[str, ...]) -> None:
        self._program = shutil.which("nvidia-smi") if seen else None
        asked = [f"--id={','.join(seen)}", f"--query-gpu={','.join(_GPU_VALUES.values())}"]
        self._argv = ["nvidia-smi", *asked, "--format=csv,noheader,nounits"]
        self._due_at = float("-inf")

    def poll(self, now: float) -> dict[str, float]:
        """Return what it has said since the last call, and start it again if that is due."""
        found, smi = dict[str, float](), _Gpus._smi
        if smi is not None and smi.poll() is not None and smi.stdout is not None:
            with smi.stdout as said, suppress(BlockingIOError):  # what a wrapper has left may hold its end
                os.set_blocking(said.fileno(), False)
                found = sum_of_gpus(os.read(said.fileno(), 65536).decode(errors="replace"))
            HELPERS.discard(smi.pid)
            _Gpus._smi = None
        if self._program is not None and now >= self._due_at:
            self._due_at = now + _GPUS_EVERY_S
            if _Gpus._smi is not None:  # it hangs
                os.killpg(_Gpus._smi.pid, signal.SIGKILL)
            else:
                self._ask(self._program)
        return found

    def _ask(self, program: str) -> None:
        with suppress(OSError):
            smi = _Gpus._smi = subprocess.Popen(
                self._argv,
                executable=program,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in the terminal must not end it
            )
            HELPERS.add(smi.pid)  # a launch that ends neither waits for it nor tells of it


def sum_of_gpus(text: str) -> dict[str, float]:
    """Return their usage together from the program's output; a value is missing as for a slice of a GPU (MIG)."""
    rows = [[value.strip() for value in line.split(",")] for line in text.splitlines()]
    rows = [row for row in rows if len(row) == len(_GPU_VALUES)]
    columns = zip(_GPU_VALUES, zip(*rows, strict=True), strict=False)
    found = {kind: float(sum(map(int, column))) for kind, column in columns if all(map(str.isdecimal, column))}
    if "gpu_percent" in found:
        found["gpu_percent"] /= len(rows)
    return {**found, "gpu_count": len(rows)} if found else {}
