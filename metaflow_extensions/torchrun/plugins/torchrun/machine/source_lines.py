"""Reads lines of source files without waiting for a disk that does not answer."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress

from .frames import Line

_WITHIN_S = 2.0
_MAX_BYTES = 4 * 1024 * 1024  # of a file that is read: far above those that people write
_MAX_CHARS = 160  # of a line that is shown


_reading: list[threading.Thread] = []  # that have not ended; only the process's event loop touches it
_MAX_READING = 2  # so that a disk that does not answer keeps no more


class SourceLines:
    """The source lines of some places. What can't be read in two seconds stays unknown.

    The files may be on a network's disk that hangs, perhaps the very one that makes a launch hang, so a thread reads
    them. It alone fills `_found`, and lives until the disk answers; the process does not wait for it at its end.
    """

    def __init__(self, wanted: Iterable[Line]) -> None:
        self._wanted = sorted(set(wanted))
        self._found: dict[Line, str] = {}
        self._deadline = time.monotonic() + _WITHIN_S
        self._is_done = not self._wanted
        if self._wanted:
            self._begin()

    def _begin(self) -> None:
        _reading[:] = [thread for thread in _reading if thread.is_alive()]
        if len(_reading) >= _MAX_READING:
            self._is_done = True
            return
        thread = threading.Thread(target=self._read, name="torchrun-lines", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no thread can start; the stacks do without
            self._is_done = True
            return
        _reading.append(thread)

    def poll(self) -> Mapping[Line, str] | None:
        """Return what could be read; None while more may come."""
        return dict(self._found) if self._is_done or time.monotonic() >= self._deadline else None

    def _read(self) -> None:
        for path in dict.fromkeys(line.path for line in self._wanted):
            numbers = {line.number for line in self._wanted if line.path == path}
            with suppress(OSError, ValueError):
                self._found.update({Line(path, number): text for number, text in _lines(path, numbers).items()})
        self._is_done = True


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
