"""Computes the speed of one rank from its reported steps and their times. Pure."""

from __future__ import annotations

from collections import deque
from statistics import fmean

from ..gang.progress import Pace
from .metric_lines import Line

# Steps a second are measured over this time, or over the last step if that took longer.
_WINDOW_S = 20.0
# A rank has no speed if it has reported no step for this long and for this many times the duration of its last step: it
# may wait for others. Lower limits would also exclude ranks that are slow.
_STILL_S, _STILL_STEPS = 60.0, 3
_LAST_SECONDS = 20


class RankPace:
    """The speed of one rank, from its steps and the times at which they were read."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, int]] = deque()
        self._seconds: deque[float] = deque(maxlen=_LAST_SECONDS)
        self._total: float | None = None

    def see(self, line: Line, now: float) -> None:
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
        step = self._steps[-1][1]
        # After its last step a rank has no speed. Steps may count from 0.
        if self._total is not None and step + 1 >= self._total:
            return Pace(step)
        return Pace(step, self._steps_per_s(now), fmean(self._seconds) if self._seconds else None)

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
