"""How lines of other nodes get into the control node's log, and hold up nothing.

The channel's thread only puts them where they wait, which is bounded for each node. A thread of its own writes them.
So a reader of the log that pauses stops that thread alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from ..gang.protocol import Lines
from .backlog import Backlog, Limits

_COLLECT_S = 0.5  # each text wakes who reads the log; so after the first line the lines of a moment are one text
_KEPT_CHARS = 16 * 1024  # of what each node has written to stderr: twice as much as an error tells of it
_END_S = 3.0  # with a reader that takes nothing, as at the end of a launch

Write = Callable[[str, str], bool]
"""Writes whole lines to a stream; False: not all is taken yet, and an empty text asks again."""


class Relay:
    """Writes what members send of their workers' lines."""

    def __init__(self, num_nodes: int) -> None:
        self._most_chars = Limits.for_gang(num_nodes).waiting_chars
        self._changed = threading.Condition()
        # These three are under its lock.
        self._backlogs: dict[int, Backlog] = {}
        self._ends: dict[int, str] = {}  # of each node's stderr
        self._is_writing = False
        self._hurry = threading.Event()  # somebody waits: no more lines need to gather
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, write: Write) -> None:
        """Begin to write; what comes before is dropped."""
        self._thread = threading.Thread(target=self._run, args=(write,), name="torchrun-relay", daemon=True)
        self._thread.start()

    def add(self, node: int, lines: Lines) -> None:
        """Take lines of a node; returns at once."""
        if self._thread is None:
            return
        with self._changed:
            backlog = self._backlogs.setdefault(node, Backlog(self._most_chars))
            left_out = lines.left_out
            for stream, text in (("stdout", lines.stdout), ("stderr", lines.stderr)):
                if text:
                    backlog.add(stream, text, left_out)
                    left_out = 0
            self._changed.notify_all()

    def settle(self, patience_s: float = _END_S) -> None:
        """Wait until all that has come is written, or for so long; one thread at a time calls it."""
        if self._thread is not None:
            with self._changed:
                self._hurry.set()
                self._changed.wait_for(lambda: not self._has_work(), patience_s)
                self._hurry.clear()

    def has_written(self, node: int, text: str) -> bool:
        """Tell whether all lines of a text are among the last that a node's workers wrote to stderr, and stand in this log.

        Lines may be left out, or get lost with the node.
        """
        with self._changed:
            end = self._ends.get(node, "")
        written = {line.partition("] ")[2] for line in end.split("\n")}
        return all(line in written for line in text.splitlines())

    def close(self) -> None:
        """End when all is written; a reader that takes nothing is not waited for."""
        with self._changed:
            self._is_over.set()
            self._hurry.set()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_END_S)

    def _has_work(self) -> bool:
        return self._is_writing or any(self._backlogs.values())

    def _run(self, write: Write) -> None:
        while self._await_lines():
            for stream, text in self._next():
                while not write(stream, text) and not self._is_over.is_set():
                    text = ""
            with self._changed:
                self._is_writing = False
                has_more = self._has_work()
                self._changed.notify_all()
            if not has_more:  # else more than a message has come meanwhile
                self._hurry.wait(_COLLECT_S)

    def _await_lines(self) -> bool:
        """Wait for lines and tell whether there are any; there are none at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_work() or self._is_over.is_set())
            self._is_writing = self._has_work()
            return self._is_writing

    def _next(self) -> Iterator[tuple[str, str]]:
        """Yield what is to be written now: of each node a message's worth, what is of one stream together."""
        with self._changed:
            taken = [(node, backlog.take()) for node, backlog in sorted(self._backlogs.items())]
            there = [(node, lines) for node, lines in taken if lines is not None]
            for node, lines in filter(lambda each: each[1].stderr, there):
                self._ends[node] = (self._ends.get(node, "") + lines.stderr)[-_KEPT_CHARS:]
        stdout = "".join(_gap(node, lines) + lines.stdout for node, lines in there)
        stderr = "".join(lines.stderr for _, lines in there)
        yield from ((stream, text) for stream, text in (("stdout", stdout), ("stderr", stderr)) if text)


def _gap(node: int, lines: Lines) -> str:
    """Say how many lines are missing."""
    if lines.left_out <= 0:
        return ""
    what = "1 line is" if lines.left_out == 1 else f"{lines.left_out} lines are"
    # Of a pod that was killed Metaflow has not stored the last lines; a replacement's log overwrites all (2.19).
    where = "Its own log has them, unless its pod was killed or replaced."
    return f"[torchrun node {node}] {what} left out here; they came too fast. {where}\n"
