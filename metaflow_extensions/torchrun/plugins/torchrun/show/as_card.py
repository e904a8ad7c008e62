"""Writes a gang's page as components of Metaflow's cards (plain data). Pure.

Metaflow has no component for HTML, but its Markdown lets a block of HTML through. Each block is one line, since a blank
line would end it; so line breaks of texts are entities. Each section has an id. While a page is shown, Metaflow replaces
components by id, but adds none (2.19). So a section without parts is on the page, too, but hidden.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any, TypeAlias

from ..elements.model import (
    Bar,
    Block,
    Cell,
    Cells,
    Chart,
    Code,
    Facts,
    Keys,
    Link,
    Page,
    Part,
    Section,
    Sentence,
    Table,
)
from ..gang.wire import to_plain
from .style import PARTS_STYLE

Component: TypeAlias = dict[str, Any]
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


def layout(page: Page) -> Component:
    """Return the whole page."""
    return {"type": "page", "title": page.title, "contents": sections(page)}


def sections(page: Page) -> list[Component]:
    """Return the sections. Each has an id, by which it replaces an older one."""
    plain: list[Component] = to_plain([_section(section) for section in page.sections])
    return plain


def part(component_id: str, page: Page, names: Iterable[str]) -> Component:
    """Return the sections with these names and the style as one component, for a user's own card."""
    wanted = set(names)
    chosen = Page(page.title, tuple(each for each in page.sections if not wanted or each.name in wanted))
    style = {"type": "markdown", "source": f"<style>{PARTS_STYLE}</style>"}
    return {"type": "section", "id": component_id, "contents": [style, *sections(chosen)]}


def said(sentence: Sentence) -> Component:
    """Return a section with one sentence, for a task without a gang to show."""
    return _section(Section("none", "", (sentence,)))


def _section(section: Section) -> Component:
    title = {"title": section.title} if section.title and section.parts else {}
    return {"type": "section", "id": f"gang-{section.name}", **title, "contents": [*_components(section)]}


def _components(section: Section) -> Iterator[Component]:
    """Return a section's contents: adjacent parts of HTML become one component, and adjacent charts a grid."""
    for kind, group in groupby(section.parts, _kind):
        parts = list(group)
        if kind == "chart":
            charts = [{"type": "vegaChart", "spec": part.spec, "options": {"actions": False}} for part in parts]  # type: ignore[union-attr]
            yield from charts if len(charts) == 1 else [{"type": "section", "columns": 2, "contents": charts}]
        elif kind == "table":
            yield from map(_table, parts)
        else:
            source = "".join(map(_html, parts))
            yield {"type": "markdown", "source": f'<div class="tr tr-{section.name}">{source}</div>'}


def _kind(part: Part) -> str:
    """Return the kind of a part, for grouping. A folded part is separate, so that it stays open when others change."""
    if isinstance(part, Chart | Table):
        return type(part).__name__.lower()
    return "folded" if isinstance(part, Block) and part.is_folded else "html"


def _table(part: Part) -> Component:
    assert isinstance(part, Table)
    rows = [[_in_table(cell) for cell in row] for row in part.rows]
    return {"type": "table", "columns": list(part.header), "data": rows, "vertical": False}


def _in_table(cell: str | Link) -> Any:
    """Return a cell. Metaflow shows a string verbatim."""
    if isinstance(cell, Link):
        return {"type": "markdown", "source": f"[{cell.text}]({cell.url})"} if cell.url else cell.text
    return cell or "–"


def one_line(text: str) -> str:
    """Return a text escaped for HTML, as one line."""
    safe = html.escape(_CONTROL.sub("\N{REPLACEMENT CHARACTER}", text))
    return safe.replace("\r", "&#13;").replace("\n", "&#10;")


def _html(part: Part) -> str:
    if isinstance(part, Sentence):
        return _sentence(part)
    if isinstance(part, Facts):
        rows = ((one_line(name), one_line(value)) for name, value in part.rows if value)
        listed = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in rows)
        return f'<dl class="tr-facts">{listed}</dl>'
    if isinstance(part, Code):
        title = f'<div class="tr-label">{one_line(part.title)}</div>' if part.title else ""
        return f'{title}<pre class="tr-code">{one_line(part.text)}</pre>'
    if isinstance(part, Keys):
        return "".join(f'<span class="tr-key {_colour(name)}">{one_line(text)}</span>' for text, name in part.keys)
    if isinstance(part, Cells):
        cells = "".join(_cell(each, part.is_small) for each in part.cells)
        return f'<ul class="tr-cells{" tr-small" * part.is_small}">{cells}</ul>'
    if isinstance(part, Bar):
        # Metaflow's own component has fixed colours (2.19), which can't be read on a dark page.
        return f'<progress class="tr-bar {_colour(part.state)}" max="100" value="{part.percent}">{part.percent} %</progress>'
    assert isinstance(part, Block), f"{type(part).__name__} is no HTML"
    inner, title = "".join(map(_html, part.parts)), one_line(part.title)
    if part.is_folded:
        return f'<details class="tr-restart"><summary>{title}</summary>{inner}</details>'
    return f'<div class="tr-cause"><b>{title}</b>{inner}</div>'


def _sentence(part: Sentence) -> str:
    text = one_line(part.text)
    if part.kind == "outcome":
        return f'<div class="tr-verdict {_colour(part.word)}"><span class="tr-sentence">{text}</span></div>'
    return f'<p class="tr-{part.kind}">{text}</p>' if part.kind else f"<p>{text}</p>"


def _cell(cell: Cell, is_small: bool) -> str:
    title, word, place = one_line(cell.title), one_line(cell.word), one_line(cell.place)
    mark = one_line(cell.mark)
    odd = f'<span class="tr-mark">{mark}</span>' if mark else ""
    whole = f'<b>{title}</b><span class="tr-state">{word}</span>{odd}<small>{place}</small>'
    shown = title.split()[-1] if is_small else whole
    about = f"{title}, {place}: {word}" + (f", {mark}" if mark else "")
    return f'<li class="tr-cell {_colour(cell.state)}{" tr-odd" * bool(mark)}" title="{about}">{shown}</li>'


def _colour(name: str) -> str:
    """Return the CSS class of a colour, see ``style``."""
    return f"tr-{name.replace(' ', '-')}"
