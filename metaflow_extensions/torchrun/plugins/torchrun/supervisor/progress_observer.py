"""Reads the progress of this node's ranks from growing files of JSON lines, and computes their speed.

No worker waits for it.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import fmean
from typing import TypeAlias

from ..gang.progress import MAX_KEYS, MAX_POINTS, Metrics, Pace, Series
from ..gang.wire import Plain, to_plain
from ..machine.aside import STUCK_S
from .workers import Workers

_READS_EVERY_S = 1.0
TELLS_EVERY_S = 5.0
# A worker appends lines of JSON to the file of its local rank here, which the agent names to it.
FOLDER = "TORCHRUN_METRICS_FOLDER"
MAX_BYTES = 1024 * 1024  # that are read at once; with more, lines come later
_MAX_KEY_CHARS = 80
# Steps a second are measured over this time, or over the last step if that took longer.
_WINDOW_S = 20.0
# A rank has no speed if it has reported no step for this long and for this many times the duration of its last step: it
# may wait for others. Lower limits would also exclude ranks that are slow.
_STILL_S, _STILL_STEPS = 60.0, 3
_LAST_SECONDS = 20


_Lines: TypeAlias = "list[tuple[int, float, Reported]]"
"""Ranks, when their lines were read, and the lines."""


class ProgressObserver:
    """Reads the workers' files."""

    def __init__(self, workers: Workers, clock: Callable[[], float] = time.monotonic) -> None:
        self._workers, self._clock = workers, clock
        folder = metrics_folder(workers.folder)
        self._readers = {
            rank: LineReader(os.path.join(folder, f"{local_rank}.jsonl"))
            for local_rank, rank in enumerate(workers.call.ranks)
        }
        self._reading: Future[_Lines] | None = None
        self._has_warned = False  # that points are lost
        self._paces = {rank: RankPace() for rank in workers.call.ranks}
        # Of rank 0, if it is on this node: its last step, its total, and the new values.
        self._step: int | None = None
        self._total: float | None = None
        self._new: dict[str, Series] = {}  # of all keys that are kept
        self._told: tuple[int | None, float | None] | None = None  # the place in the last report
        self._read_at = self._told_at = clock()

    def poll(self) -> Plain | None:
        """Read the files once a second; return a report for the control node: the first at once, then every 5 s."""
        now = self._clock()
        if now >= self._read_at + _READS_EVERY_S:
            # It is read beside; if the disk holds that up, a later poll takes what has come.
            self._reading = self._reading or self._workers.files.begin(self._new_lines)
            if self._reading is not None and self._reading.done():
                found, self._reading, self._read_at = self._reading.result(), None, now
                self._take(found)
        pause_s = 0.0 if self._told is None else TELLS_EVERY_S
        return self._message(now) if now >= self._told_at + pause_s else None

    async def ended(self) -> Plain | None:
        """Return a report on the last lines of the workers, if their disk answers."""
        with suppress(TimeoutError):
            last = await self._workers.files.within(STUCK_S, self._new_lines)
            if self._reading is not None:  # it came before
                self._take(self._reading.result())
            self._take(last)
        return self._message(self._clock())

    def _new_lines(self) -> _Lines:
        now = self._clock()  # of all that are read together: between them no time has gone by
        return [(rank, now, line) for rank, reader in self._readers.items() for line in reader.new_lines()]

    def _take(self, found: _Lines) -> None:
        for rank, at, line in found:
            self._paces[rank].see(line, at)
            self._workers.reported_at = at
            if rank == 0:
                self._keep(line)

    def _keep(self, line: Reported) -> None:
        loses = "warning: rank 0 has reported"  # points of its curve
        if line.step is None and self._step is None and line.values:
            self._warn(f"{loses} values without a step: only the last ones are kept")
        if line.step is not None and self._step is not None and line.step < self._step:
            repeats = "of repeated steps only the last values are kept, so count the steps over all epochs"
            self._warn(f"{loses} step {line.step} after step {self._step}: {repeats}")
        self._step = self._step if line.step is None else line.step
        self._total = line.total or self._total
        values = line.values if line.seconds is None else {**line.values, "seconds": line.seconds}
        for key, value in values.items():
            if key in self._new or len(self._new) < MAX_KEYS:
                self._new.setdefault(key, Series(MAX_POINTS)).add(self._step or 0, value)
            else:
                self._warn(f"{loses} more than {MAX_KEYS} names, and only the first are kept: {key!r} is left out")

    def _warn(self, text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._workers.side.say("note", text)

    def _message(self, now: float) -> Plain | None:
        self._told_at = now
        running = self._paces.keys() - self._workers.codes
        paces = {rank: pace for rank in sorted(running) if (pace := self._paces[rank].pace(now)) is not None}
        points = {key: series.points for key, series in self._new.items() if series.points}
        self._new = {key: Series(MAX_POINTS) for key in self._new}
        place = self._step, self._total
        if not paces and not points and place == (self._told or (None, None)):
            return None
        self._told = place
        told: Plain = to_plain(Metrics(paces, points, *place))
        return told


def metrics_folder(folder: str) -> str:
    """Return where workers write their metrics, in the folder of a generation."""
    return os.path.join(folder, "metrics")


# --- a line and its file --------------------------------------------------------------------------


@dataclass(frozen=True)
class Reported:
    """The step and the numbers of one line."""

    step: int | None = None
    total: float | None = None  # the number of steps of the script
    seconds: float | None = None  # duration of the step without waiting for other ranks
    values: dict[str, float | None] = field(default_factory=dict)  # None: a number that is not finite


def parse_line(text: bytes) -> Reported | None:
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
    return Reported(
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
        self._read = 0  # bytes of the file
        self._rest = b""  # the start of an unfinished line

    def new_lines(self) -> list[Reported]:
        """Return the new complete lines that hold numbers."""
        try:
            data = self._new_bytes()
        except OSError:  # there is no such file
            return []
        *texts, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_BYTES:
            self._rest = b""  # the rest of this line will not parse, and is ignored
        return [line for line in map(parse_line, texts) if line is not None]

    def _new_bytes(self) -> bytes:
        size = os.stat(self._path).st_size
        if size < self._read:
            self._read, self._rest = 0, b""
        if size == self._read:
            return b""
        with open(self._path, "rb") as file:
            file.seek(self._read)
            data = file.read(MAX_BYTES)
        self._read += len(data)
        return data


# --- how fast a rank is ---------------------------------------------------------------------------


class RankPace:
    """The speed of one rank, from its steps and the times at which they were read."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, int]] = deque()
        self._seconds: deque[float] = deque(maxlen=_LAST_SECONDS)
        self._total: float | None = None

    def see(self, line: Reported, now: float) -> None:
        """Add a line that was read now."""
        self._total = line.total or self._total
        if line.seconds is not None:
            self._seconds.append(line.seconds)
        if line.step is None or (self._steps and line.step == self._steps[-1][1]):
            return
        if self._steps and (line.step < self._steps[-1][1] or self._stands_still(now)):
            self._steps.clear()
        if self._steps and self._steps[-1][0] == now:  # of lines that were read together only the last counts
            self._steps.pop()
        self._steps.append((now, line.step))
        while len(self._steps) > 2 and self._steps[1][0] <= now - _WINDOW_S:
            self._steps.popleft()

    def pace(self, now: float) -> Pace | None:
        """Return the rank's pace; None before its first step."""
        if not self._steps:
            return None
        # After its last step a rank has no speed. Steps may count from 0.
        if self._total is not None and self._steps[-1][1] + 1 >= self._total:
            return Pace()
        return Pace(self._steps_per_s(now), fmean(self._seconds) if self._seconds else None)

    def _stands_still(self, now: float) -> bool:
        if len(self._steps) < 2:
            return False
        (before, _), (came, _) = self._steps[-2], self._steps[-1]
        return now - came > max(_STILL_S, _STILL_STEPS * (came - before))

    def _steps_per_s(self, now: float) -> float | None:
        if len(self._steps) < 2 or self._stands_still(now):
            return None
        (began, first), (came, last) = self._steps[0], self._steps[-1]
        # The next step is not done yet, which limits the speed.
        return min((last - first) / (came - began), (last - first + 1) / max(now - began, 1e-3))
