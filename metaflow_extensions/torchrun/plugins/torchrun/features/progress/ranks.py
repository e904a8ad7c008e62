"""What this node's ranks tell of their progress, for the gang.

`Supervisor` asks in its own loop: nothing here has a thread, and no worker waits for it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

from ...gang.wire import to_plain
from .lines import Line, LineReader
from .paces import RankPace
from .told import MAX_KEYS, Metrics, Point

_READS_EVERY_S = 1.0
TELLS_EVERY_S = 5.0
# Fewer than twice so many points of rank 0 go in one message; of more, neighbours are put together.
MAX_POINTS = 100
MAX_POINTS_BYTES = 256 * 1024
_SHOWN_CHARS = 100


class Ranks:
    """The files of one generation's ranks on this node."""

    def __init__(
        self,
        log_dir: str,
        ranks: Mapping[int, int],
        has_ended: Callable[[int], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._has_ended = has_ended
        self._complaint: str | None = None  # about a line that tells nothing
        self._has_complained = False
        self._clock = clock
        self._readers = {
            rank: LineReader(metrics_file(log_dir, local_rank), partial(self._refused, rank))
            for local_rank, rank in ranks.items()
        }
        self._paces = {rank: RankPace() for rank in ranks.values()}
        self._points: list[Point] = []
        self._step = 0  # rank 0's last
        self._total: float | None = None
        self._read_at = self._told_at = clock()
        with suppress(OSError):
            os.makedirs(os.path.dirname(metrics_file(log_dir, 0)), exist_ok=True)

    def _refused(self, rank: int, text: bytes) -> None:
        if not self._has_complained:
            self._has_complained = True
            shown = text[:_SHOWN_CHARS].decode("utf-8", "backslashreplace")
            self._complaint = f"rank {rank} has written a line to its metrics without a number by name: {shown!r}"

    def pop_complaint(self) -> str | None:
        """Return what is to be said of the first line that tells nothing, once."""
        complaint, self._complaint = self._complaint, None
        return complaint

    def due(self) -> Metrics | None:
        """Read, once a second; return what the gang is to be told, every 5 s, or None."""
        now = self._clock()
        if now - self._read_at >= _READS_EVERY_S:
            self._read_at = now
            self._read(now)
        if now - self._told_at < TELLS_EVERY_S:
            return None
        return self._message(now)

    def rest(self) -> Metrics | None:
        """Return what the workers have told before their end and the gang does not know."""
        now = self._clock()
        self._read(now)
        return self._message(now) if self._points else None

    def _read(self, now: float) -> None:
        for rank, reader in self._readers.items():
            for line in reader.all() if rank == 0 else reader.of_pace():
                self._paces[rank].see(line, now)
                if rank == 0:
                    self._keep(line)

    def _keep(self, line: Line) -> None:
        self._step = self._step if line.step is None else line.step
        self._total = line.total or self._total
        values = {**line.values, **({} if line.seconds is None else {"seconds": line.seconds})}
        self._points.append(Point(self._step, values))
        if len(self._points) >= 2 * MAX_POINTS:
            self._points = thinned(self._points)

    def _message(self, now: float) -> Metrics | None:
        paces = {rank: each.pace(now) for rank, each in self._paces.items() if not self._has_ended(rank)}
        known = {rank: pace for rank, pace in paces.items() if pace is not None}
        points, self._points = fitting(self._points), []
        self._told_at = now
        if not known and not points:
            return None
        from_0 = 0 in self._paces and self._paces[0].counts_from_0
        return Metrics(known, tuple(points), self._total, from_0)


def metrics_file(log_dir: str, local_rank: int | str) -> str:
    """Return the file of a worker whose logs lie in `log_dir`."""
    return os.path.join(log_dir, "metrics", f"{local_rank}.jsonl")


def fitting(points: list[Point]) -> list[Point]:
    """Return as many points as one message may have."""
    while len(points) > 1 and len(json.dumps([to_plain(point) for point in points])) > MAX_POINTS_BYTES:
        points = thinned(points)
    return points


def thinned(points: list[Point]) -> list[Point]:
    """Return half as many points: of two neighbours one, with the last value of each key."""
    pairs = zip(points[::2], [*points[1::2], None], strict=False)
    return [first if second is None else _merged(first, second) for first, second in pairs]


def _merged(first: Point, second: Point) -> Point:
    values = dict(list({**first.values, **second.values}.items())[:MAX_KEYS])
    return Point(second.step, values)
