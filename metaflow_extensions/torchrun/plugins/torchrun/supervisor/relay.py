"""Copies lines of the other nodes' workers into the control node's log: `LineSender` on a member, `Relay` there.

Nobody waits for them. Both ends keep a bounded number of bytes; what is too much is left out and counted. Each node's own
log has all of its lines. Everything here runs in the supervisor's loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable

from ..gang.messages import Lines
from .output import BEHIND_BYTES, Output

# What a member keeps is one message. In JSON a character takes up to six bytes, so it is within the limit of a frame.
# When a launch ends, all members send at once what they keep: all together not more than the control node reads soon.
_MOST_CHARS, _ALL_CHARS = 128 * 1024, 32 * 1024**2
# A member sends one message in this time; all members together send as many in a second. With 4000 nodes a line takes
# 10 s then, as `gang.limits.LATE_S` has it.
_PAUSE_S, _MESSAGES_PER_S = 0.5, 400
# While more waits for who reads the control node's log, lines are left out. Its own workers wait behind twice as much.
_MOST_BYTES = BEHIND_BYTES // 2


class LineSender:
    """Keeps the latest lines of a member, and sends them when its connection has room."""

    def __init__(self, send: Callable[[Lines], None], has_room: Callable[[], bool], num_nodes: int) -> None:
        self._send, self._has_room = send, has_room
        self._most_chars = min(_MOST_CHARS, _ALL_CHARS // num_nodes)
        self.pause_s = max(_PAUSE_S, num_nodes / _MESSAGES_PER_S)  # between two messages
        self._waiting: deque[tuple[str, str]] = deque()  # streams and whole lines
        self._chars = self._left_out = 0  # of what waits; lines before that
        self._is_due = False  # whether `_send_or_wait` will be called

    def add(self, stream: str, text: str) -> None:
        """Have whole lines sent soon; returns at once."""
        self._waiting.append((stream, text))
        self._chars += len(text)
        while (excess := self._chars - self._most_chars) > 0:
            stream, oldest = self._waiting.popleft()
            end = oldest.find("\n", excess - 1) + 1 or len(oldest)
            self._left_out += oldest.count("\n", 0, end)
            self._chars -= end
            if end < len(oldest):
                self._waiting.appendleft((stream, oldest[end:]))
        if not self._is_due:
            self._send_later()

    def send_all(self) -> None:
        """Send what waits, whether or not there is room: what is sent next may end the launch."""
        if self._waiting or self._left_out:
            self._send(Lines(tuple(self._waiting), self._left_out))
            self._waiting.clear()
            self._chars = self._left_out = 0

    def _send_later(self) -> None:
        self._is_due = True
        asyncio.get_running_loop().call_later(self.pause_s, self._send_or_wait)

    def _send_or_wait(self) -> None:
        if self._has_room():
            self._is_due = False
            self.send_all()
        else:
            self._send_later()


class Relay:
    """Writes the lines that come into this node's log."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._left_out: Counter[int] = Counter()  # lines of each node, since it was said last

    def add(self, node: int, lines: Lines) -> None:
        """Write lines of a node, or leave them out; returns at once."""
        self._left_out[node] += lines.left_out
        if self._output.unwritten_bytes > _MOST_BYTES:
            self._left_out[node] += sum(text.count("\n") for _, text in lines.texts)
            return
        self._say_left_out(node)
        for stream, text in lines.texts:
            self._output.write_here(stream, text.encode(errors="backslashreplace"))

    def say_all_left_out(self) -> None:
        """Say how many lines of each node are missing at the end."""
        for node in list(self._left_out):
            self._say_left_out(node)

    def _say_left_out(self, node: int) -> None:
        if count := self._left_out.pop(node, 0):
            what = "1 line is" if count == 1 else f"{count} lines are"
            # Of a pod that was killed Metaflow has not stored the last lines; a replacement's log overwrites all (2.19).
            where = "`python flow.py torchrun logs` has them, unless the node's pod was killed or replaced."
            line = f"[torchrun node {node}] {what} left out here, since too much came at once. {where}\n"
            self._output.write_here("stdout", line.encode())
