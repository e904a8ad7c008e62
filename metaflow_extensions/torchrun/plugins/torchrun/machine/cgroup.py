"""The folders of this process's control groups (cgroups), where the kernel shows limits and counters."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import PurePosixPath

from .processes import read

_MOUNT = "sys/fs/cgroup"


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

    A container sees its own cgroup as the root of all. The machine's own root lacks ``cgroup.events``.
    """
    ((mount, path),) = _hierarchies("", root)
    is_among_others = ".." not in path and path != "/" and os.path.isdir(os.path.join(mount, path.strip("/")))
    return mount if os.path.exists(os.path.join(mount, "cgroup.events")) and not is_among_others else None


def _hierarchies(controller: str, root: str) -> Iterator[tuple[str, str]]:
    """Yield where a hierarchy is mounted, and the path of this process in it: of version 2, then of the controller."""
    paths = {"": "/", controller: "/"}
    for line in read(os.path.join(root, "proc/self/cgroup")).splitlines():
        with suppress(ValueError):
            _, names, path = line.split(":", 2)  # as in "4:cpu,cpuacct:/user.slice"; version 2 has no names
            paths.update({name: path for name in names.split(",") if name in paths})
    for name, path in paths.items():
        yield os.path.join(root, _MOUNT, name), path
