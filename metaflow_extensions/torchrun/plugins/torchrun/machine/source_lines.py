"""Reads lines of source files without waiting for a disk that does not answer."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress

from .aside import Aside
from .frames import Line

_WITHIN_S = 2.0
_MAX_BYTES = 4 * 1024 * 1024  # of a file that is read: far above those that people write
_MAX_CHARS = 160  # of a line that is shown

_DISK = Aside("torchrun-lines")


class SourceLines:
    """The source lines of some places. What can't be read in two seconds stays unknown.

    The files may be on a network's disk that hangs, perhaps the very one that makes a launch hang, so a thread reads
    them. It alone fills `_found`.
    """

    def __init__(self, wanted: Iterable[Line]) -> None:
        self._wanted = sorted(set(wanted))
        self._found: dict[Line, str] = {}
        self._deadline = time.monotonic() + _WITHIN_S
        self._job = _DISK.begin(self._read) if self._wanted else None

    def poll(self) -> Mapping[Line, str] | None:
        """Return what could be read; None while more may come."""
        is_done = self._job is None or self._job.done() or time.monotonic() >= self._deadline
        return dict(self._found) if is_done else None

    def _read(self) -> None:
        for path in dict.fromkeys(line.path for line in self._wanted):
            numbers = {line.number for line in self._wanted if line.path == path}
            with suppress(OSError, ValueError):
                self._found.update({Line(path, number): text for number, text in _lines(path, numbers).items()})


def _lines(path: str, numbers: set[int]) -> dict[int, str]:
    """Return these lines of a file, counted from 1, cut to what people read."""
    found: dict[int, str] = {}
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_BYTES:
        return found
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if number in numbers:
                text = "".join(char if char.isprintable() else " " for char in line.strip())
                found[number] = text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]}…"
    return found
