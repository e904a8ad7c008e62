"""Writes the other nodes' lines into the control node's log.

Nodes send at a bounded rate (`backlog`). Lines of a moment are written as one text, since each text wakes who reads the
log. While the reader takes nothing, lines wait here, a bounded number; then they are dropped and counted.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Protocol

from ..gang.messages import Lines

_COLLECT_S = 0.5  # between two texts, but for the first
_WAITING = 256  # messages; each has some 32 KiB at most
_KEPT_CHARS = 16 * 1024  # of what each node has written to stderr: twice as much as an error tells of it
_END_S = 3.0  # with a reader that takes nothing, as at the end of a launch
_LOOK_S = 0.02


class Log(Protocol):
    """Where the lines go: `logs.console`."""

    def write_output(self, stream: str, lines: bytes) -> bool:
        """Have whole lines written to a stream; returns at once."""

    def when_written(self, call: Callable[[], object]) -> None:
        """Have a function called, in any thread, when all lines so far are written."""


class Relay:
    """Writes the lines of the members' workers into this node's log, once it has been started; it belongs to the loop."""

    def __init__(self) -> None:
        self._log: Log | None = None
        self._waiting: deque[tuple[int, Lines]] = deque()
        self._left_out: Counter[int] = Counter()  # dropped lines of each node
        self._ends: dict[int, str] = {}  # of each node's stderr
        self._is_writing = False  # whether lines of the last text are still to be written
        self._is_due = False  # whether `_flush_or_wait` will be called

    def start(self, log: Log) -> None:
        """Begin to write; what comes before is dropped."""
        self._log = log

    def add(self, node: int, lines: Lines) -> None:
        """Take lines of a node, or count them as dropped."""
        if self._log is None or not (lines.stdout or lines.stderr or lines.left_out):
            return
        left_out = max(0, lines.left_out) + self._left_out.pop(node, 0)
        if len(self._waiting) >= _WAITING:
            self._left_out[node] = left_out + lines.stdout.count("\n") + lines.stderr.count("\n")
            return
        self._waiting.append((node, Lines(lines.stdout, lines.stderr, left_out)))
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._flush_or_wait)

    async def settle(self, patience_s: float = _END_S) -> None:
        """Wait until all that has come is written, or for so long."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + patience_s
        while (self._waiting or self._is_writing) and loop.time() < deadline:
            self._flush()
            await asyncio.sleep(_LOOK_S)

    def has_written(self, node: int, text: str) -> bool:
        """Return whether all lines of a text are among the last that a node's workers wrote to stderr, and stand in this log.

        Lines may be left out, or get lost with the node.
        """
        written = {line.partition("] ")[2] for line in self._ends.get(node, "").split("\n")}
        return all(line in written for line in text.splitlines())

    def close(self) -> None:
        """Have all that has come written; nobody waits for the reader here."""
        self._is_writing = False
        self._flush()
        for node, left_out in self._left_out.items():
            self._write("stdout", _gap(node, left_out))
        self._log = None

    def _flush_or_wait(self) -> None:
        self._flush()
        self._is_due = bool(self._waiting) or self._is_writing
        if self._is_due:
            asyncio.get_running_loop().call_later(_COLLECT_S, self._flush_or_wait)

    def _flush(self) -> None:
        """Have what waits written, if all before is written."""
        if self._log is None or self._is_writing or not self._waiting:
            return
        texts = [text for each in self._waiting for text in self._texts(*each)]
        self._waiting.clear()
        for stream, group in itertools.groupby(texts, key=lambda each: each[0]):
            self._write(stream, "".join(text for _, text in group))
        self._is_writing, loop = True, asyncio.get_running_loop()
        self._log.when_written(lambda: loop.call_soon_threadsafe(self._note_written))

    def _write(self, stream: str, text: str) -> None:
        if self._log is not None:
            self._log.write_output(stream, text.encode(errors="backslashreplace"))

    def _note_written(self) -> None:
        self._is_writing = False

    def _texts(self, node: int, lines: Lines) -> Iterator[tuple[str, str]]:
        if lines.stdout or lines.left_out:
            yield "stdout", _gap(node, lines.left_out) + lines.stdout
        if lines.stderr:
            self._ends[node] = (self._ends.get(node, "") + lines.stderr)[-_KEPT_CHARS:]
            yield "stderr", lines.stderr


def _gap(node: int, left_out: int) -> str:
    """Say how many lines are missing."""
    if not left_out:
        return ""
    what = "1 line is" if left_out == 1 else f"{left_out} lines are"
    # Of a pod that was killed Metaflow has not stored the last lines; a replacement's log overwrites all (2.19).
    where = "Its own log has them, unless its pod was killed or replaced."
    return f"[torchrun node {node}] {what} left out here; they came too fast. {where}\n"
