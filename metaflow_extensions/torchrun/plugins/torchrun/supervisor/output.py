"""Where the lines of this node go: to the stdout and stderr that the supervisor shares with its task.

The step's code may put other streams in their place (`contextlib.redirect_stdout`, a notebook, ``dup2``). Only the task can
write to those, so it gets the lines, and answers when they are written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TypeAlias

from ..events import Event
from ..logs import console
from ..logs.console import BEHIND_BYTES, event_text, write_output

_LOOK_S = 0.5
Send: TypeAlias = Callable[..., None]
"""Sends a frame with these values to the task."""


class Output:
    """The streams of one node."""

    def __init__(self, tell_task: Send) -> None:
        self._tell_task = tell_task
        self._of_task: frozenset[str] = frozenset()  # the streams that the task writes to
        self._sent_bytes = self._written_bytes = 0
        self.num_nodes = 0  # of the gang

    def begin(self, of_task: Iterable[str]) -> None:
        """Begin a launch; `of_task` are the streams that the task writes to."""
        self._of_task = frozenset(of_task)

    def write(self, stream: str, lines: bytes) -> bool:
        """Write lines, as `logs.pipes.Write` does."""
        if lines and stream in self._of_task:
            self._sent_bytes += len(lines)
            self._tell_task("text", stream, lines.decode(errors="replace"), len(lines))
            lines = b""
        is_behind = self._sent_bytes - self._written_bytes >= BEHIND_BYTES
        return write_output(stream, lines) and not is_behind

    def wrote(self, count: int) -> None:
        """Note that the task has written so many bytes."""
        self._written_bytes += count

    def show(self, event: Event) -> None:
        """Write an event to the node's log, and tell the task of it."""
        self.write("stderr", event_text(event, self.num_nodes))
        self._tell_task("event", event.kind, event.node, event.text, event.is_detail)


async def settle(patience_s: float | None = None) -> bool:
    """Wait until all lines so far are written, or for so long; return whether they are.

    A process that was told to hurry does not wait for a reader that takes nothing.
    """
    loop, written = asyncio.get_running_loop(), asyncio.Event()
    console.when_written(lambda: loop.call_soon_threadsafe(written.set))
    deadline = loop.time() + (float("inf") if patience_s is None else patience_s)
    while not written.is_set() and not console.has_given_up() and (left_s := deadline - loop.time()) > 0:
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(written.wait(), min(_LOOK_S, left_s))
    return written.is_set()
