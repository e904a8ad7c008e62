"""Reads numbers out of a growing file of JSON lines, whatever is in it.

One turn costs about the same, however much was written: of more than `MAX_BYTES` only the last are read.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

MAX_BYTES = 64 * 1024
_HEAD_BYTES = 4096  # of a file that is longer than that at the first look: its first line tells from where steps count
_MAX_KEYS = 40  # of a line
_MAX_KEY_CHARS = 80
_MAX_STEP = 2**53  # up to there a float is exact
# What a step can take: with other numbers sums and speeds would be none.
_LEAST_SECONDS, _MOST_SECONDS = 1e-9, 1e9
# Keys with a meaning of their own; all others are values.
_STEP, _TOTAL, _SECONDS = "step", "total", "seconds"
_OF_PACE = tuple(f'"{key}"'.encode() for key in (_STEP, _TOTAL, _SECONDS))
# So many lines with each of these are looked at in one turn: the first ones and the last ones.
_FIRST_LINES, _LAST_LINES = 8, 256


@dataclass(frozen=True)
class Line:
    """What one line tells."""

    step: int | None = None
    total: float | None = None  # at which step the script will be done
    seconds: float | None = None  # that the step took without waiting for other ranks
    values: dict[str, float | None] = field(default_factory=dict)  # None: a number that is not finite


def parse_line(text: bytes) -> Line | None:
    """Return what a line tells; None if it is no JSON object with a number that has a name."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):  # ValueError also of what is no UTF-8, and of an int with too many digits
        return None
    if not isinstance(data, dict):
        return None
    numbers = {key: _number(value) for key, value in data.items() if _is_number(value)}
    step, total, seconds = numbers.pop(_STEP, None), numbers.pop(_TOTAL, None), numbers.pop(_SECONDS, None)
    values = {key[:_MAX_KEY_CHARS]: value for key, value in list(numbers.items())[:_MAX_KEYS]}
    if step is None and total is None and seconds is None and not values:
        return None
    return Line(
        int(step) if step is not None and abs(step) <= _MAX_STEP else None,
        total if total is not None and 1 <= total <= _MAX_STEP else None,
        seconds if seconds is not None and _LEAST_SECONDS <= seconds <= _MOST_SECONDS else None,
        values,
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: int | float) -> float | None:
    try:
        number = float(value)
    except OverflowError:  # an int of hundreds of digits
        return None
    return number if math.isfinite(number) else None


class GrowingFile:
    """One file to which a worker appends lines; it need not exist, may vanish, and may begin anew."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._inode: int | None = None
        self._read = 0  # bytes of it
        self._rest = b""  # a line without its end
        self._skips = False  # whether the rest of a line is dropped, since its begin was
        self._head: list[bytes] = []  # the file's first line, if what follows is skipped

    def new_lines(self) -> list[bytes]:
        """Return the whole lines that are new, of many the last, and the first of the file."""
        try:
            data = self._new_bytes()
            head, self._head = self._head, []
            return head + self._split(data)
        except OSError:  # there is none, or not any more; the next may get the same inode
            self._inode = None
            return []

    def _new_bytes(self) -> bytes:
        found = os.stat(self._path)
        if found.st_ino != self._inode or found.st_size < self._read:
            self._inode, self._read, self._rest, self._skips = found.st_ino, 0, b"", False
        if found.st_size == self._read:
            return b""
        with open(self._path, "rb", buffering=0, opener=_without_waiting) as file:
            if found.st_size - self._read > MAX_BYTES:
                self._head = (file.read(_HEAD_BYTES) or b"").split(b"\n")[:-1][:1] if self._read == 0 else []
                self._read, self._rest, self._skips = found.st_size - MAX_BYTES, b"", True
            file.seek(self._read)
            data = file.read(MAX_BYTES) or b""
        self._read += len(data)
        return data

    def _split(self, data: bytes) -> list[bytes]:
        *lines, rest = (self._rest + data).split(b"\n")
        if self._skips and lines:
            self._skips = False
            del lines[0]
        self._rest = rest
        if len(rest) > MAX_BYTES:
            self._rest, self._skips = b"", True
        return [line for line in lines if line.strip()]


def _without_waiting(path: str, flags: int) -> int:
    """Open a file that may have become a pipe since it was looked at: of one without a writer, opening would wait."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


class LineReader:
    """What is new in one file, as `Line`."""

    def __init__(self, path: str, refuse: Callable[[bytes], None]) -> None:
        self._file = GrowingFile(path)
        self._refuse = refuse  # gets lines that tell nothing

    def all(self) -> list[Line]:
        """Return all lines that are new."""
        return [line for text in self._file.new_lines() if (line := self._parse(text)) is not None]

    def of_pace(self) -> list[Line]:
        """Return the lines that are new and tell how fast the rank is, of many the first and the last."""
        texts = self._file.new_lines()
        kept: set[int] = set()
        for key in _OF_PACE:
            told = [number for number, text in enumerate(texts) if key in text]
            kept.update(told[:_FIRST_LINES], told[-_LAST_LINES:])
        wanted = [texts[number] for number in sorted(kept)] or texts[-1:]
        return [line for text in wanted if (line := self._parse(text)) is not None]

    def _parse(self, text: bytes) -> Line | None:
        line = parse_line(text)
        if line is None:
            self._refuse(text)
        return line
