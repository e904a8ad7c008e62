"""Reads the progress of this node's ranks, without a thread of its own. No worker waits for it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial

from ..gang.progress import MAX_KEYS, Metrics, Point
from ..gang.series import Series
from ..gang.wire import Plain, to_plain
from ..machine.aside import STUCK_S
from ..machine.looks import is_due
from .metric_lines import Line, LineReader
from .observers import Here, Observer
from .paces import RankPace

_READS_EVERY_S = 1.0
TELLS_EVERY_S = 5.0
MAX_POINTS = 100  # of a key in one message
_SHOWN_CHARS = 100
# A worker appends lines of JSON to the file in METRICS, which the agent sets for each from FOLDER.
METRICS = "TORCHRUN_METRICS"
FOLDER = "TORCHRUN_METRICS_FOLDER"


class ProgressObserver(Observer):
    """Reads the workers' files."""

    def __init__(self, here: Here, clock: Callable[[], float] = time.monotonic) -> None:
        self._here, self._clock = here, clock
        self._readers = {
            rank: LineReader(metrics_file(here.folder, local_rank), partial(self._refused, rank))
            for local_rank, rank in enumerate(here.request.spec.ranks)
        }
        self._reading: Future[tuple[float, dict[int, list[Line]]]] | None = None
        self._refusal: str | None = None  # what is to be said of a line; empty when it was said
        self._has_warned = False
        self._paces = {rank: RankPace() for rank in here.request.spec.ranks}
        # Of rank 0, if it is on this node: its last step, its total, and the new values.
        self._step: int | None = None
        self._total: float | None = None
        self._new: dict[str, Series] = {}
        self._told: tuple[int | None, float | None] | None = None  # the place in the last report
        self._read_at = self._told_at = clock()
        with suppress(OSError):
            os.makedirs(os.path.dirname(metrics_file(here.folder, 0)), exist_ok=True)

    def poll(self) -> Plain | None:
        """Read the files once a second; return a report for the control node: the first at once, then every 5 s."""
        now = self._clock()
        if is_due(self._read_at + _READS_EVERY_S - now):
            self._read(now)
        pause_s = 0.0 if self._told is None else TELLS_EVERY_S
        return self._message(now) if is_due(self._told_at + pause_s - now) else None

    async def ended(self) -> Plain | None:
        """Return a report on the last lines of the workers, if their disk answers."""
        with suppress(TimeoutError):
            last = await self._here.files.within(STUCK_S, self._new_lines)
            if self._reading is not None:  # it came before
                self._take(*self._reading.result())
            self._take(*last)
        return self._message(self._clock())

    def _read(self, now: float) -> None:
        """Read beside, and take what has come; if the disk holds that up, a later poll does."""
        self._reading = self._reading or self._here.files.begin(self._new_lines)
        if self._reading is not None and self._reading.done():
            found, self._reading, self._read_at = self._reading.result(), None, now
            self._take(*found)

    def _take(self, at: float, found: dict[int, list[Line]]) -> None:
        if self._refusal:
            self._here.say(self._refusal)
            self._refusal = ""
        for rank, lines in found.items():
            for line in lines:
                self._paces[rank].see(line, at)
                self.saw_workers_at = at
                if rank == 0:
                    self._keep(line)

    def _new_lines(self) -> tuple[float, dict[int, list[Line]]]:
        return self._clock(), {rank: reader.new_lines() for rank, reader in self._readers.items()}

    def _refused(self, rank: int, text: bytes) -> None:
        shown = text[:_SHOWN_CHARS].decode("utf-8", "backslashreplace")
        what = "wrote a line to its metrics that holds no number by name; it is ignored"
        self._refusal = f"rank {rank} {what}: {shown!r}" if self._refusal is None else self._refusal

    def _warn(self, line: Line) -> None:
        """Say once what makes the curve of rank 0 lose points."""
        if line.step is None:
            what = "values without a step: only the last ones are kept" if self._step is None and line.values else ""
        else:
            is_back = self._step is not None and line.step < self._step
            repeats = "of repeated steps only the last values are kept, so count the steps over all epochs"
            what = f"step {line.step} after step {self._step}: {repeats}" if is_back else ""
        if what and not self._has_warned:
            self._has_warned = True
            self._here.show(f"warning: rank 0 has reported {what}")

    def _keep(self, line: Line) -> None:
        self._warn(line)
        self._step = self._step if line.step is None else line.step
        self._total = line.total or self._total
        values = line.values if line.seconds is None else {**line.values, "seconds": line.seconds}
        for key, value in values.items():
            if key in self._new or len(self._new) < MAX_KEYS:
                self._new.setdefault(key, Series(MAX_POINTS)).add(self._step or 0, value)

    def _message(self, now: float) -> Plain | None:
        self._told_at = now
        running = {rank: pace for rank, pace in self._paces.items() if not self._here.has_ended(rank)}
        paces = {rank: pace for rank, each in running.items() if (pace := each.pace(now)) is not None}
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


def metrics_file(log_dir: str, local_rank: int | str) -> str:
    """Return the metrics file of a worker with logs in `log_dir`."""
    return os.path.join(log_dir, "metrics", f"{local_rank}.jsonl")
