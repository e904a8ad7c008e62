"""This process's control groups (cgroups): their folders, the memory limit, and the kernel's out-of-memory kills."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import PurePosixPath

from .processes import read

_MOUNT = "sys/fs/cgroup"
# Version 2 of cgroups, then version 1.
_KILLS = ("memory.events", "memory.oom_control")
_LIMITS = ("memory.max", "memory.limit_in_bytes")
_NO_LIMIT = 2**60  # version 1 writes a number near 2**63 for "none"


def own_folders(controller: str, root: str = "/") -> Iterator[str]:
    """Yield the folders of this process's cgroup and of all that it lies in, its own first.
    `controller` is one of version 1 of cgroups, such as ``"cpu"``; version 2 has one tree for all, which comes first.

    A limit of any of them binds: systemd's ``CPUQuota=`` and a batch system's limits are set below the
    root. Inside a container the path in ``/proc/self/cgroup`` can be the host's, while the container's own
    cgroup is what is mounted; then only the last folder exists.
    """
    for mount, path in _hierarchies(controller, root):
        own = PurePosixPath(path.strip("/"))
        if ".." in own.parts:  # outside of this cgroup namespace: not to be seen from here
            own = PurePosixPath()
        for part in (own, *own.parents):
            yield os.path.join(mount, part)


def container_folder(root: str = "/") -> str | None:
    """Return the folder of this process's cgroup of version 2 if that is its container's; else None.

    A container sees its own cgroup as the root of all. The machine's own root lacks ``memory.current``.
    """
    ((mount, path),) = _hierarchies("", root)
    is_among_others = ".." not in path and path != "/" and os.path.isdir(os.path.join(mount, path.strip("/")))
    return mount if os.path.exists(os.path.join(mount, "memory.current")) and not is_among_others else None


def _hierarchies(controller: str, root: str) -> Iterator[tuple[str, str]]:
    """Yield where a hierarchy is mounted, and the path of this process in it: of version 2, then of the controller."""
    paths = {"": "/", controller: "/"}
    for line in read(os.path.join(root, "proc/self/cgroup")).splitlines():
        with suppress(ValueError):
            _, names, path = line.split(":", 2)  # as in "4:cpu,cpuacct:/user.slice"; version 2 has no names
            paths.update({name: path for name in names.split(",") if name in paths})
    for name, path in paths.items():
        yield os.path.join(root, _MOUNT, name).rstrip("/"), path


def oom_kills(root: str = "/") -> int | None:
    """Return how many processes of this cgroup the kernel has killed for lack of memory; None where nothing counts.

    The counter is ``oom_kill`` of ``memory.events`` or ``memory.oom_control`` (Linux,
    ``Documentation/admin-guide/cgroup-v2.rst`` and ``cgroup-v1/memory.rst``).
    """
    # The first that counts: a process counts where it lies and, in version 2 only, in all groups above.
    counts = (re.search(r"^oom_kill (\d+)$", text, re.MULTILINE) for text in _texts(_KILLS, root))
    return next((int(found[1]) for found in counts if found), None)


def describe_oom(root: str = "/") -> str:
    """Say that the kernel's out-of-memory killer ended a process, and what to change."""
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
