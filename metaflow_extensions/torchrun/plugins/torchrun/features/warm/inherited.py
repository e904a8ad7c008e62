"""What a process hands on to those that it starts, besides its environment and its folder."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from contextlib import suppress

from ...machine.processes import read

_LIMITS = sorted(name for name in dir(resource) if name.startswith("RLIMIT_"))
_NAMESPACES = "/proc/self/ns"


def inherited() -> dict[str, str]:
    """Return it, of the thread that calls; the same texts mean the same for what is started."""
    limits = {name: str(resource.getrlimit(getattr(resource, name))) for name in _LIMITS}
    return {
        **limits,
        "user and groups": _ids(),
        "cgroup": read("/proc/self/cgroup"),
        "OOM score": read("/proc/self/oom_score_adj"),
        "root folder": _link("/proc/self/root"),
        **_scheduling(),
        **_namespaces(),
    }


def _ids() -> str:
    groups = sorted(os.getgroups())
    try:
        return f"{os.getresuid()} {os.getresgid()} {groups}"
    except AttributeError:  # not everywhere
        return f"{os.getuid(), os.geteuid()} {os.getgid(), os.getegid()} {groups}"


def _scheduling() -> dict[str, str]:
    found = {"priority": str(os.getpriority(os.PRIO_PROCESS, 0))}
    with suppress(AttributeError, OSError):  # not everywhere
        found["CPU affinity"] = str(sorted(os.sched_getaffinity(0)))
        found["scheduling policy"] = str(os.sched_getscheduler(0))
    return found


def _namespaces() -> dict[str, str]:
    names = os.listdir(_NAMESPACES) if os.path.isdir(_NAMESPACES) else []
    return {f"{name} namespace": _link(os.path.join(_NAMESPACES, name)) for name in names}


def _link(path: str) -> str:
    with suppress(OSError):
        return os.readlink(path)
    return ""


def difference(before: Mapping[str, str], now: Mapping[str, str]) -> str | None:
    """Return what of it has changed, in words; None if it is the same."""
    changed = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
    return f"{', '.join(changed)} changed after the step had begun" if changed else None


def umask() -> int:
    """Return the umask of this process, without changing it for its other threads (Linux 4.7)."""
    fields = dict(line.partition(":")[::2] for line in read("/proc/self/status").splitlines())
    if "Umask" in fields:
        return int(fields["Umask"], 8)
    found = os.umask(0o077)
    os.umask(found)
    return found
