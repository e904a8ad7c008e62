"""Whose is each line of the tasks' logs, and in which order are they? Pure."""

from __future__ import annotations

import heapq
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..channel.backlog import LINE_CHARS

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


class OwnLog:
    """What is known of one stream of a node's own log, to find out which lines of another log are copies of its lines.

    Time alone does not tell. A copy is younger than its line. A pod that was killed has not stored its last lines. And
    the log of a pod that was deleted is overwritten by that of its replacement, on Kubernetes. It can be that of one
    stream alone, where the replacement was killed while it stored both.
    """

    def __init__(self, begin: str, recent: str, end: str) -> None:
        self._begin, self._end = begin, end  # the times of its first and last line
        self._recent = recent  # copies of lines since this time may have been on their way at the end
        # Lines of the other log after this one's end: not found here yet, and found here. A label is in `_lacks`
        # when one of its lines is not here; those that follow are not, either.
        self._late: Counter[str] = Counter()
        self._copied: Counter[str] = Counter()
        self._lacks: set[str] = set()

    def announce(self, time: str, text: str) -> None:
        """Take note of a line of another log that will be asked for."""
        if time > self._end:
            self._late[text[:LINE_CHARS]] += 1

    @property
    def is_awaited(self) -> bool:
        """Whether its lines are to be looked at, since copies of them may have come late."""
        return bool(self._late)

    def look_at(self, time: str, text: str) -> None:
        """Take note of a line of this log, after all that were announced."""
        key = text[:LINE_CHARS]
        if time >= self._recent and self._late[key]:
            self._late[key] -= 1
            self._copied[key] += 1

    def has(self, time: str, text: str) -> bool:
        """Tell whether a line of another log, taken down at `time`, is a copy. Ask for each line once, in order."""
        if not self._begin <= time:
            return False
        if time <= self._end:
            return True
        key, source = text[:LINE_CHARS], text.partition("]")[0]
        if self._copied[key] and source not in self._lacks:
            self._copied[key] -= 1
            return True
        self._lacks.add(source)
        return False


class Reader:
    """Tells whose a line is.

    On a local run the nodes' tasks have no logs of their own: all lines stand in the control task's. On a remote run
    with ``logs="all"`` the control task's log has copies of what stands in the others'; they are left out.
    """

    def __init__(self, node_of: Callable[[int], int | None], own: Mapping[tuple[int, str], OwnLog]) -> None:
        self._node_of = node_of
        self._own = own  # of each node that has a log, and each of its streams
        self._has_many = len({node for node, _ in own}) > 1

    def take(self, source: Source, time: str, text: str) -> Line | None:
        """Return the line, or None for a copy."""
        node, rank = self._place(source, text)
        own = None if node is None or node == source.node else self._own.get((node, source.stream))
        if own is not None and own.has(time, text):
            return None
        return Line(time, source.task, source.stream, node, rank, text)

    def _place(self, source: Source, text: str) -> tuple[int | None, int | None]:
        """Return node and rank of a line, as far as they are known."""
        label = _LABEL.match(text)
        rank = None if label is None or label[1] is None else int(label[1])
        node = None if label is None else int(label[2] or label[3]) if rank is None else self._node_of(rank)
        if node is None:
            node = source.node if self._has_many else None
        return node, rank

    def find_copies(self, control: Iterable[Source], whole: Iterable[Source]) -> None:
        """Look for copies that are younger than the logs of whose lines they are.

        `control` is what will be read of the control node's log, `whole` is all logs.
        """
        for source in control:
            for time, text in source.lines:
                node, _ = self._place(source, text)
                own = None if node is None or node == source.node else self._own.get((node, source.stream))
                if own is not None:
                    own.announce(time, text)
        for source in whole:
            own = self._own[source.node, source.stream]
            for time, text in source.lines if own.is_awaited else ():
                own.look_at(time, text)

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
