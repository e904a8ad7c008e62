"""Tables and texts for a terminal. Pure."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> list[str]:
    """Return lines with columns one below the other; those named in `right` end at their right edge.

    The last column may be as long as it likes.
    """
    cells = [tuple(header), *(tuple(printable_line(cell) for cell in row) for row in rows)]
    widths = [max(_width(row[column]) for row in cells) for column in range(len(header))]
    lines = []
    for row in cells:
        padded = []
        for name, cell, width in zip(header, row, widths, strict=True):
            pad = " " * (width - _width(cell))
            padded.append(pad + cell if name in right else cell + pad)
        lines.append("  ".join(padded).rstrip())
    return lines


def printable(text: str) -> str:
    """Return a text of several lines without what could steer a terminal."""
    return "\n".join(printable_line(line) for line in text.splitlines())


def printable_line(text: str) -> str:
    """Return a text of one line without what could steer a terminal."""
    return "".join(char if char == "\t" or unicodedata.category(char) != "Cc" else "?" for char in text)


def _width(text: str) -> int:
    """Return how many columns of a terminal a text takes."""
    wide = sum(unicodedata.east_asian_width(char) in "WF" for char in text)
    return len(text) + wide - sum(unicodedata.combining(char) != 0 for char in text)
