"""A series of values over time or steps that keeps a bounded number of points. Pure.

The axis is divided into equal parts, and each part keeps one point. When there are too many parts, they are merged
in pairs. So the series always covers the whole time, with fewer points for each minute.
"""

from __future__ import annotations

import math
from array import array
from typing import Literal, TypeAlias

Merge: TypeAlias = Literal["last", "mean"]
"""How two values in one part are merged."""


class Series:
    """Points with growing x, in at most `most` parts, the first of which starts at the first x.

    A value of None is a gap. Not safe for several threads.
    """

    def __init__(self, most: int, width: float, merge: Merge) -> None:
        self.width = width  # of a part
        self._most, self._merge = most, merge
        self._begin = 0.0
        # Arrays, since a large gang has thousands of series. NaN stands for None.
        self._xs, self._values = array("d"), array("d")
        self._counts = array("L")  # how many values each stands for

    def add(self, x: float, value: float | None) -> None:
        """Add a point. It replaces the points at the same x and later: after a restart, steps are done again."""
        while self._xs and self._xs[-1] >= x:
            self._xs.pop()
            self._values.pop()
            self._counts.pop()
        if not self._xs:
            self._begin = x
        while self._part(x) >= self._most:
            self.widen(2 * self.width)
        self._put(x, *((math.nan, 0) if value is None else (value, 1)))

    def widen(self, width: float) -> None:
        """Make the parts longer."""
        points = list(zip(self._xs, self._values, self._counts, strict=True))
        self.width = width
        self._xs, self._values, self._counts = array("d"), array("d"), array("L")
        for point in points:
            self._put(*point)

    @property
    def points(self) -> list[tuple[float, float | None]]:
        """The kept points, in order."""
        return [(x, None if math.isnan(value) else value) for x, value in zip(self._xs, self._values, strict=True)]

    def _part(self, x: float) -> int:
        return int((x - self._begin) / self.width)

    def _put(self, x: float, value: float, count: int) -> None:
        if self._xs and self._part(self._xs[-1]) == self._part(x):
            self._xs[-1], self._values[-1] = x, self._merged(self._values[-1], value, count)
            self._counts[-1] += count
        else:
            self._xs.append(x)
            self._values.append(value)
            self._counts.append(count)

    def _merged(self, before: float, value: float, count: int) -> float:
        if self._merge == "last" or math.isnan(before):
            return value
        if math.isnan(value):
            return before
        return before + (value - before) * (count / (self._counts[-1] + count))
