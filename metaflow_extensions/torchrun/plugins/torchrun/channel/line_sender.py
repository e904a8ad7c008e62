"""How a member's lines get to the control node, and hold up nothing.

They wait in a `Backlog`, which is bounded. Now and then some of them are sent, as the node's share of what the control
node can bear allows, and only where the connection has nothing else to send. So a heartbeat or a failure waits for a
message of theirs at most. Lines after a silence are sent at once.

All of it runs in the channel's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..gang.protocol import Lines
from .backlog import Backlog, Limits

# So long lines wait for others that are read in the same moment.
_GATHER_S = 0.05


class LineSender:
    """Sends lines; `has_room` tells whether all that was sent before has left."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        num_nodes: int,
        send: Callable[[Lines], None],
        has_room: Callable[[], bool],
    ) -> None:
        self._loop = loop
        self._send = send
        self._has_room = has_room
        self._limits = limits = Limits.for_gang(num_nodes)
        self._backlog = Backlog(limits.waiting_chars)
        self._is_due = False  # whether `_send_some` will be called
        self._allowance = float(limits.waiting_chars)  # characters
        self._allowed_at = self._next_at = loop.time()  # when that was; not before when something is sent

    def add(self, stream: str, text: str) -> None:
        """Have whole lines sent."""
        if text:
            self._backlog.add(stream, text)
            if not self._is_due:
                self._wait()

    def send_rest(self) -> None:
        """Send all that waits: the workers have ended."""
        while (lines := self._backlog.take()) is not None:
            self._send(lines)

    def _wait(self) -> None:
        self._is_due = True
        self._loop.call_later(max(_GATHER_S, self._next_at - self._loop.time()), self._send_some)

    def _send_some(self) -> None:
        now = self._loop.time()
        more = (now - self._allowed_at) * self._limits.chars_per_s
        self._allowance, self._allowed_at = min(self._limits.waiting_chars, self._allowance + more), now
        self._next_at = now + self._limits.pause_s
        while self._allowance > 0 and self._has_room() and (lines := self._backlog.take()) is not None:
            self._allowance -= len(lines.stdout) + len(lines.stderr)
            self._send(lines)
        self._is_due = False
        if self._backlog:
            self._wait()
