"""How fast one rank is, from the steps that it tells and when. Pure."""

from __future__ import annotations

from collections import deque

from .lines import Line
from .told import Pace

# Over how long steps a second are taken; where steps take longer, over the last one.
_WINDOW_S = 20.0
# After so long in its first step, a rank counts as slow as that makes it.
_FIRST_STEP_S = 60.0
# A rank that tells no step for so long, and for so many times what its last one took, may have done its part and wait
# for the others, or wait for what nobody knows: then it has no speed. Fewer would leave out ranks that are slow.
_STILL_S, _STILL_STEPS = 60.0, 3
_MAX_SECONDS = 256


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
