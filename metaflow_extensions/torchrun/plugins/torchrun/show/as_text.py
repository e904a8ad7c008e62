"""Writes a gang's page as lines for a terminal. Pure."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence

from .parts.model import Block, Chart, Code, Facts, Keys, Link, Page, Part, Sentence, Table


def lines_of(page: Page) -> list[str]:
    """Return the page's lines, without sections that are empty on a terminal."""
    lines: list[str] = []
    for section in page.sections:
        body = _written(section.parts)
        if body:
            lines += [*([""] if lines else []), *([section.title] if section.title else []), *body]
    return lines


def _written(parts: Iterable[Part]) -> list[str]:
    return [line for part in parts for line in _lines(part)]


def _lines(part: Part) -> list[str]:
    if isinstance(part, Sentence):
        return [_printable(part.text), *([""] if part.kind == "headline" else [])]
    if isinstance(part, Facts):
        known = [(name, _printable(value)) for name, value in part.rows if value]
        width = max((len(name) for name, _ in known), default=0)
        return [f"{name.ljust(width)}  {value}" for name, value in known]
    if isinstance(part, Table):
        rows = [[cell.text if isinstance(cell, Link) else cell for cell in row] for row in part.rows]
        return table(part.header, rows, part.right)
    if isinstance(part, Code):
        return [*([part.title] if part.title else []), *printable(part.text).splitlines()]
    if isinstance(part, Block):
        return ["", part.title, *_written(part.parts)]
    if isinstance(part, Keys | Chart):
        return [_printable(part.said)] if part.said else []
    return []


def table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> list[str]:
    """Return the lines of a table with aligned columns; those named in `right` are aligned to the right.

    The last column may have any length.
    """
    cells = [tuple(header), *(tuple(_printable(cell) for cell in row) for row in rows)]
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
    return "\n".join(_printable(line) for line in text.splitlines())


def _printable(text: str) -> str:
    return "".join(char if char == "\t" or unicodedata.category(char) != "Cc" else "?" for char in text)


def _width(text: str) -> int:
    """Return the width of a text in columns of a terminal."""
    wide = sum(unicodedata.east_asian_width(char) in "WF" for char in text)
    return len(text) + wide - sum(unicodedata.combining(char) != 0 for char in text)
