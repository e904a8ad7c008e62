"""Reads the progress of this node's ranks, without a thread of its own. No worker waits for it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeAlias

from ..gang.progress import MAX_KEYS, Metrics, Point, Series
from ..gang.wire import Plain, to_plain
from ..machine.aside import STUCK_S
from .metric_lines import Line, LineReader
from .observers import Here
from .paces import RankPace

_READS_EVERY_S = 1.0
TELLS_EVERY_S = 5.0
MAX_POINTS = 100  # of a key in one message
_SHOWN_CHARS = 100
# A worker appends lines of JSON to the file of its local rank here, which the agent names to it.
FOLDER = "TORCHRUN_METRICS_FOLDER"


_Lines: TypeAlias = list[tuple[int, float, Line | bytes]]
"""Ranks, when their lines were read, and the lines."""


class ProgressObserver:
    """Reads the workers' files."""

    def __init__(self, here: Here, clock: Callable[[], float] = time.monotonic) -> None:
        self._here, self._clock = here, clock
        folder = metrics_folder(here.folder)
        self._readers = {
            rank: LineReader(os.path.join(folder, f"{local_rank}.jsonl"))
            for local_rank, rank in enumerate(here.call.ranks)
        }
        self._reading: Future[_Lines] | None = None
        self._said: set[str] = set()  # warnings; each is given once
        self._paces = {rank: RankPace() for rank in here.call.ranks}
        # Of rank 0, if it is on this node: its last step, its total, and the new values.
        self._step: int | None = None
        self._total: float | None = None
        self._new: dict[str, Series] = {}
        self._told: tuple[int | None, float | None] | None = None  # the place in the last report
        self._read_at = self._told_at = clock()
        with suppress(OSError):
            os.makedirs(folder, exist_ok=True)

    def poll(self) -> Plain | None:
        """Read the files once a second; return a report for the control node: the first at once, then every 5 s."""
        now = self._clock()
        if now >= self._read_at + _READS_EVERY_S:
            # It is read beside; if the disk holds that up, a later poll takes what has come.
            self._reading = self._reading or self._here.exits.files.begin(self._new_lines)
            if self._reading is not None and self._reading.done():
                found, self._reading, self._read_at = self._reading.result(), None, now
                self._take(found)
        pause_s = 0.0 if self._told is None else TELLS_EVERY_S
        return self._message(now) if now >= self._told_at + pause_s else None

    async def ended(self) -> Plain | None:
        """Return a report on the last lines of the workers, if their disk answers."""
        with suppress(TimeoutError):
            last = await self._here.exits.files.within(STUCK_S, self._new_lines)
            if self._reading is not None:  # it came before
                self._take(self._reading.result())
            self._take(last)
        return self._message(self._clock())

    def _new_lines(self) -> _Lines:
        return [(rank, self._clock(), line) for rank, reader in self._readers.items() for line in reader.new_lines()]

    def _take(self, found: _Lines) -> None:
        for rank, at, line in found:
            if isinstance(line, bytes):
                text = line[:_SHOWN_CHARS].decode("utf-8", "backslashreplace")
                what = "wrote a line to its metrics that holds no number by name; it is ignored"
                self._warn("refused", f"rank {rank} {what}: {text!r}", is_detail=True)
                continue
            self._paces[rank].see(line, at)
            self._here.exits.reported_at = at
            if rank == 0:
                self._keep(line)

    def _warn(self, what: str, text: str, is_detail: bool = False) -> None:
        if what not in self._said:
            self._said.add(what)
            self._here.say(text, is_detail)

    def _keep(self, line: Line) -> None:
        loses = "warning: rank 0 has reported"  # points of its curve
        if line.step is None and self._step is None and line.values:
            self._warn("loses", f"{loses} values without a step: only the last ones are kept")
        if line.step is not None and self._step is not None and line.step < self._step:
            repeats = "of repeated steps only the last values are kept, so count the steps over all epochs"
            self._warn("loses", f"{loses} step {line.step} after step {self._step}: {repeats}")
        self._step = self._step if line.step is None else line.step
        self._total = line.total or self._total
        values = line.values if line.seconds is None else {**line.values, "seconds": line.seconds}
        for key, value in values.items():
            if key in self._new or len(self._new) < MAX_KEYS:
                self._new.setdefault(key, Series(MAX_POINTS)).add(self._step or 0, value)

    def _message(self, now: float) -> Plain | None:
        self._told_at = now
        running = self._paces.keys() - self._here.exits.codes
        paces = {rank: pace for rank in sorted(running) if (pace := self._paces[rank].pace(now)) is not None}
        points = {
            key: tuple(Point(int(step), value) for step, value in series.points) for key, series in self._new.items()
        }
        self._new = {}
        place = self._step, self._total
        if not paces and not points and place == (self._told or (None, None)):
            return None
        self._told = place
        told: Plain = to_plain(Metrics(paces, points, *place))
        return told


def metrics_folder(folder: str) -> str:
    """Return where workers write their metrics, in the folder of a generation."""
    return os.path.join(folder, "metrics")
