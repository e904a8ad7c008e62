"""Measures the CPU, memory and network that this node uses: its container, or its launch's processes.

A container has its own cgroup, with everything that counts towards its limits. Elsewhere a cgroup contains other
programs too, and nodes of one machine share it: there the processes of the launch are added up. This is for version 2
of cgroups; with version 1, processes are added up in containers, too.
"""

from __future__ import annotations

import os
import re

from ..machine.processes import children_of_main_thread, read

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def of_container(folder: str) -> tuple[float | None, int | None]:
    """Return the core seconds that a container has used so far, and its memory in bytes, from its cgroup.

    As in Kubernetes, memory excludes cached files that the kernel can drop at once.
    """
    cpu_us = _number(folder, "cpu.stat", "usage_usec ")
    memory, files = _number(folder, "memory.current"), _number(folder, "memory.stat", "inactive_file ") or 0
    return None if cpu_us is None else cpu_us / 1e6, None if memory is None else max(0, memory - files)


def _number(folder: str, file: str, before: str = "") -> int | None:
    found = re.search(rf"^{before}(\d+)$", read(os.path.join(folder, file)), re.MULTILINE)
    return None if found is None else int(found[1])


def of_processes(root: int) -> tuple[float | None, int | None]:
    """Return the same for a process and its descendants, without shared memory.

    Orphans and children of other threads than the main one are not included: finding them requires reading the whole
    process table.
    """
    if not os.path.exists(f"/proc/{root}"):
        return None, None
    ticks, pages, found = 0, 0, [root]
    for pid in found:  # it grows meanwhile
        found += children_of_main_thread(pid)
        # See proc(5). The second field may contain spaces and parentheses, so fields[0] is the third.
        fields = read(f"/proc/{pid}/stat").rpartition(")")[2].split()
        # Its own time and that of its ended children. So ended processes are counted, and only once.
        ticks += sum(map(int, fields[11:15]))
        sizes = read(f"/proc/{pid}/statm").split()
        pages += int(sizes[1]) - int(sizes[2]) if sizes else 0
    return ticks / _TICKS_PER_S, pages * _PAGE_BYTES


def traffic(root: str = "/") -> tuple[int, int] | None:
    """Return the bytes received and sent by all interfaces but the loopback; None if unknown.

    Linux counts IP traffic, not that of InfiniBand and AWS's EFA. Bridges and other virtual interfaces forward what a
    real interface has counted. So only real interfaces count, if there are any.
    """
    # Two header lines, then lines like "  eth0: BYTES PACKETS …": eight numbers for received, eight for sent.
    lines = (line.rpartition(":") for line in read(os.path.join(root, "proc/net/dev")).splitlines()[2:])
    found = {name.strip(): numbers.split() for name, _, numbers in lines}
    found.pop("lo", None)
    real = {name for name in found if os.path.exists(os.path.join(root, "sys/class/net", name, "device"))}
    counted = [found[name] for name in real or found]
    if not counted:
        return None
    return sum(int(each[0]) for each in counted), sum(int(each[8]) for each in counted)
