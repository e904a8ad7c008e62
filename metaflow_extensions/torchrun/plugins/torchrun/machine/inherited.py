"""What a process inherits from the one that starts it, so that workers have it from the task and not from a helper."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from .processes import read

_LIMITS = sorted({name for name in dir(resource) if name.startswith("RLIMIT_")} - {"RLIMIT_OFILE"})  # NOFILE's old name
_OOM = "/proc/self/oom_score_adj"


def inherited() -> dict[str, Any]:
    """Return the limits, user, cgroup, priority and CPUs of the calling thread, as plain data."""
    return {
        **{name: list(resource.getrlimit(getattr(resource, name))) for name in _LIMITS},
        "user and groups": f"{os.geteuid(), os.getegid()} {sorted(os.getgroups())}",
        "cgroup": read("/proc/self/cgroup"),
        "priority": os.getpriority(os.PRIO_PROCESS, 0),
        "oom_score_adj": read(_OOM),
        "CPU affinity": sorted(os.sched_getaffinity(0)),
    }


def umask() -> int:
    """Return the umask of this process from /proc (Linux 4.7). `os.umask` would change it for all threads."""
    fields = dict(line.partition(":")[::2] for line in read("/proc/self/status").splitlines())
    return int(fields["Umask"], 8)


def give(pid: int, told: Mapping[str, Any]) -> None:
    """Give a process that has just begun what another one has `inherited`, as far as it may; its user and cgroup stay.

    A limit that only root may raise stays as it is.
    """
    for name, limits in told.items():
        with suppress(ValueError, OSError):
            if name.startswith("RLIMIT_") and resource.prlimit(pid, number := getattr(resource, name)) != tuple(limits):
                resource.prlimit(pid, number, tuple(limits))
    with suppress(OSError):
        if os.getpriority(os.PRIO_PROCESS, pid) != told["priority"]:
            os.setpriority(os.PRIO_PROCESS, pid, told["priority"])
    with suppress(OSError):
        if sorted(os.sched_getaffinity(pid)) != told["CPU affinity"]:
            os.sched_setaffinity(pid, told["CPU affinity"])
    if told["oom_score_adj"] != read(oom := f"/proc/{pid}/oom_score_adj"):
        with suppress(OSError), open(oom, "w", encoding="ascii") as file:
            file.write(told["oom_score_adj"])
