"""The lines of all tasks' logs: whose each is, and in which order they come. Pure."""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

_LABEL = re.compile(r"\[(?:rank (\d+)|torchrun node (\d+)|node (\d+) before_run \d+/\d+)\] ")


@dataclass(frozen=True)
class Line:
    """One line of a log."""

    time: str  # UTC, as ISO 8601 has it; by the clock of the machine that took it down
    task: str
    stream: str  # stdout or stderr
    node: int | None  # None: of one of the nodes whose lines stand in one log
    rank: int | None
    text: str

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)


@dataclass(frozen=True)
class Source:
    """One stream of one task's log, or what is new in it."""

    task: str
    node: int
    stream: str
    lines: Iterable[tuple[str, str]]  # time and text, in the order in which they were written


class Reader:
    """Tells whose a line is.

    On a local run the nodes' tasks have no logs of their own: all lines stand in the control task's. On a remote run
    with ``logs="all"`` the control task's log has copies of other nodes' lines. One rule leaves them out: a node that
    has a log of its own is read there.
    """

    def __init__(self, node_of: Callable[[int], int | None], nodes: Collection[int]) -> None:
        self._node_of = node_of
        self._nodes = nodes  # those that have a log

    def line(self, source: Source, time: str, text: str) -> Line | None:
        """Return the line, or None for a copy."""
        node, rank = self._place(source, text)
        if node is not None and node != source.node and node in self._nodes:
            return None
        return Line(time, source.task, source.stream, node, rank, text)

    def _place(self, source: Source, text: str) -> tuple[int | None, int | None]:
        """Return node and rank of a line, as far as they are known."""
        label = _LABEL.match(text)
        rank = None if label is None or label[1] is None else int(label[1])
        node = None if label is None else int(label[2] or label[3]) if rank is None else self._node_of(rank)
        if node is None:
            node = source.node if len(self._nodes) > 1 else None
        return node, rank

    def merged(self, sources: Iterable[Source]) -> Iterator[Line]:
        """Return all lines by time; those of one source stay in order, whatever their clock has done."""
        return heapq.merge(*(self._of(source) for source in sources), key=lambda line: line.time)

    def _of(self, source: Source) -> Iterator[Line]:
        latest = ""
        for time, text in source.lines:
            latest = max(latest, time)
            line = self.line(source, latest, text)
            if line is not None:
                yield line


def wanted(
    lines: Iterable[Line], rank: int | None = None, node: int | None = None, pattern: re.Pattern[str] | None = None
) -> Iterator[Line]:
    """Return those of a rank, of a node, and in which the pattern is found."""
    for line in lines:
        is_theirs = (rank is None or line.rank == rank) and (node is None or line.node == node)
        if is_theirs and (pattern is None or pattern.search(line.text)):
            yield line


def shown(line: Line, clock: Callable[[str], str]) -> str:
    """Return a line for people; one that does not say where it comes from is labelled."""
    is_labelled = line.node is None or _LABEL.match(line.text) is not None
    return f"{clock(line.time)} {'' if is_labelled else f'[node {line.node}] '}{line.text}"
