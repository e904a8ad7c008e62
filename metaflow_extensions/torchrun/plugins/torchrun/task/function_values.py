"""Pickled values of ranks, kept on disk and loaded only when one is read."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from typing import Any, BinaryIO

from ..errors import TorchrunError
from ..machine import processes
from ..worker.function_worker import VALUES

# The machine since it was booted, with its pids; the process; when that began.
_FOLDER = re.compile(r"torchrun-call-([0-9a-f]{8})_([0-9]+)_([0-9]+)_\w+")


def make_folder() -> str:
    """Make a folder for temporary files; the caller removes it.

    A process that is killed can't remove its folders. The next process that makes one here does: a folder's name tells
    its owner.
    """
    among, machine, pid = os.path.abspath(tempfile.gettempdir()), _this_machine(), os.getpid()
    if machine:
        _remove_what_is_left(among, machine)
    return tempfile.mkdtemp(prefix=f"torchrun-call-{machine}_{pid}_{processes.began(pid)}_", dir=among)


@cache  # once a process
def _remove_what_is_left(among: str, machine: str) -> None:
    with suppress(OSError):  # not there, or nobody may list it
        for name in os.listdir(among):
            owner = _FOLDER.fullmatch(name)
            if owner is not None and owner[1] == machine and not processes.is_alive(int(owner[2]), since=owner[3]):
                shutil.rmtree(os.path.join(among, name), ignore_errors=True)  # another user's stays


def _this_machine() -> str:
    """Return a name for the table of processes that this one is in; empty where the system does not tell.

    Other containers, and other machines, may share the folder for temporary files. Their pids say nothing here.
    """
    boot, table = processes.read("/proc/sys/kernel/random/boot_id"), "/proc/self/ns/pid"
    if not boot or not os.path.islink(table):
        return ""
    return hashlib.sha256((boot + os.readlink(table)).encode()).hexdigest()[:8]


class ValuesOnDisk(Mapping[int, bytes]):
    """Global rank -> pickled value, in files of one temporary folder.

    In memory, pickled values would double what a result needs as long as it lives. An open file for each would exceed the
    limit of open files. The folder is removed with this object or, at the latest, when its process exits; for a process
    that is killed, see `make_folder`. A fork of the process can read values, but never removes the folder.
    """

    def __init__(self) -> None:
        self.folder = make_folder()
        self._paths: dict[int, str] = {}
        self._end = weakref.finalize(self, _remove, self.folder, os.getpid())

    def remove(self) -> None:
        """Remove the folder with all that is in it."""
        self._end()

    @property
    def of_workers(self) -> str:
        """The folder in it for the files of workers."""
        return os.path.join(self.folder, VALUES)

    def add(self, path: str, *ranks: int) -> None:
        """Use a file in the folder as the value of `ranks`; without that file there is no value."""
        if os.path.exists(path):
            self._paths.update(dict.fromkeys(ranks, path))

    def write(self, data: bytes) -> str:
        """Write a value into a file, and return that."""
        fd, path = tempfile.mkstemp(prefix="gathered-", dir=self.folder)
        with open(fd, "wb") as file:
            file.write(data)
        return path

    def open(self, rank: int) -> BinaryIO:
        """Return a file with a rank's value; any thread may have its own."""
        path = self._paths[rank]
        try:
            return open(path, "rb")
        except FileNotFoundError as error:
            raise TorchrunError(
                f"The value of rank {rank} is gone: {path} was removed while the step ran. A result keeps its values on "
                "this machine's disk as long as it lives there. Keep what empties that folder from it, choose another by "
                "TMPDIR, or look at values before."
            ) from error

    def __getitem__(self, rank: int) -> bytes:
        with self.open(rank) as file:
            return file.read()

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._paths))

    def __len__(self) -> int:
        return len(self._paths)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def _remove(folder: str, pid: int) -> None:
    if os.getpid() == pid:  # a fork has the object, but not the folder
        shutil.rmtree(folder, ignore_errors=True)
