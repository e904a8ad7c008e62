"""What the kernel says of this container's memory: its limit, and whom it has killed for it."""

from __future__ import annotations

import os
import re
from contextlib import suppress

# Version 2 of cgroups, then version 1. Inside a container its own cgroup is mounted there; elsewhere
# it is the machine's, whose root has no such files in version 2.
_KILLS = ("sys/fs/cgroup/memory.events", "sys/fs/cgroup/memory/memory.oom_control")
_LIMITS = ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes")
_NO_LIMIT = 2**60  # version 1 writes a number near 2**63 for "none"


def oom_kills(root: str = "/") -> int | None:
    """Return how many processes of this cgroup the kernel has killed for lack of memory.

    The counter is ``oom_kill`` of ``memory.events`` or ``memory.oom_control`` (Linux,
    ``Documentation/admin-guide/cgroup-v2.rst`` and ``cgroup-v1/memory.rst``).

    Parameters
    ----------
    root : str, default "/"
        Where the file system begins.

    Returns
    -------
    int or None
        None where nothing counts.
    """
    for path in _KILLS:
        found = re.search(r"^oom_kill (\d+)$", _read(root, path), re.MULTILINE)
        if found:
            return int(found[1])
    return None


def memory_limit(root: str = "/") -> int | None:
    """Return the memory limit of this cgroup in bytes, or None if there is none."""
    for path in _LIMITS:
        text = _read(root, path).strip()
        if text.isdigit() and int(text) < _NO_LIMIT:
            return int(text)
    return None


def describe_oom(limit: int | None) -> str:
    """Say that the kernel's out-of-memory killer ended a process, and what to change."""
    room = (
        "this node's memory is used up" if limit is None else f"the node's memory limit of {_in_gib(limit)} was reached"
    )
    return (
        f"out of memory: {room}, and the kernel killed it (SIGKILL). Raise memory of @resources, @kubernetes or @batch, "
        "or use fewer processes, smaller batches or fewer data loader workers"
    )


def _in_gib(size: int) -> str:
    """Return bytes as GiB, or MiB below one."""
    return f"{size / 2**30:.4g} GiB" if size >= 2**30 else f"{size / 2**20:.4g} MiB"


def _read(root: str, path: str) -> str:
    with suppress(OSError), open(os.path.join(root, path), encoding="ascii", errors="replace") as file:
        return file.read()
    return ""
