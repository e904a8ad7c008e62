"""Numbers, lists and durations as text for people."""

from __future__ import annotations

import time
from collections.abc import Iterable

_LISTED = 8  # numbers, ranges of numbers, or values
_HEADLINE_CHARS = 300


def names(numbers: Iterable[int], what: str = "node") -> str:
    """Return ``"node 1"``, ``"nodes 1, 2"``, or of many ``"nodes 1-37, 40 and 12 more"``."""
    given = list(numbers)
    return f"{what} {shortened(given)}" if len(given) == 1 else f"{what}s {shortened(given)}"


def counted(count: int, what: str) -> str:
    """Return a number with its noun: "1 node", "2 nodes"."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def shortened(numbers: Iterable[int]) -> str:
    """Return a list of numbers for people, with those that follow each other as a range if they are many."""
    given = sorted(numbers)
    if len(given) <= _LISTED:
        return ", ".join(map(str, given))
    ranges: list[list[int]] = []
    for number in given:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    said = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges[:_LISTED])
    more = sum(last - first + 1 for first, last in ranges[_LISTED:])
    return f"{said} and {more} more" if more else said


def first_values(values: list[str]) -> str:
    """Return the first of many values, and how many more there are."""
    more = f" and {len(values) - _LISTED} more values" if len(values) > _LISTED else ""
    return ", ".join(values[:_LISTED]) + more


def headline(text: str) -> str:
    """Return the first line of a text, cut where it is too long for a line of a log."""
    line = text.splitlines()[0]
    return line if len(line) <= _HEADLINE_CHARS else line[:_HEADLINE_CHARS] + "…"


def duration(seconds: float) -> str:
    """Return ``"7 s"``, ``"3 min 20 s"`` or ``"2 h 5 min"``."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def moment(seconds: float) -> str:
    """Return a time in seconds since 1970 as date and time of day."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def size_text(size: int) -> str:
    """Return a number of bytes: ``"2.1 GB"``."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return counted(size, "byte")
