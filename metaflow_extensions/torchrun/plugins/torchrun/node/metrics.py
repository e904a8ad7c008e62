"""What this node's ranks tell of their progress, for the gang.

`Supervisor` asks in its own loop: nothing here has a thread, and no worker waits for it.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

from ..gang.progress import MAX_KEYS, Pace, Point
from ..gang.protocol import Metrics
from ..launch.command import metrics_file
from .metric_lines import Line, LineReader

_READS_EVERY_S = 1.0
TELLS_EVERY_S = 5.0
# Over how long steps a second are taken; where steps take longer, over the last one.
_WINDOW_S = 20.0
# After so long in its first step, a rank counts as slow as that makes it.
_FIRST_STEP_S = 60.0
# A rank that tells no step for so long, and for so many times what its last one took, may have done its part and wait
# for the others, or wait for what nobody knows: then it has no speed. Fewer would leave out ranks that are slow.
_STILL_S, _STILL_STEPS = 60.0, 3
_MAX_SECONDS = 256
# Fewer than twice so many points of rank 0 go in one message; of more, neighbours are put together.
MAX_POINTS = 100
_SHOWN_CHARS = 100
# Takes the place of a local rank in the name of the file with what was read from event files.
EVENT_FILES = "tensorboard"


class RankPace:
    """How fast one rank is, from the steps that were seen and when."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, int]] = deque()
        self._count = 0  # of the steps since it began, or went on after it had stood still
        self._seconds: deque[tuple[float, float]] = deque(maxlen=_MAX_SECONDS)
        self._total: float | None = None
        self.counts_from_0 = False

    def see(self, line: Line, now: float) -> None:
        """Take a line that was read now."""
        self._total = line.total or self._total
        if line.step is not None and (not self._steps or line.step != self._steps[-1][1]):
            self._see_step(line.step, now)
        if line.seconds is not None:
            self._seconds.append((now, line.seconds))
        while len(self._steps) > 2 and self._steps[1][0] <= now - _WINDOW_S:
            self._steps.popleft()
        while len(self._seconds) > 1 and self._seconds[0][0] <= now - _WINDOW_S:
            self._seconds.popleft()

    def _see_step(self, step: int, now: float) -> None:
        self.counts_from_0 |= step == 0
        if self._steps and (step < self._steps[-1][1] or self._stands_still(now)):
            self._steps.clear()
            self._count = 0
        self._count += 1
        if self._steps and self._steps[-1][0] == now:  # of those that were read at once, the last
            self._steps.pop()
        self._steps.append((now, step))

    def pace(self, now: float) -> Pace | None:
        """Return how fast it is; None before its first step."""
        if not self._steps:
            return None
        if self._is_done():
            return Pace(self._steps[-1][1])
        seconds = [each for _, each in self._seconds]
        return Pace(self._steps[-1][1], self._steps_per_s(now), sum(seconds) / len(seconds) if seconds else None)

    def _is_done(self) -> bool:
        """Tell whether it has done all its steps; what it does after them is not known."""
        return self._total is not None and self._steps[-1][1] + self.counts_from_0 >= self._total

    def _stands_still(self, now: float) -> bool:
        if len(self._steps) < 2:
            return False
        (before, _), (came, _) = self._steps[-2], self._steps[-1]
        return now - came > max(_STILL_S, _STILL_STEPS * (came - before))

    def _steps_per_s(self, now: float) -> float | None:
        if self._stands_still(now):
            return None
        (began, first), (came, last) = self._steps[0], self._steps[-1]
        # The next step has not come until now, so the rank can't be faster than that.
        at_most = (last - first + 1) / max(now - began, 1e-3)
        if last == first:
            return at_most if self._count == 1 and now - began > _FIRST_STEP_S else None
        return min((last - first) / (came - began), at_most)


class NodeMetrics:
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
        self._more = LineReader(metrics_file(log_dir, EVENT_FILES), lambda text: None)
        self._has_own_steps = False  # whether rank 0 tells its steps itself
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

    def take_complaint(self) -> str | None:
        """Return what is to be said of the first line that tells nothing, once."""
        complaint, self._complaint = self._complaint, None
        return complaint

    def due(self, launch: int, generation: int) -> Metrics | None:
        """Read, once a second; return what the gang is to be told, every 5 s, or None."""
        now = self._clock()
        if now - self._read_at >= _READS_EVERY_S:
            self._read_at = now
            self._read(now)
        if now - self._told_at < TELLS_EVERY_S:
            return None
        return self._message(launch, generation, now)

    def rest(self, launch: int, generation: int) -> Metrics | None:
        """Return what the workers have told before their end and the gang does not know."""
        now = self._clock()
        self._read(now)
        return self._message(launch, generation, now) if self._points else None

    def _read(self, now: float) -> None:
        for rank, reader in self._readers.items():
            if rank == 0:
                self._read_of_rank_0(reader, now)
                continue
            for line in reader.of_pace():
                self._paces[rank].see(line, now)

    def _read_of_rank_0(self, reader: LineReader, now: float) -> None:
        for line in reader.all():
            self._has_own_steps |= line.step is not None
            self._paces[0].see(line, now)
            self._keep(line)
        for line in self._more.all():
            if not self._has_own_steps:
                self._paces[0].see(line, now)
            self._keep(line)

    def _keep(self, line: Line) -> None:
        self._step = self._step if line.step is None else line.step
        self._total = line.total or self._total
        values = {**line.values, **({} if line.seconds is None else {"seconds": line.seconds})}
        self._points.append(Point(self._step, values))
        if len(self._points) >= 2 * MAX_POINTS:
            self._points = thinned(self._points)

    def _message(self, launch: int, generation: int, now: float) -> Metrics | None:
        paces = {rank: each.pace(now) for rank, each in self._paces.items() if not self._has_ended(rank)}
        known = {rank: pace for rank, pace in paces.items() if pace is not None}
        points, self._points = tuple(self._points), []
        self._told_at = now
        if not known and not points:
            return None
        from_0 = 0 in self._paces and self._paces[0].counts_from_0
        return Metrics(launch, generation, known, points, self._total, from_0)


def thinned(points: list[Point]) -> list[Point]:
    """Return half as many points: of two neighbours one, with the last value of each key."""
    pairs = zip(points[::2], [*points[1::2], None], strict=False)
    return [first if second is None else _merged(first, second) for first, second in pairs]


def _merged(first: Point, second: Point) -> Point:
    values = dict(list({**first.values, **second.values}.items())[:MAX_KEYS])
    return Point(second.step, values)
