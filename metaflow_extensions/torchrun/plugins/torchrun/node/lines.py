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
# At most one state of a line that is renewed is shown in this time, besides its last.
RENEWED_S = 1.0


class LineSplitter:
    """Turns bytes, cut anywhere, into whole lines of valid UTF-8.

    A line ends with ``\\n`` or ``\\r\\n``. Any other ``\\r`` begins a new state of the line. The last state of a line is
    always shown, and a state at which it rests for a while.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rest = bytearray()  # the last state of a line without its end
        self._is_returned = False  # whether a return stands behind that state
        self._is_renewed = False  # whether that line has had a return
        self._rest_at = 0.0  # when `_rest` has changed
        self._shown: bytes | None = None  # the state of that line that was shown last
        self._shown_at = float("-inf")  # when a state of any line was
        self._found: list[bytes] = []  # lines for `feed` to return; as there, the last one's end is left out

    def feed(self, data: bytes, final: bool = False) -> bytes | None:
        """Return the lines that are to be shown now, without the last one's end; None if there are none.

        `final` flushes the rest. No data: some time has gone by.
        """
        if data:
            self._rest_at = self._clock()
            self._take(data)
        elif self._is_renewed and self._clock() >= self._rest_at + RENEWED_S:
            self._renew()
        self._cut_rest()
        if final and self._rest:
            self._add(b"\n")
        found, self._found = self._found, []
        return _as_utf8(b"\n".join(found)) if found else None

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
            self._rest += text
            return
        lines = bytes(self._rest) + text[:end]
        if self._shown is None:
            self._found.append(lines)
        else:
            first, *others = lines.split(b"\n", 1)
            self._found += others if first == self._shown else [lines]
        self._rest, self._is_renewed, self._shown = bytearray(text[end + 1 :]), False, None

    def _renew(self) -> None:
        """Show the state if it is time to."""
        state = bytes(self._rest)
        if state and state != self._shown and self._clock() >= self._shown_at + RENEWED_S:
            self._shown, self._shown_at = state, self._clock()
            self._found.append(state)

    def _cut_rest(self) -> None:
        while len(self._rest) > MAX_LINE_BYTES:
            end = _character_begin(self._rest, MAX_LINE_BYTES)
            self._found.append(bytes(memoryview(self._rest)[:end]))
            del self._rest[:end]


def _character_begin(data: bytearray, at: int) -> int:
    """Return where the character begins that the byte at this place belongs to; UTF-8 has four bytes at most."""
    return next((begin for begin in range(at, at - 4, -1) if data[begin] & 0xC0 != 0x80), at)


def _as_utf8(data: bytes) -> bytes:
    """Return it with U+FFFD where it is no UTF-8.

    With a single such byte in a log, Metaflow's client can't show any of it (``to_unicode`` in ``metaflow/util.py``, 2.19).
    """
    if data.isascii():
        return data
    try:
        data.decode()
        return data
    except UnicodeDecodeError:
        return data.decode(errors="replace").encode()
