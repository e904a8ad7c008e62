"""How bytes become lines, and a progress bar one line that is renewed.

A program that writes a progress bar begins each of its states with ``\\r``, or ends it so, and the whole bar with
``\\n``. On a terminal each state takes the place of the one before. A log would get hundreds, so it gets one a second.

Workers may write faster than Python can look at lines. So lines without a ``\\r`` go through together, in one piece.
"""

from __future__ import annotations

import time
from collections.abc import Callable

# A longer line is shown in several pieces, so that memory stays bounded. Pieces of a MiB would cost a third more CPU.
MAX_LINE_BYTES = 512 * 1024
# Parts of a line are kept as they come, but small ones are put together, so that there are never many.
_PART_BYTES = 64 * 1024
# At most one state of a line that is renewed is shown in this time, besides its last.
RENEWED_S = 1.0


class LineSplitter:
    """Turns bytes, cut anywhere, into whole lines of valid UTF-8.

    A line ends with ``\\n`` or ``\\r\\n``. Any other ``\\r`` begins a new state of the line. The last state of a line is
    always shown, and a state at which it rests for a while.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rest: list[bytes] = []  # the last state of a line without its end, in parts
        self._is_returned = False  # whether a return stands behind that state
        self._is_renewed = False  # whether that line has had a return
        self._rest_at = 0.0  # when `_rest` has changed
        self._shown: bytes | None = None  # the state of that line that was shown last
        self._shown_at = float("-inf")  # when a state of any line was
        self._found: list[bytes] = []  # what `feed` is to return

    def feed(self, data: bytes, final: bool = False) -> list[bytes]:
        """Return the lines that are to be shown now in parts, cut anywhere, without the last one's end.

        No parts: no lines. One empty part: an empty line. Who needs them in one piece copies them anyway, so it is not
        done here. `final` flushes the rest. No data: some time has gone by.
        """
        if data:
            self._rest_at = self._clock()
            self._take(data)
        elif self._is_renewed and self._clock() >= self._rest_at + RENEWED_S:
            self._renew()
        self._cut_rest()
        if final and any(self._rest):
            self._add(b"\n")
        found, self._found = self._found, []
        return _as_utf8(found)

    def _take(self, data: bytes) -> None:
        is_plain = b"\r" not in data  # to look is far faster than to replace or to split
        text, *states = [data] if is_plain else data.replace(b"\r\n", b"\n").split(b"\r")
        self._add(text)
        for text in states:
            self._is_renewed = self._is_returned = True
            self._add(text)

    def _add(self, text: bytes) -> None:
        """Add what has no return in it."""
        if self._is_returned and text:
            self._is_returned = False
            if not text.startswith(b"\n"):  # that would make the return a part of the line's end
                self._renew()
                self._rest.clear()
        end = text.rfind(b"\n")
        if end < 0:
            self._add_to_rest(text)
            return
        lines = [*self._rest, text[:end]]
        if self._shown is not None:
            first, *others = b"".join(lines).split(b"\n", 1)
            lines = others if first == self._shown else lines
        self._find(lines)
        self._rest, self._is_renewed, self._shown = [text[end + 1 :]], False, None

    def _add_to_rest(self, text: bytes) -> None:
        if self._rest and len(self._rest[-1]) + len(text) <= _PART_BYTES:
            text = self._rest.pop() + text
        self._rest.append(text)

    def _find(self, lines: list[bytes]) -> None:
        """Have lines shown, which come in parts and without the last one's end."""
        if lines and self._found:
            self._found.append(b"\n")
        self._found += lines

    def _renew(self) -> None:
        """Show the state if it is time to."""
        state = b"".join(self._rest)
        if state and state != self._shown and self._clock() >= self._shown_at + RENEWED_S:
            self._shown, self._shown_at = state, self._clock()
            self._find([state])

    def _cut_rest(self) -> None:
        while (over := sum(map(len, self._rest)) - MAX_LINE_BYTES) > 0:
            last = self._rest.pop()
            while self._rest and len(last) - over < 3:  # a character may lie in several parts
                last = self._rest.pop() + last
            end = _character_begin(last, len(last) - over)
            self._find([*self._rest, last[:end]])
            self._rest = [last[end:]]


def _character_begin(data: bytes, at: int) -> int:
    """Return where the character begins that the byte at this place belongs to; UTF-8 has four bytes at most."""
    return next((begin for begin in range(at, at - 4, -1) if data[begin] & 0xC0 != 0x80), at)


def _as_utf8(parts: list[bytes]) -> list[bytes]:
    """Return them with U+FFFD where they are no UTF-8.

    With a single such byte in a log, Metaflow's client can't show any of it (``to_unicode`` in ``metaflow/util.py``, 2.19).
    """
    if all(part.isascii() for part in parts):
        return parts
    whole = b"".join(parts)  # a character may lie in several parts
    try:
        whole.decode()
        return [whole]
    except UnicodeDecodeError:
        return [whole.decode(errors="replace").encode()]
