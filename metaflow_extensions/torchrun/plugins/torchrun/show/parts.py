"""The parts of a gang's page; each writes itself as lines for a terminal and as HTML for a card. Pure.

Metaflow has no component for HTML, but its Markdown lets a block of HTML through. Each block is one line, since a blank
line would end it; so line breaks of texts are entities. Each section has an id. While a page is shown, Metaflow replaces
components by id, but adds none (2.19). So a section without parts is on the page, too, but hidden.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, TypeAlias

from ..gang.wire import to_plain

Component: TypeAlias = dict[str, Any]  # of Metaflow's cards, as plain data
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


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


def one_line(text: str) -> str:
    """Return a text escaped for HTML, as one line."""
    safe = html.escape(_CONTROL.sub("\N{REPLACEMENT CHARACTER}", text))
    return safe.replace("\r", "&#13;").replace("\n", "&#10;")


def css_class(colour: str) -> str:
    """Return the CSS class of a colour of `charts.COLOURS`, see ``style``."""
    return f"tr-{colour.replace(' ', '-')}"


@dataclass(frozen=True)
class WebLink:
    """A text that is a link in a card, if `url` is known."""

    text: str
    url: str | None = None


class Part:
    """One part of a section; a kind that overrides neither method is a component of Metaflow's own."""

    def lines(self) -> list[str]:
        """Return it for a terminal; nothing of what stands there in another part."""
        return []

    def html(self) -> str:
        """Return it as HTML, in one line."""
        raise NotImplementedError


@dataclass(frozen=True)
class Sentence(Part):
    """One sentence or more, as a paragraph."""

    text: str
    kind: Literal["", "headline", "outcome", "note"] = ""  # a note explains a card; not on a terminal
    word: str = ""  # the outcome in a word; a key of `charts.COLOURS`

    def lines(self) -> list[str]:
        return [] if self.kind == "note" else [printable_line(self.text), *([""] if self.kind == "headline" else [])]

    def html(self) -> str:
        text = one_line(self.text)
        if self.kind == "outcome":
            return f'<div class="tr-verdict {css_class(self.word)}"><span class="tr-sentence">{text}</span></div>'
        return f'<p class="tr-{self.kind}">{text}</p>' if self.kind else f"<p>{text}</p>"


@dataclass(frozen=True)
class Facts(Part):
    """Names with values; those without a value are not shown."""

    rows: Sequence[tuple[str, str]]

    def lines(self) -> list[str]:
        known = [(name, printable_line(value)) for name, value in self.rows if value]
        width = max((len(name) for name, _ in known), default=0)
        return [f"{name.ljust(width)}  {value}" for name, value in known]

    def html(self) -> str:
        rows = [f"<div><dt>{one_line(name)}</dt><dd>{one_line(text)}</dd></div>" for name, text in self.rows if text]
        return f'<dl class="tr-facts">{"".join(rows)}</dl>'


@dataclass(frozen=True)
class Table(Part):
    """Rows of cells; on a terminal, columns named in `right` are aligned to the right."""

    header: tuple[str, ...]
    rows: Sequence[tuple[str | WebLink, ...]]
    right: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        rows = [[cell.text if isinstance(cell, WebLink) else cell for cell in row] for row in self.rows]
        return table(self.header, rows, self.right)


@dataclass(frozen=True)
class Code(Part):
    """A verbatim text, such as a traceback."""

    text: str
    title: str = ""

    def lines(self) -> list[str]:
        return [*(["", self.title] if self.title else []), *printable(self.text).splitlines()]

    def html(self) -> str:
        title = f'<div class="tr-label">{one_line(self.title)}</div>' if self.title else ""
        return f'{title}<pre class="tr-code">{one_line(self.text)}</pre>'


@dataclass(frozen=True)
class Keys(Part):
    """The meaning of colours: by colour, a text."""

    keys: dict[Any, str]

    def lines(self) -> list[str]:
        return [", ".join(self.keys.values())]

    def html(self) -> str:
        return "".join(
            f'<span class="tr-key {css_class(key)}">{one_line(text)}</span>' for key, text in self.keys.items()
        )


@dataclass(frozen=True)
class Cell:
    """One rank or node among many; its state is a key of `charts.COLOURS`."""

    title: str
    state: str
    word: str
    place: str

    def html(self, is_small: bool) -> str:
        """Return it as an item of a list; of a small one only the number is shown."""
        title, word, place = map(one_line, (self.title, self.word, self.place))
        whole = f'<b>{title}</b><span class="tr-state">{word}</span><small>{place}</small>'
        about, shown = f"{title}, {place}: {word}", title.split()[-1] if is_small else whole
        return f'<li class="tr-cell {css_class(self.state)}" title="{about}">{shown}</li>'


@dataclass(frozen=True)
class Cells(Part):
    """Cells side by side; not on a terminal, where a table has them all."""

    cells: Sequence[Cell]
    is_small: bool = False  # only titles are shown

    def html(self) -> str:
        cells = "".join(each.html(self.is_small) for each in self.cells)
        return f'<ul class="tr-cells{" tr-small" * self.is_small}">{cells}</ul>'


@dataclass(frozen=True)
class Bar(Part):
    """A progress bar; not on a terminal, where a sentence has the number."""

    percent: int
    state: str  # a key of `charts.COLOURS`

    def html(self) -> str:
        # Metaflow's own component has fixed colours (2.19), which can't be read on a dark page.
        whole = f'class="tr-bar {css_class(self.state)}" max="100" value="{self.percent}"'
        return f"<progress {whole}>{self.percent} %</progress>"


@dataclass(frozen=True)
class Chart(Part):
    """A chart of Vega-Lite; not on a terminal, where words say the same."""

    spec: dict[str, Any]


@dataclass(frozen=True)
class Block(Part):
    """Parts with a title."""

    title: str
    parts: Sequence[Part]
    is_folded: bool = False  # hidden until a reader opens it

    def lines(self) -> list[str]:
        return ["", self.title, *(line for part in self.parts for line in part.lines())]

    def html(self) -> str:
        inner, title = "".join(part.html() for part in self.parts), one_line(self.title)
        if self.is_folded:
            return f'<details class="tr-restart"><summary>{title}</summary>{inner}</details>'
        return f'<div class="tr-cause"><b>{title}</b>{inner}</div>'


@dataclass(frozen=True)
class Section:
    """A section of the page; users can request it by name. One without a title stands by itself."""

    name: str
    title: str
    parts: Sequence[Part]

    def component(self) -> Component:
        """Return it as a component of a card. By its id, it replaces an older one."""
        title = {"title": self.title} if self.title and self.parts else {}
        plain: Component = to_plain(
            {"type": "section", "id": f"gang-{self.name}", **title, "contents": [*_components(self)]}
        )
        return plain


@dataclass(frozen=True)
class Page:
    """A whole page."""

    title: str
    sections: Sequence[Section]


def lines_of(page: Page) -> list[str]:
    """Return the page for a terminal, without sections that are empty there."""
    lines: list[str] = []
    for section in page.sections:
        if body := [line for part in section.parts for line in part.lines()]:
            lines += [*([""] if lines else []), *([section.title] if section.title else []), *body]
    return lines


def layout(page: Page) -> Component:
    """Return the page as a component of a card."""
    return {"type": "page", "title": page.title, "contents": [section.component() for section in page.sections]}


def said(text: str, kind: Literal["", "note"] = "") -> Component:
    """Return a section with one sentence, for a task without a gang to show."""
    return Section("none", "", [Sentence(text, kind)]).component()


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


def _in_table(cell: str | WebLink) -> Any:
    """Return a cell. Metaflow shows a string verbatim."""
    if isinstance(cell, WebLink):
        return {"type": "markdown", "source": f"[{cell.text}]({cell.url})"} if cell.url else cell.text
    return cell or "–"
