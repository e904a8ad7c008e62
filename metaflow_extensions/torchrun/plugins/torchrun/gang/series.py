"""A series of values over steps that keeps a bounded number of points. Pure.

The axis is divided into equal parts, and each part keeps its last point. When there are too many parts, they are merged
in pairs. So the series always covers all steps, with fewer points for each.
"""

from __future__ import annotations

import math
from array import array


class Series:
    """Points with growing x, in at most `most` parts, the first of which starts at the first x; at first each is 1 wide.

    A value of None is a gap. Not safe for several threads.
    """

    def __init__(self, most: int) -> None:
        self._most, self._width = most, 1.0
        # Arrays, since a script may report for days. NaN stands for None.
        self._xs, self._values = array("d"), array("d")

    def add(self, x: float, value: float | None) -> None:
        """Add a point. It replaces the points at the same x and later: after a restart, steps are done again."""
        while self._xs and self._xs[-1] >= x:
            self._xs.pop()
            self._values.pop()
        self._put(x, math.nan if value is None else value)
        while self._part(x) >= self._most:
            self._width *= 2
            points = list(zip(self._xs, self._values, strict=True))
            del self._xs[:], self._values[:]
            for point in points:
                self._put(*point)

    @property
    def points(self) -> list[tuple[float, float | None]]:
        """The kept points, in order."""
        return [(x, None if math.isnan(value) else value) for x, value in zip(self._xs, self._values, strict=True)]

    def _part(self, x: float) -> int:
        return int((x - self._xs[0]) / self._width) if self._xs else 0

    def _put(self, x: float, value: float) -> None:
        # The first point stays: the parts begin there.
        if len(self._xs) > 1 and self._part(self._xs[-1]) == self._part(x):
            self._xs[-1], self._values[-1] = x, value
        else:
            self._xs.append(x)
            self._values.append(value)
