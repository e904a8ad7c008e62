"""Reads the stored logs of a gang's tasks, merges them by time with a label for each line, and follows growing ones.

Metaflow stores them as ``mflog`` (2.19): a line has the time at which it was captured. There may be many large files, so
they are read piece by piece, and none is held open.
"""

from __future__ import annotations

import heapq
import math
import re
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from ..compat.datastore import LINE_PARSER, LOG_SOURCES
from ..gang.limits import LATE_S
from ..gang.messages import CONTROL
from ..gang.view import GangView, Placed
from .stored_gangs import StoredGang, StoredGangs

_LABEL = re.compile(r"\[(?:rank (\d+)|torchrun(?: node (\d+))?|(?:node (\d+) )?before_run \d+/\d+)\] ")
_PIECE = 256 * 1024
_PAUSE_S = 1.0  # the least pause between two reads of growing logs
_SHARE = 2.0  # the pause after a long read, as a multiple of its duration
_LAST_S = 5.0  # an attempt's logs are complete when nothing new has come for this long after its end


@dataclass(frozen=True)
class LogLine:
    """One line of a log."""

    time: str  # UTC, in the format of ISO 8601, by the clock of the machine that captured it
    task: str
    stream: str  # stdout or stderr
    node: int | None  # None: unknown, because several nodes share one log
    rank: int | None
    text: str

    @property
    def labelled(self) -> str:
        """The text with the label of its node or rank, if known."""
        return self.text if self.node is None or _LABEL.match(self.text) else f"[node {self.node}] {self.text}"


class Places:
    """Where the ranks were; `placed` is in the order of its times. A rank moves when a spare takes a lost node's place."""

    def __init__(self, placed: Sequence[Placed]) -> None:
        self._placed = placed
        self._begins = [_stamp(each.since) for each in placed]
        self._late = [_stamp(each.since + LATE_S) for each in placed]

    def nodes_at(self, rank: int, stamp: str) -> list[int | None]:
        """Return the nodes from which a line of a rank can be that was captured at a time, the likeliest last.

        None stands for unknown.
        """
        if not self._placed:
            return [None]
        first, last = (max(0, bisect_right(times, stamp) - 1) for times in (self._late, self._begins))
        at = ((each.nodes, rank // each.nproc) for each in self._placed[first : last + 1])
        return [nodes[place] if 0 <= place < len(nodes) else None for nodes, place in at]


def _stamp(seconds: float) -> str:
    """Return a time as the stored logs have it."""
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%f") if seconds > 0 else ""


@dataclass(frozen=True)
class Source:
    """One stream of one task's log, or its new lines."""

    task: str
    node: int
    stream: str
    lines: Iterable[tuple[str, str]]  # time and text, in the order of writing


def merged(sources: Sequence[Source], places: Places, lost: Iterable[int] = ()) -> Iterator[LogLine]:
    """Return all lines by time; those of one source stay in order, even if its clock was set back.

    On a local run the control task's log has the lines of all nodes. On a remote run with ``logs="all"`` it has copies of
    other nodes' lines. They are omitted where the node's own log has them. That of a `lost` node may lack some: its lines
    are shown from both logs.
    """
    nodes = {source.node for source in sources}
    # Without other logs, lines of the control task's that have no label may be of any node.
    unlabelled = None if nodes == {CONTROL} else CONTROL
    complete: set[int | None] = {node for node in nodes if node not in (CONTROL, *lost)}
    lines = [_lines(each, complete, places, each.node or unlabelled) for each in sources]
    return heapq.merge(*lines, key=lambda line: line.time)


def _lines(source: Source, complete: set[int | None], places: Places, own: int | None) -> Iterator[LogLine]:
    latest = ""
    for stamp, text in source.lines:
        latest = max(latest, stamp)
        label = _LABEL.match(text)
        rank = int(label[1]) if label and label[1] else None
        if label is None or source.node != CONTROL:  # no other log has lines of other nodes
            yield LogLine(latest, source.task, source.stream, own, rank, text)
            continue
        its = [int(label[2] or label[3] or CONTROL)] if rank is None else places.nodes_at(rank, latest)
        if not complete.issuperset(its):
            yield LogLine(latest, source.task, source.stream, own if its[-1] is None else its[-1], rank, text)


class StoredLogs:
    """The logs of one attempt of a gang."""

    def __init__(self, stored: StoredGangs, gang: StoredGang) -> None:
        self._stored, self._gang = stored, gang
        self._read: dict[str, int] = {}  # file -> number of bytes that have been read

    def lines(self, is_growing: bool = False) -> Iterator[LogLine]:
        """Return the lines since the last call, by time; only complete lines if the logs are growing."""
        files = self._files()
        with self._stored.storage.load(list(files)) as loaded:
            here = {path: Path(local) for path, local, _ in loaded if local is not None}
            view = self._stored.view(self._gang) or GangView()
            lost = {index for index, node in enumerate(view.nodes) if node.was_lost}
            sources = [Source(*files[path], self._new(path, local, is_growing)) for path, local in here.items()]
            yield from merged(sources, Places(view.placed), lost)

    def follow(
        self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> Iterator[LogLine]:
        """Return all lines and then the new ones, until the attempt has ended or the next one has started."""
        ends_at = math.inf
        while True:
            began = clock()
            self._gang = self._stored.again(self._gang)
            is_over, is_last, is_new = self._gang.is_over, began >= ends_at, False
            for line in self.lines(is_growing=not is_last):
                is_new = True
                yield line
            if is_last:
                return
            if is_over and (is_new or ends_at == math.inf):
                ends_at = clock() + _LAST_S
            sleep(max(_PAUSE_S, _SHARE * (clock() - began)))

    def _files(self) -> dict[str, tuple[str, int, str]]:
        """Return the logs that exist, each with its task, node and stream."""
        return {
            self._stored.path(self._gang, task, name): (task, node, stream)
            for node, task in self._gang.tasks.items()
            for stream in ("stdout", "stderr")
            for source in LOG_SOURCES
            if self._gang.has(task, name := f"{source}_{stream}.log")
        }

    def _new(self, path: str, local: Path, is_growing: bool) -> Iterator[tuple[str, str]]:
        """Return time and text of the unread lines; a line without a time has that of the line before."""
        stamp = ""
        for line in _whole_lines(local, self._read.get(path, 0), is_growing):
            self._read[path] = self._read.get(path, 0) + len(line)
            match, text = LINE_PARSER.match(line), line
            if match is not None:
                stamp, text = match[3].decode("ascii", "replace"), match[6]
            yield stamp, text.decode("utf-8", "replace").rstrip("\n")


def _whole_lines(path: Path, offset: int, is_growing: bool) -> Iterator[bytes]:
    """Return lines from `offset` on; an unfinished last line only if the file has stopped growing."""
    rest, piece = b"", b"\n"
    while piece:
        with path.open("rb") as file:  # there may be more logs than files that may be open
            file.seek(offset)
            piece = file.read(_PIECE)
        offset += len(piece)
        *lines, rest = (rest + piece).split(b"\n")
        yield from (line + b"\n" for line in lines)
    if rest and not is_growing:
        yield rest
