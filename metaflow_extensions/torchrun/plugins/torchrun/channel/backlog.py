"""Sends a member's log lines to the control node at a bounded rate.

Lines wait in a `Backlog`. It is bounded and drops the oldest lines, so the log of a flood has its begin (sent at once),
a line with the number of dropped lines, and its end. Each node has a share of the rate that the control node can read.
Lines are sent only while the connection has no other bytes to send: a heartbeat or a failure never waits for more than
one message of lines. Everything here runs in the supervisor's loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ..gang.messages import Lines

# Characters a second: of all nodes together, as many as the control node can read, and of one node at least and at most.
_ALL_WAITING_CHARS, _LEAST_WAITING_CHARS, _MOST_WAITING_CHARS = 4 * 1024**2, 32 * 1024, 512 * 1024
_ALL_CHARS_PER_S, _LEAST_CHARS_PER_S = 1024**2, 1024
# Each message wakes the control node's task, which costs up to 0.5 ms. So of a gang come so few in a second, as long as
# no line has to wait longer than two seconds for that. Of a large gang come more, but no more than it can read.
_FEW_PER_S, _MANY_PER_S = 4, 200
_LEAST_PAUSE_S, _PAUSE_S, _MOST_PAUSE_S = 0.5, 2.0, 10.0
# A message holds so much: no other one waits for long behind it, and each character may take six bytes.
_MESSAGE_CHARS = 32 * 1024
# So long lines wait for others that are read in the same moment.
_GATHER_S = 0.05
LINE_CHARS = 8 * 1024
"""Of a longer line so much goes to another node's log."""


@dataclass(frozen=True)
class Limits:
    """How much of one node's lines may wait, and how fast they are sent."""

    waiting_chars: int
    chars_per_s: float
    pause_s: float  # from one message to the next

    @staticmethod
    def for_gang(num_nodes: int) -> Limits:
        """Return the share of one node of a gang."""
        waiting = max(_LEAST_WAITING_CHARS, min(_MOST_WAITING_CHARS, _ALL_WAITING_CHARS // num_nodes))
        pause_s = max(
            _LEAST_PAUSE_S, min(_PAUSE_S, num_nodes / _FEW_PER_S), min(_MOST_PAUSE_S, num_nodes / _MANY_PER_S)
        )
        return Limits(waiting, max(_LEAST_CHARS_PER_S, _ALL_CHARS_PER_S / num_nodes), pause_s)


class _Piece(NamedTuple):
    """Whole lines of one stream."""

    stream: str
    text: str
    left_out: int = 0  # before them


class Backlog:
    """Lines that wait to be sent. If there are too many, the oldest are dropped and counted."""

    def __init__(self, most_chars: int) -> None:
        self._most_chars = most_chars
        self._pieces: deque[_Piece] = deque()
        self._chars = 0

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def add(self, stream: str, text: str) -> None:
        """Add whole lines; drop the oldest where the limit is passed."""
        for piece in _pieces(text):
            self._pieces.append(_Piece(stream, piece))
            self._chars += len(piece)
        while self._chars > self._most_chars and len(self._pieces) > 1:
            oldest, second = self._pieces.popleft(), self._pieces[0]
            self._chars -= len(oldest.text)
            missing = oldest.left_out + oldest.text.count("\n")
            self._pieces[0] = second._replace(left_out=second.left_out + missing)

    def pop(self) -> Lines | None:
        """Remove and return the oldest lines that fit into a message; None if nothing waits."""
        if not self._pieces:
            return None
        texts: dict[str, list[str]] = {"stdout": [], "stderr": []}
        first, _, left_out = self._pieces[0]
        chars = 0
        while self._pieces:
            stream, text, missing = self._pieces[0]
            # Stdout is written first of a message. Behind stderr it would stand within a block that was cut.
            is_behind = stream == "stdout" and first == "stderr"
            if chars and (missing or is_behind or chars + len(text) > _MESSAGE_CHARS):
                break
            texts[stream].append(text)
            chars += len(text)
            self._pieces.popleft()
        self._chars -= chars
        return Lines("".join(texts["stdout"]), "".join(texts["stderr"]), left_out)


def _pieces(text: str) -> Iterator[str]:
    """Cut a text between lines, and long lines short."""
    begin = 0
    while len(text) - begin > LINE_CHARS:
        end = text.rfind("\n", begin, begin + LINE_CHARS) + 1
        if end:
            yield text[begin:end]
        else:
            end = text.find("\n", begin) + 1 or len(text)
            missing = end - begin - LINE_CHARS
            yield f"{text[begin : begin + LINE_CHARS]}… [{missing} characters are left out here]\n"
        begin = end
    if begin < len(text):
        yield text[begin:]


class LineSender:
    """Sends lines when `has_room` says that the connection has no unsent bytes."""

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
        """Send whole lines soon."""
        if text:
            self._backlog.add(stream, text)
            if not self._is_due:
                self._wait()

    def send_rest(self) -> None:
        """Send all that waits: the workers have ended."""
        while (lines := self._backlog.pop()) is not None:
            self._send(lines)

    def _wait(self) -> None:
        self._is_due = True
        self._loop.call_later(max(_GATHER_S, self._next_at - self._loop.time()), self._send_some)

    def _send_some(self) -> None:
        now = self._loop.time()
        more = (now - self._allowed_at) * self._limits.chars_per_s
        self._allowance, self._allowed_at = min(self._limits.waiting_chars, self._allowance + more), now
        self._next_at = now + self._limits.pause_s
        while self._allowance > 0 and self._has_room() and (lines := self._backlog.pop()) is not None:
            self._allowance -= len(lines.stdout) + len(lines.stderr)
            self._send(lines)
        self._is_due = False
        if self._backlog:
            self._wait()
