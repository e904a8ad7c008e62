"""Writes the other nodes' lines into the control node's log.

The channel's thread puts lines into a bounded queue and never waits for room: it also sends the heartbeats. A thread of
this module writes them, so a reader of the log that pauses blocks that thread alone. Nodes send at a bounded rate
(`backlog`), so the queue is full only where the reader is very slow; then lines are dropped and counted.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress

from ..gang.protocol import Lines

_COLLECT_S = 0.5  # each text wakes who reads the log; so after the first line the lines of a moment are one text
_WAITING = 256  # messages; each has some 32 KiB at most
_KEPT_CHARS = 16 * 1024  # of what each node has written to stderr: twice as much as an error tells of it
_END_S = 3.0  # with a reader that takes nothing, as at the end of a launch

Write = Callable[[str, str], bool]
"""Writes whole lines to a stream; False: not all is taken yet, and an empty text asks again."""


class Relay:
    """Writes the lines of the members' workers into this node's log, in a thread of its own."""

    def __init__(self) -> None:
        # Lines of a node; an event is set when all before it is written; None is the end.
        self._queue: queue.Queue[tuple[int, Lines] | threading.Event | None] = queue.Queue(_WAITING)
        self._left_out: Counter[int] = Counter()  # dropped lines of each node; only the channel's thread touches it
        self._ends: dict[int, str] = {}  # of each node's stderr; replaced by the thread that writes, read by others
        self._hurry = threading.Event()  # set while a thread waits in `settle`: then lines are written at once
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, write: Write) -> None:
        """Begin to write; what comes before is dropped."""
        self._thread = threading.Thread(target=self._run, args=(write,), name="torchrun-relay", daemon=True)
        self._thread.start()

    def add(self, node: int, lines: Lines) -> None:
        """Queue lines of a node, or count them as dropped; returns at once."""
        if self._thread is None or not (lines.stdout or lines.stderr or lines.left_out):
            return
        left_out = max(0, lines.left_out) + self._left_out.pop(node, 0)
        try:
            self._queue.put_nowait((node, Lines(lines.stdout, lines.stderr, left_out)))
        except queue.Full:
            self._left_out[node] = left_out + lines.stdout.count("\n") + lines.stderr.count("\n")

    def settle(self, patience_s: float = _END_S) -> None:
        """Wait until all that has come is written, or for so long; one thread at a time calls it."""
        if self._thread is not None:
            written = threading.Event()
            self._hurry.set()
            with suppress(queue.Full):  # no reader takes anything
                self._queue.put(written, timeout=patience_s)
                written.wait(patience_s)
            self._hurry.clear()

    def has_written(self, node: int, text: str) -> bool:
        """Return whether all lines of a text are among the last that a node's workers wrote to stderr, and stand in this log.

        Lines may be left out, or get lost with the node.
        """
        written = {line.partition("] ")[2] for line in self._ends.get(node, "").split("\n")}
        return all(line in written for line in text.splitlines())

    def close(self) -> None:
        """End when all is written; a reader that takes nothing is not waited for."""
        self._is_over.set()
        self._hurry.set()
        if self._thread is not None:
            with suppress(queue.Full):
                self._queue.put(None, timeout=_END_S)  # room comes soon: the thread no longer waits for the reader
            self._thread.join(_END_S)

    def _run(self, write: Write) -> None:
        is_over = False
        while not is_over:
            found = [self._queue.get()]
            while not self._queue.empty():
                found.append(self._queue.get())
            is_over = None in found
            texts = [text for each in found if isinstance(each, tuple) for text in self._texts(*each)]
            if is_over:  # so is the channel's thread
                texts += [("stdout", _gap(node, left_out)) for node, left_out in self._left_out.items()]
            for stream, group in itertools.groupby(texts, key=lambda each: each[0]):
                text = "".join(each for _, each in group)
                while not write(stream, text) and not self._is_over.is_set():
                    text = ""
            for each in found:
                if isinstance(each, threading.Event):
                    each.set()
            self._hurry.wait(_COLLECT_S)

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
