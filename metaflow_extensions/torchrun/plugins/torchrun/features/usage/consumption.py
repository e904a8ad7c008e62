"""What CPU and memory this node uses: its container, or its launch's processes.

A container has cgroups of its own, and all that counts for its limits is in them. Elsewhere a cgroup holds other
programs as well, and nodes of one machine share it. There the processes of the launch are added up. Made for Linux;
elsewhere nothing is measured.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from ...machine.cgroup import container_folder
from ...machine.processes import read

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Used:
    """What has been used so far; None is not known."""

    cpu_s: float | None = None  # seconds of one core, since whenever
    memory_bytes: int | None = None  # now


class Container:
    """The cgroups of this task's own container; `find` returns it, or None where there is none."""

    def __init__(self, cpu: Callable[[], float | None], memory: Callable[[], int | None]) -> None:
        self._cpu, self._memory = cpu, memory

    def look(self) -> Used:
        """Return what all of the container has used."""
        return Used(self._cpu(), self._memory())

    @staticmethod
    def find(root: str = "/") -> Container | None:
        """Look for cgroups of version 2, then of version 1."""
        second = container_folder("", "memory.current", root)
        if second is not None:
            return Container(
                lambda: _scaled(_field(read(f"{second}/cpu.stat"), "usage_usec"), 1e-6),
                lambda: _working_set(f"{second}/memory.current", f"{second}/memory.stat", "inactive_file"),
            )
        cpu = container_folder("cpuacct", "cpuacct.usage", root)
        memory = container_folder("memory", "memory.usage_in_bytes", root)
        if cpu is None or memory is None:
            return None
        return Container(
            lambda: _scaled(_number(read(f"{cpu}/cpuacct.usage")), 1e-9),
            lambda: _working_set(f"{memory}/memory.usage_in_bytes", f"{memory}/memory.stat", "total_inactive_file"),
        )


def _working_set(current: str, stat: str, cache: str) -> int | None:
    """Return the memory without the files' contents that the kernel can drop at once, as Kubernetes counts it."""
    used = _number(read(current))
    return None if used is None else max(0, used - (_field(read(stat), cache) or 0))


class ProcessTree:
    """A process and all that descends from it.

    To read the whole process table takes milliseconds. So it is remembered which processes are others', and of those
    nothing is read again. An orphan stays in the tree: the guardian, which is its root, adopts it.
    """

    def __init__(self, pid: int, proc: str = "/proc") -> None:
        self._root, self._proc = pid, proc
        self._is_ours: dict[int, bool] = {}

    def look(self) -> Used:
        """Return what its processes have used; the memory is what they share with nobody."""
        ticks, pages = 0, 0
        for pid in self._find():
            fields = self._fields(pid)
            # Its own, and that of its children that have ended; so what has ended is not lost, and not counted twice.
            ticks += sum(map(int, fields[11:15]))
            sizes = _line(f"{self._proc}/{pid}/statm").split()
            pages += int(sizes[1]) - int(sizes[2]) if len(sizes) > 2 else 0
        return Used(ticks / _TICKS_PER_S, pages * _PAGE_BYTES)

    def _find(self) -> list[int]:
        here = {int(name) for name in os.listdir(self._proc) if name.isdigit()}
        for gone in self._is_ours.keys() - here:
            del self._is_ours[gone]
        parents = {pid: self._parent(pid) for pid in here - self._is_ours.keys()}
        for pid in parents:
            line = [pid]
            while line[-1] in parents and line[-1] not in self._is_ours and line[-1] != self._root:
                line.append(parents[line[-1]])
            is_ours = line[-1] == self._root or self._is_ours.get(line[-1], False)
            self._is_ours.update(dict.fromkeys((each for each in line if each in parents), is_ours))
        return [pid for pid, is_ours in self._is_ours.items() if is_ours]

    def _parent(self, pid: int) -> int:
        fields = self._fields(pid)
        return int(fields[1]) if fields else 0

    def _fields(self, pid: int) -> list[bytes]:
        """Return what stat says, see proc(5), from the third field on: the second may hold spaces and parentheses."""
        return _line(f"{self._proc}/{pid}/stat").rpartition(b")")[2].split()


def _line(path: str) -> bytes:
    """Return the short text of a file of the kernel; a third of the time of `read`, which matters for many."""
    with suppress(OSError):
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(file, 4096)
        finally:
            os.close(file)
    return b""


def _field(text: str, name: str) -> int | None:
    found = re.search(rf"^{re.escape(name)}\s+(\d+)", text, re.MULTILINE)
    return None if found is None else int(found[1])


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdigit() else None


def _scaled(value: int | None, factor: float) -> float | None:
    return None if value is None else value * factor
