"""Where the lines of this node go: to the stdout and stderr that the supervisor shares with its task.

One thread writes them, in the order in which they came, and waits for their reader as long as it takes: a reader may
pause for hours, as a stopped terminal does. Nobody else waits for it, but for who calls `settle`. When too much waits,
`write` says so, and the workers wait.

The step's code may put other streams in their place (`contextlib.redirect_stdout`, a notebook, ``dup2``). Only the task
can write to those, so it gets the lines, and answers when they are written.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterable
from itertools import groupby
from operator import itemgetter
from typing import TypeAlias

from ..events import Event, event_text
from ..machine.streams import await_room, turn, write_lines

BEHIND_BYTES = 8 * 1024 * 1024
"""With so much unwritten, workers are kept waiting."""
_TURN_BYTES = 64 * 1024  # written in one turn; a longer line is written whole
_STUCK_S = 3.0  # for a reader that takes nothing, when the task was told to end
_LOOK_S = 0.01
_FDS = {"stdout": 1, "stderr": 2}

Send: TypeAlias = Callable[..., None]
"""Sends a frame with these values to the task."""


class Output:
    """The streams of one node."""

    def __init__(self, tell_task: Send) -> None:
        self._tell_task = tell_task
        self._of_task: frozenset[str] = frozenset()  # the streams that the task writes to
        self._sent_bytes = self._told_bytes = 0  # to the task, and written there
        self.num_nodes = 0  # of the gang
        self.is_hurried = False  # whether the task was told to end: nobody waits for a reader that takes nothing
        self._items: queue.SimpleQueue[tuple[str, bytes]] = queue.SimpleQueue()  # streams and whole lines
        self._put_bytes = 0  # only the loop changes this
        # Of the thread:
        self._written_bytes = 0
        self._busy_since: float | None = None  # when it began to wait for the reader, or for its turn
        self._lost: set[str] = set()  # streams of which was said that they can't be written to
        threading.Thread(target=self._run, name="torchrun-output", daemon=True).start()

    def begin(self, of_task: Iterable[str]) -> None:
        """Begin a launch; `of_task` are the streams that the task writes to."""
        self._of_task = frozenset(of_task)

    def write(self, stream: str, lines: bytes) -> bool:
        """Have whole lines of UTF-8 written; return False if so much waits that their source should wait, too.

        It returns at once, and without lines it only answers. If a stream has no reader any more, its lines are
        dropped, and one line says so.
        """
        if lines and stream in self._of_task:
            self._sent_bytes += len(lines)
            self._tell_task("text", stream, lines.decode(errors="replace"), len(lines))
        elif lines:
            self.write_here(stream, lines)
        return max(self._sent_bytes - self._told_bytes, self.unwritten_bytes) < BEHIND_BYTES

    @property
    def unwritten_bytes(self) -> int:
        """What waits to be written by this process."""
        return self._put_bytes - self._written_bytes

    def write_here(self, stream: str, lines: bytes) -> None:
        """Have whole lines written by this process."""
        self._put_bytes += len(lines)
        self._items.put((stream, lines))

    def wrote(self, count: int) -> None:
        """Note that the task has written so many bytes."""
        self._told_bytes += count

    def show(self, event: Event) -> None:
        """Write an event to the node's log, and tell the task of it."""
        self.write("stderr", event_text(event, self.num_nodes).encode(errors="backslashreplace"))
        self._tell_task("event", event.kind, event.text)

    @property
    def has_given_up(self) -> bool:
        """Whether nobody waits for the reader any more: the task was told to end, and the reader takes nothing."""
        since = self._busy_since
        return self.is_hurried and since is not None and time.monotonic() - since > _STUCK_S

    async def settle(self, patience_s: float | None = None) -> bool:
        """Wait until all lines so far are written, for so long, or until `has_given_up`; return whether they are."""
        end = self._put_bytes
        deadline = time.monotonic() + (float("inf") if patience_s is None else patience_s)
        while self._written_bytes < end and not self.has_given_up and time.monotonic() < deadline:
            await asyncio.sleep(_LOOK_S)
        return self._written_bytes >= end

    # --- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            items = [self._items.get(), *(self._items.get_nowait() for _ in range(self._items.qsize()))]
            for stream, group in groupby(items, itemgetter(0)):
                self._write_all(stream, b"".join(lines for _, lines in group))

    def _write_all(self, stream: str, lines: bytes) -> None:
        """Write whole lines in turns: at most `_TURN_BYTES`, or one longer line."""
        begin = 0
        while begin < len(lines):
            most = begin + _TURN_BYTES
            end = len(lines)
            if end > most:
                end = lines.rfind(b"\n", begin, most) + 1 or lines.find(b"\n", most) + 1
            self._write(stream, lines[begin:end], end < len(lines))
            self._written_bytes += end - begin
            begin = end

    def _write(self, stream: str, lines: bytes, more_follows: bool = False) -> None:
        fd = _FDS[stream]
        self._busy_since = time.monotonic()
        try:
            with turn(fd):
                write_lines(fd, lines, self._await_room, more_follows)
        except OSError as error:
            if stream not in self._lost:
                self._lost.add(stream)
                other = "stderr" if stream == "stdout" else "stdout"
                text = f"[torchrun] {stream} can't be written to ({error}): what the workers write there is lost\n"
                self._write(other, text.encode(errors="backslashreplace"))
        self._busy_since = None

    def _await_room(self, fd: int) -> None:
        self._busy_since = time.monotonic()  # the reader has gone on
        await_room(fd)
