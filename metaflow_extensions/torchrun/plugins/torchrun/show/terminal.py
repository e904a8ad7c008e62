"""Tables and texts for a terminal. Pure."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> list[str]:
    """Return the lines of a table with aligned columns; those named in `right` are aligned to the right.

    The last column may have any length.
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
    """Return a text of several lines without control characters."""
    return "\n".join(printable_line(line) for line in text.splitlines())


def printable_line(text: str) -> str:
    """Return a text of one line without control characters."""
    return "".join(char if char == "\t" or unicodedata.category(char) != "Cc" else "?" for char in text)


def _width(text: str) -> int:
    """Return the width of a text in columns of a terminal."""
    wide = sum(unicodedata.east_asian_width(char) in "WF" for char in text)
    return len(text) + wide - sum(unicodedata.combining(char) != 0 for char in text)
