"""Pickled values of ranks, kept on disk until somebody looks at one."""

from __future__ import annotations

import io
import os
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple


class _Place(NamedTuple):
    fd: int
    offset: int
    size: int


class ValuesOnDisk(Mapping[int, bytes]):
    """Global rank -> pickled value, in files without a name.

    In memory, each value would be there once more than its user wants it, as long as the result of its launch
    lives. The files end with this object or with its process, however that ends.
    """

    def __init__(self) -> None:
        self._places: dict[int, _Place] = {}
        self._added: int | None = None  # one file for all values of other nodes: descriptors are few

    def take(self, rank: int, path: str) -> None:
        """Take a rank's value from a file, whose name is not needed any more; without that file there is no value."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        self._places[rank] = _Place(self._owned(fd), 0, os.fstat(fd).st_size)

    def add(self, ranks: Iterable[int], data: bytes) -> None:
        """Write the value of `ranks`, which have all returned the same."""
        if self._added is None:
            with tempfile.TemporaryFile(prefix="torchrun-values-") as file:
                self._added = self._owned(os.dup(file.fileno()))
        offset = os.lseek(self._added, 0, os.SEEK_END)
        left = memoryview(data)
        while left:
            left = left[os.write(self._added, left) :]
        self._places.update(dict.fromkeys(ranks, _Place(self._added, offset, len(data))))

    def open(self, rank: int) -> BinaryIO:
        """Return a file that reads a rank's value; any thread may have its own."""
        return io.BufferedReader(_Reader(self._places[rank]))

    def _owned(self, fd: int) -> int:
        weakref.finalize(self, os.close, fd)
        return fd

    def __getitem__(self, rank: int) -> bytes:
        with self.open(rank) as file:
            return file.read(self._places[rank].size)

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._places))

    def __len__(self) -> int:
        return len(self._places)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


class _Reader(io.RawIOBase):
    """Reads a part of a file, wherever others read it."""

    def __init__(self, place: _Place) -> None:
        self._place, self._done = place, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        fd, offset, size = self._place
        part = memoryview(buffer)[: size - self._done]
        count = os.preadv(fd, [part], offset + self._done) if part else 0
        self._done += count
        return count
