"""The parts of a gang's page, independent of where it is shown. Pure.

`show` and the parts of a card create them. `as_text` writes them to a terminal, `as_card` as components of Metaflow's cards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, Union


@dataclass(frozen=True)
class Link:
    """A text that is a link in a card, if `url` is known."""

    text: str
    url: str | None = None


@dataclass(frozen=True)
class Sentence:
    """One sentence or more, as a paragraph."""

    text: str
    kind: Literal["", "headline", "outcome", "note"] = ""  # a note explains a card; not on a terminal
    word: str = ""  # the outcome in a word; a key of `charts.COLOURS`


@dataclass(frozen=True)
class Facts:
    """Names with values; those without a value are not shown."""

    rows: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Table:
    """Rows of cells; on a terminal, columns named in `right` are aligned to the right."""

    header: tuple[str, ...]
    rows: tuple[tuple[str | Link, ...], ...]
    right: tuple[str, ...] = ()


@dataclass(frozen=True)
class Code:
    """A verbatim text, such as a traceback."""

    text: str
    title: str = ""


@dataclass(frozen=True)
class Keys:
    """The meaning of colours: texts, each with the name of a colour."""

    keys: tuple[tuple[str, str], ...]
    said: str = ""  # on a terminal


@dataclass(frozen=True)
class Cell:
    """One rank or node among many."""

    title: str
    state: str  # a key of `charts.COLOURS`
    word: str = ""
    place: str = ""
    mark: str = ""  # what is odd about it


@dataclass(frozen=True)
class Cells:
    """Cells side by side; not on a terminal, where a table has them all."""

    cells: tuple[Cell, ...]
    is_small: bool = False  # only titles are shown


@dataclass(frozen=True)
class Bar:
    """A progress bar; not on a terminal, where a sentence has the number."""

    percent: int
    state: str = "running"  # a key of `charts.COLOURS`


@dataclass(frozen=True)
class Chart:
    """A chart of Vega-Lite."""

    spec: dict[str, Any]
    said: str = ""  # the last values, for a terminal


@dataclass(frozen=True)
class Block:
    """Parts with a title."""

    title: str
    parts: tuple[Part, ...]
    is_folded: bool = False  # hidden until a reader opens it


Part: TypeAlias = Union[Sentence, Facts, Table, Code, Keys, Cells, Bar, Chart, Block]  # noqa: UP007 - Python 3.10


@dataclass(frozen=True)
class Section:
    """A section of the page; users can request it by name."""

    name: str
    title: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Page:
    """A whole page."""

    title: str
    sections: tuple[Section, ...]
