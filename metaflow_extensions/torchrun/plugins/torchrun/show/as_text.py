"""Writes a gang's page as lines for a terminal. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from ..elements.model import Block, Chart, Code, Facts, Keys, Link, Page, Part, Sentence, Table
from ..elements.terminal import printable, printable_line, table


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
        if part.kind == "note":
            return []
        return [printable_line(part.text), *([""] if part.kind == "headline" else [])]
    if isinstance(part, Facts):
        known = [(name, printable_line(value)) for name, value in part.rows if value]
        width = max((len(name) for name, _ in known), default=0)
        return [f"{name.ljust(width)}  {value}" for name, value in known]
    if isinstance(part, Table):
        rows = [[cell.text if isinstance(cell, Link) else cell for cell in row] for row in part.rows]
        return table(part.header, rows, part.right)
    if isinstance(part, Code):
        return [*(["", part.title] if part.title else []), *printable(part.text).splitlines()]
    if isinstance(part, Block):
        return ["", part.title, *_written(part.parts)]
    if isinstance(part, Keys | Chart):
        return [printable_line(part.said)] if part.said else []
    return []
