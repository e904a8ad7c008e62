"""Whose is each line of the tasks' logs, and in which order are they? Pure."""

from __future__ import annotations

import heapq
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..gang.backlog import LINE_CHARS

_LABEL = re.compile(r"\[(?:rank (\d+)|torchrun node (\d+))\] ")


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


class OwnLog:
    """What is known of a node's own log, to find out which lines of another log are copies of its lines.

    Time alone does not tell. A copy is younger than its line. A pod that was killed has not stored its last lines. And
    the log of a pod that was deleted is overwritten by that of its replacement, on Kubernetes.
    """

    def __init__(self, begin: str, end: str, tails: Mapping[str, Sequence[tuple[str, str]]]) -> None:
        self._begin, self._end = begin, end  # the times of its first and last line
        # Of each stream the last lines, with how often each stands there, and the time of the first of them.
        self._tail = Counter((stream, text[:LINE_CHARS]) for stream, lines in tails.items() for _, text in lines)
        self._tail_begin = {stream: lines[0][0] for stream, lines in tails.items() if lines}

    def has(self, time: str, stream: str, text: str) -> bool:
        """Tell whether a line of another log, taken down at `time`, is a copy. Ask for each line once, in order."""
        if time < self._begin:
            return False
        line = (stream, text[:LINE_CHARS])
        if self._tail[line] and time >= self._tail_begin[stream]:
            self._tail[line] -= 1
            return True
        return time <= self._end


class Reader:
    """Tells whose a line is.

    On a local run the nodes' tasks have no logs of their own: all lines stand in the control task's. On a remote run
    with ``logs="all"`` the control task's log has copies of what stands in the others'; they are left out.
    """

    def __init__(self, node_of: Callable[[int], int | None], own: Mapping[int, OwnLog]) -> None:
        self._node_of = node_of
        self._own = own  # of each node that has a log

    def take(self, source: Source, time: str, text: str) -> Line | None:
        """Return the line, or None for a copy."""
        label = _LABEL.match(text)
        if label is None:
            node = source.node if len(self._own) > 1 else None
            return Line(time, source.task, source.stream, node, None, text)
        rank = None if label[1] is None else int(label[1])
        node = int(label[2]) if rank is None else self._node_of(rank)
        if node is None:
            node = source.node if len(self._own) > 1 else None
        own = None if node is None or node == source.node else self._own.get(node)
        if own is not None and own.has(time, source.stream, text):
            return None
        return Line(time, source.task, source.stream, node, rank, text)

    def merged(self, sources: Iterable[Source]) -> Iterator[Line]:
        """Return all lines by time; those of one source stay in order, whatever their clock has done."""
        return heapq.merge(*(self._of(source) for source in sources), key=lambda line: line.time)

    def _of(self, source: Source) -> Iterator[Line]:
        latest = ""
        for time, text in source.lines:
            latest = max(latest, time)
            line = self.take(source, latest, text)
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
