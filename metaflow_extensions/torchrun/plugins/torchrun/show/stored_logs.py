"""Reads the stored logs of a gang's tasks, and reads on while they grow.

Metaflow keeps them as ``mflog`` (2.19): a line has the time at which it was taken down. Files may be large and many,
so they are read piece by piece, and none is held open.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ..compat.stored import LINE_PARSER, LOG_SOURCES
from ..records.snapshot import Snapshot
from .log_lines import Line, Reader, Source
from .stored_gangs import StoredGang, StoredGangs

_PIECE = 256 * 1024
_STREAMS = ("stdout", "stderr")
_PAUSE_S = 1.0  # at least, between two looks at logs that grow
_SHARE = 2.0  # a look that takes long is followed by a pause of so many times that
_LAST_S = 5.0  # an attempt's logs are stored whole a moment after its end: then nothing new comes for so long


class StoredLogs:
    """The logs of one attempt of a gang."""

    def __init__(self, stored: StoredGangs, gang: StoredGang, attempt: int) -> None:
        self._stored, self._gang, self._attempt = stored, gang, attempt
        self._read: dict[str, int] = {}  # how many bytes of each file have been read

    def lines(self, is_growing: bool = False) -> Iterator[Line]:
        """Return what is new since the last call, by time; of a log that grows, whole lines."""
        files = self._files()
        with self._stored.load(list(files)) as loaded:
            here = {path: Path(local) for path, local, _ in loaded if local is not None}
            snapshot = self._stored.snapshot(self._gang, self._attempt) or Snapshot()
            nodes = {node for _, node, _ in (files[path] for path in here)}
            sources = [Source(*files[path], self._new(path, local, is_growing)) for path, local in here.items()]
            yield from Reader(snapshot.summary.node_of, nodes).merged(sources)

    def follow(
        self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> Iterator[Line]:
        """Return all lines, and then those that come, until the attempt has ended or another has begun."""
        ends_at = math.inf
        while True:
            began = clock()
            gangs = self._stored.gangs(self._gang.run, self._gang.step)
            self._gang = next((each for each in gangs if each.control_task == self._gang.control_task), self._gang)
            place = self._gang.place(self._attempt)
            is_last = began >= ends_at
            is_new = False
            for line in self.lines(is_growing=not is_last):
                is_new = True
                yield line
            if is_last:
                return
            if place.is_done or place.last_attempt > self._attempt:
                ends_at = clock() + _LAST_S if is_new or ends_at == math.inf else ends_at
            sleep(max(_PAUSE_S, _SHARE * (clock() - began)))

    def _files(self) -> dict[str, tuple[str, int, str]]:
        """Return the logs that exist, each with its task, node and stream."""
        return {
            self._stored.paths(self._gang, task, self._attempt, name): (task, node, stream)
            for node, task in self._gang.tasks.items()
            for stream in _STREAMS
            for source in LOG_SOURCES
            if self._gang.has(task, self._attempt, name := f"{source}_{stream}.log")
        }

    def _new(self, path: str, local: Path, is_growing: bool) -> Iterator[tuple[str, str]]:
        latest = ""
        for line in _whole_lines(local, self._read.get(path, 0), is_growing):
            self._read[path] = self._read.get(path, 0) + len(line)
            latest, text = _parsed(line, latest)
            yield latest, text


def _whole_lines(path: Path, offset: int, is_growing: bool) -> Iterator[bytes]:
    """Return lines from `offset` on; a last one without its end only if it will get none."""
    rest = b""
    while piece := _piece(path, offset):
        offset += len(piece)
        *lines, rest = (rest + piece).split(b"\n")
        yield from (line + b"\n" for line in lines)
    if rest and not is_growing:
        yield rest


def _piece(path: Path, offset: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(_PIECE)


def _parsed(line: bytes, before: str) -> tuple[str, str]:
    """Return time and text of a stored line; one without a time has that of the line before."""
    match = LINE_PARSER.match(line)
    stamp, text = (before, line) if match is None else (match[3].decode("ascii", "replace"), match[6])
    return stamp, text.decode("utf-8", "replace").rstrip("\n")
