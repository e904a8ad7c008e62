"""Reads numbers from a growing file of JSON lines; anything else in the file is ignored.

What was read is given back to the disk, which a training of weeks would fill.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, field

from ..compat.linux import free_begin

MAX_BYTES = 1024 * 1024  # that are read at once; with more, lines come later
FREED_BYTES = 1024 * 1024  # so many at once are given back
_MAX_KEY_CHARS = 80


@dataclass(frozen=True)
class Line:
    """The step and the numbers of one line."""

    step: int | None = None
    total: float | None = None  # the number of steps of the script
    seconds: float | None = None  # duration of the step without waiting for other ranks
    values: dict[str, float | None] = field(default_factory=dict)  # None: a number that is not finite


def parse_line(text: bytes) -> Line | None:
    """Return the numbers of a line; None unless it is a JSON object with a number."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):  # ValueError also if it is not UTF-8, or an int has too many digits
        return None
    if not isinstance(data, dict):
        return None
    numbers = {key: _finite(value) for key, value in data.items() if type(value) in (int, float)}
    if not numbers:
        return None
    step, total, seconds = (numbers.pop(key, None) for key in ("step", "total", "seconds"))
    return Line(
        None if step is None else int(step),
        total if total is not None and total >= 1 else None,
        seconds if seconds is not None and seconds > 0 else None,
        {_name(key): value for key, value in numbers.items()},
    )


def _name(key: str) -> str:
    """Return a name that fits into one line."""
    return "".join(char if char.isprintable() else " " for char in key[:_MAX_KEY_CHARS])


def _finite(value: float) -> float | None:
    try:
        number = float(value)
    except OverflowError:  # an int of hundreds of digits
        return None
    return number if math.isfinite(number) else None


class LineReader:
    """Returns the new lines of one file to which a worker appends. The file may be missing or truncated."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._read = self._freed = 0  # bytes of the file
        self._rest = b""  # the start of an unfinished line

    def new_lines(self) -> list[Line | bytes]:
        """Return the new complete lines, as they are where they hold no numbers."""
        try:
            data = self._new_bytes()
        except OSError:  # there is no such file
            return []
        *texts, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_BYTES:
            self._rest = b""  # the rest of this line will not parse, and is ignored
        return [parse_line(text) or text for text in filter(bytes.strip, texts)]

    def _new_bytes(self) -> bytes:
        size = os.stat(self._path).st_size
        if size < self._read:
            self._read, self._freed, self._rest = 0, 0, b""
        if size == self._read:
            return b""
        with open(self._path, "r+b") as file:
            file.seek(self._read)
            data = file.read(MAX_BYTES)
            self._read += len(data)
            if self._read - self._freed >= FREED_BYTES:
                self._freed = self._read
                free_begin(file.fileno(), self._read)  # where the file system can't, the file stays as it is
        return data
