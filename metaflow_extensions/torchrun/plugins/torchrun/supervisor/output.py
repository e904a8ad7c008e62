"""Where the lines of this node go: to the stdout and stderr that the supervisor shares with its task.

The step's code may put other streams in their place (`contextlib.redirect_stdout`, a notebook, ``dup2``). Only the task can
write to those, so it gets the lines, and answers when they are written.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..channel.link import LinkEnd
from ..events import Event
from ..logs.console import BEHIND_BYTES, event_text, write_output


class Output:
    """The streams of one node. Any thread may write; the thread that reads the link calls `wrote`."""

    def __init__(self, link: LinkEnd) -> None:
        self._link = link
        self._of_task: frozenset[str] = frozenset()  # the streams that the task writes to
        self._sent_bytes = self._written_bytes = 0

    def begin(self, of_task: Iterable[str]) -> None:
        """Begin a launch; `of_task` are the streams that the task writes to."""
        self._of_task = frozenset(of_task)

    def write(self, stream: str, lines: bytes) -> bool:
        """Write lines, as `logs.pipes.Write` does."""
        if lines and stream in self._of_task:
            self._sent_bytes += len(lines)
            self._link.send("text", stream, lines.decode(errors="replace"), len(lines))
            lines = b""
        is_behind = self._sent_bytes - self._written_bytes >= BEHIND_BYTES
        return write_output(stream, lines) and not is_behind

    def wrote(self, count: int) -> None:
        """Note that the task has written so many bytes."""
        self._written_bytes += count

    def show(self, event: Event) -> None:
        """Write an event to the node's log, and tell the task of it."""
        self.write("stderr", event_text(event))
        self._link.send("event", event.kind, event.node, event.text, event.is_detail)
