"""This process's control groups (cgroups): their folders, the memory limit, and the kernel's out-of-memory kills."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from .processes import read

_MOUNT = "sys/fs/cgroup"


def own_texts(file: str, root: str = "/") -> Iterator[str]:
    """Yield what a file says in this process's cgroup and in all that it lies in, its own first; of version 2 of cgroups.

    A limit of any of them binds: systemd's ``CPUQuota=`` and a batch system's limits are set below the
    root. Inside a container the path in ``/proc/self/cgroup`` can be the host's, while the container's own
    cgroup is what is mounted; then only the last folder exists.
    """
    path = _own_path(root)
    while path:
        yield read(os.path.join(root, _MOUNT, path, file))
        path = os.path.dirname(path)
    yield read(os.path.join(root, _MOUNT, file))


def container_folder(root: str = "/") -> str | None:
    """Return the folder of this process's cgroup of version 2 if that is its container's; else None.

    A container sees its own cgroup as the root of all. The machine's own root lacks ``memory.current``.
    """
    mount, path = os.path.join(root, _MOUNT), _own_path(root)
    is_among_others = path != "" and os.path.isdir(os.path.join(mount, path))
    return mount if os.path.exists(os.path.join(mount, "memory.current")) and not is_among_others else None


def _own_path(root: str) -> str:
    found = re.search(r"^0::/(.*)$", read(os.path.join(root, "proc/self/cgroup")), re.MULTILINE)
    return "" if found is None or ".." in found[1] else found[1]  # else it is outside of this cgroup namespace


def oom_kills(root: str = "/") -> int | None:
    """Return how many processes of this cgroup the kernel has killed for lack of memory; None where nothing counts.

    The counter is ``oom_kill`` of ``memory.events`` (Linux, ``Documentation/admin-guide/cgroup-v2.rst``).
    """
    # The first that counts: a process counts where it lies, and in all groups above.
    found = (re.search(r"^oom_kill (\d+)$", text, re.MULTILINE) for text in own_texts("memory.events", root))
    return next((int(count[1]) for count in found if count), None)


def describe_oom(root: str = "/") -> str:
    """Say that the kernel's out-of-memory killer ended a process, and what to change."""
    limit, room = min(_limits(root), default=None), "this node's memory is used up"
    if limit is not None:
        size = f"{limit / 2**30:.4g} GiB" if limit >= 2**30 else f"{limit / 2**20:.4g} MiB"
        room = f"the node's memory limit of {size} was reached"
    return (
        f"out of memory: {room}, and the kernel killed it (SIGKILL). Raise memory of @resources, @kubernetes or @batch, "
        "or use fewer processes, smaller batches or fewer data loader workers"
    )


def memory_limit_bytes(root: str = "/") -> int | None:
    """Return how much memory this node may use: the machine's, or less where a cgroup says so; None if nothing says."""
    found = re.search(r"^MemTotal:\s+(\d+) kB", read(os.path.join(root, "proc/meminfo")), re.MULTILINE)
    return min([*_limits(root), *([] if found is None else [int(found[1]) * 1024])], default=None)


def _limits(root: str) -> list[int]:
    """Return the limits of all cgroups around this process."""
    return [int(text) for text in own_texts("memory.max", root) if text.strip().isdigit()]  # without one it says "max"
