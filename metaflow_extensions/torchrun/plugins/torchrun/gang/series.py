"""A series of values over steps that keeps a bounded number of points. Pure.

The axis is divided into equal parts, and each part keeps its last point. When there are too many parts, they are merged
in pairs. So the series always covers all steps, with fewer points for each.
"""

from __future__ import annotations


class Series:
    """Points with growing steps, in at most `most` parts, which are 1 wide at first. A value of None is a gap."""

    def __init__(self, most: int) -> None:
        self._most, self._width = most, 1.0
        self.points: list[tuple[int, float | None]] = []

    def add(self, step: int, value: float | None) -> None:
        """Add a point. It replaces the points at the same step and later: after a restart, steps are done again."""
        while self.points and self.points[-1][0] >= step:
            self.points.pop()
        self._put(step, value)
        while self._part(step) >= self._most:
            self._width *= 2
            points, self.points = self.points, []
            for point in points:
                self._put(*point)

    def _part(self, step: int) -> int:
        return int((step - self.points[0][0]) / self._width)

    def _put(self, step: int, value: float | None) -> None:
        # The first point stays: the parts begin there.
        if len(self.points) > 1 and self._part(self.points[-1][0]) == self._part(step):
            self.points.pop()
        self.points.append((step, value))
