"""This node's memory limit, and the kernel's count of out-of-memory kills."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from .cgroup import own_folders
from .processes import read

# Version 2 of cgroups, then version 1.
_KILLS = ("memory.events", "memory.oom_control")
_LIMITS = ("memory.max", "memory.limit_in_bytes")
_NO_LIMIT = 2**60  # version 1 writes a number near 2**63 for "none"


def oom_kills(root: str = "/") -> int | None:
    """Return how many processes of this cgroup the kernel has killed for lack of memory; None without such a counter.

    The counter is ``oom_kill`` of ``memory.events`` or ``memory.oom_control`` (Linux,
    ``Documentation/admin-guide/cgroup-v2.rst`` and ``cgroup-v1/memory.rst``).
    """
    # The first that counts: a process counts where it lies and, in version 2 only, in all groups above.
    for text in _texts(_KILLS, root):
        found = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
        if found:
            return int(found[1])
    return None


def describe_oom(root: str = "/") -> str:
    """Return in words that the kernel's out-of-memory killer ended a process, and what to change."""
    limit = _cgroup_limit(root)
    room = "this node's memory is used up"
    if limit < _NO_LIMIT:
        size = f"{limit / 2**30:.4g} GiB" if limit >= 2**30 else f"{limit / 2**20:.4g} MiB"
        room = f"the node's memory limit of {size} was reached"
    return (
        f"out of memory: {room}, and the kernel killed it (SIGKILL). Raise memory of @resources, @kubernetes or @batch, "
        "or use fewer processes, smaller batches or fewer data loader workers"
    )


def memory_limit_bytes(root: str = "/") -> int | None:
    """Return how much memory this node may use: the machine's, or less where a cgroup says so; None if nothing says."""
    found = re.search(r"^MemTotal:\s+(\d+) kB", read(os.path.join(root, "proc/meminfo")), re.MULTILINE)
    limit = min(_cgroup_limit(root), _NO_LIMIT if found is None else int(found[1]) * 1024)
    return limit if limit < _NO_LIMIT else None


def _cgroup_limit(root: str) -> int:
    """Return the least limit of all cgroups around this process; `_NO_LIMIT` or more where there is none."""
    return min((int(text) for text in _texts(_LIMITS, root) if text.strip().isdigit()), default=_NO_LIMIT)


def _texts(names: tuple[str, ...], root: str) -> Iterator[str]:
    """Yield what the files of these names say, this process's own cgroup first."""
    for folder in own_folders("memory", root):
        for name in names:
            yield read(os.path.join(folder, name))
