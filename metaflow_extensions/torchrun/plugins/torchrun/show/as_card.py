"""Writes sections of a gang's page as components of Metaflow's cards (plain data). Pure.

Each section has an id. While a page is shown, Metaflow replaces components by id, but adds none (2.19). So a section
without parts is on the page, too, but hidden.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import groupby
from typing import Any, TypeAlias

from ..gang.wire import finite
from .parts import Block, Chart, Link, Page, Part, Section, Sentence, Table
from .style import PARTS_STYLE

Component: TypeAlias = dict[str, Any]


def layout(page: Page) -> Component:
    """Return a whole page."""
    return {"type": "page", "title": page.title, "contents": components(page.sections)}


def components(sections: Iterable[Section]) -> list[Component]:
    """Return sections. By its id, each replaces an older one."""
    plain: list[Component] = finite([_component(section) for section in sections])
    return plain


def part(component_id: str, page: Page, names: Collection[str]) -> Component:
    """Return the sections with these names and the style as one component, for a user's own card."""
    style = {"type": "markdown", "source": f"<style>{PARTS_STYLE}</style>"}
    chosen = components(each for each in page.sections if not names or each.name in names)
    return {"type": "section", "id": component_id, "contents": [style, *chosen]}


def said(sentence: Sentence) -> Component:
    """Return a section with one sentence, for a task without a gang to show."""
    return _component(Section("none", "", (sentence,)))


def _component(section: Section) -> Component:
    title = {"title": section.title} if section.title and section.parts else {}
    return {"type": "section", "id": f"gang-{section.name}", **title, "contents": [*_components(section)]}


def _components(section: Section) -> Iterator[Component]:
    """Return a section's contents: adjacent parts of HTML become one component, and adjacent charts a grid."""
    for kind, group in groupby(section.parts, _kind):
        parts: list[Any] = list(group)
        if kind == "chart":
            charts = [{"type": "vegaChart", "spec": part.spec, "options": {"actions": False}} for part in parts]
            yield from charts if len(charts) == 1 else [{"type": "section", "columns": 2, "contents": charts}]
        elif kind == "table":
            for part in parts:
                rows = [[_in_table(cell) for cell in row] for row in part.rows]
                yield {"type": "table", "columns": list(part.header), "data": rows, "vertical": False}
        else:
            source = "".join(part.html() for part in parts)
            yield {"type": "markdown", "source": f'<div class="tr tr-{section.name}">{source}</div>'}


def _kind(part: Part) -> str:
    """Return the kind of a part, for grouping. A folded part is separate, so that it stays open when others change."""
    if isinstance(part, Chart | Table):
        return type(part).__name__.lower()
    return "folded" if isinstance(part, Block) and part.is_folded else "html"


def _in_table(cell: str | Link) -> Any:
    """Return a cell. Metaflow shows a string verbatim."""
    if isinstance(cell, Link):
        return {"type": "markdown", "source": f"[{cell.text}]({cell.url})"} if cell.url else cell.text
    return cell or "–"
