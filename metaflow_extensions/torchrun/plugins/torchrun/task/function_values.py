"""Pickled values of ranks, kept on disk and loaded only when one is read."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

from ..errors import TorchrunError
from ..worker.function_worker import VALUES


class ValuesOnDisk(Mapping[int, bytes]):
    """Global rank -> pickled value, in files of one temporary folder.

    In memory, pickled values would double what a result needs as long as it lives. An open file for each would exceed the
    limit of open files. The folder is removed with this object or, at the latest, when its process exits. A fork of the
    process can read values, but never removes the folder.
    """

    def __init__(self) -> None:
        self.folder = os.path.abspath(tempfile.mkdtemp(prefix="torchrun-call-"))
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
