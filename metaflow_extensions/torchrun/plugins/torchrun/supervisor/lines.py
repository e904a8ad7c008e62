"""Splits bytes into lines, and drops most states of progress bars.

A program that draws a progress bar begins or ends each state of the bar with ``\\r``, and ends the bar with ``\\n``.
A terminal replaces the state before. A log would keep hundreds of states, so it gets one a second and the last.

A worker may write faster than Python can handle single lines. So lines without a ``\\r`` go through in one block.
"""

from __future__ import annotations

import time
from collections.abc import Callable

# A longer line is shown in several pieces, so that memory stays bounded. Pieces of a MiB would cost a third more CPU.
MAX_LINE_BYTES = 512 * 1024
# Between two shown states of progress bars. The last state of a line is always shown.
RENEWED_S = 1.0


class LineSplitter:
    """Turns bytes, cut anywhere, into whole lines of valid UTF-8.

    A line ends with ``\\n`` or ``\\r\\n``. Any other ``\\r`` begins a new state of the line. The last state of a line is
    always shown, and so is a state that has not changed for `RENEWED_S`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rest = b""  # the last state of a line that has not ended
        self._is_returned = False  # a return follows that state; the next byte says whether it is of the line's end
        self._is_renewed = False  # that line has had a return
        self._rest_at = 0.0  # when `_rest` last changed
        self._shown: bytes | None = None  # the state of that line that was shown last
        self._shown_at = float("-inf")  # when a state of any line was last shown
        self._found: list[bytes] = []  # what `feed` will return

    def feed(self, data: bytes, final: bool = False) -> bytes:
        """Return the whole lines to show now, each with its end.

        Call it without data when the writer has been quiet for a while; `final` also returns an unfinished line.
        """
        if data:
            self._rest_at = self._clock()
            self._split(data)
        elif self._is_renewed and self._clock() >= self._rest_at + RENEWED_S:
            self._show_state()
        self._cut_rest()
        if final and self._rest:
            self._add(b"\n")
        found = b"".join(self._found)
        self._found.clear()
        return _as_utf8(found)

    def _split(self, data: bytes) -> None:
        if b"\r" not in data:  # a search costs far less than a replace and a split
            self._add(data)
            return
        text, *states = data.replace(b"\r\n", b"\n").split(b"\r")
        self._add(text)
        for text in states:
            self._is_renewed = self._is_returned = True
            self._add(text)

    def _add(self, text: bytes) -> None:
        """Add text that has no return in it."""
        if self._is_returned and text:
            self._is_returned = False
            if not text.startswith(b"\n"):  # else the return was part of the line's end
                self._show_state()
                self._rest = b""
        end = text.rfind(b"\n") + 1
        if end == 0:
            self._rest += text
            return
        lines = self._rest + text[:end]
        if self._shown is not None and lines.startswith(self._shown + b"\n"):  # the log has this state already
            lines = lines[len(self._shown) + 1 :]
        self._found.append(lines)
        self._rest, self._is_renewed, self._shown = text[end:], False, None

    def _show_state(self) -> None:
        """Show the current state as a line, unless another state was shown a moment ago."""
        state = self._rest
        if state and state != self._shown and self._clock() >= self._shown_at + RENEWED_S:
            self._shown, self._shown_at = state, self._clock()
            self._found.append(state + b"\n")

    def _cut_rest(self) -> None:
        while len(self._rest) > MAX_LINE_BYTES:
            end = _character_begin(self._rest, MAX_LINE_BYTES)
            self._found.append(self._rest[:end] + b"\n")
            self._rest = self._rest[end:]


def _character_begin(data: bytes, at: int) -> int:
    """Return where the character begins that the byte at this place belongs to; UTF-8 has four bytes at most."""
    return next((begin for begin in range(at, at - 4, -1) if data[begin] & 0xC0 != 0x80), at)


def _as_utf8(lines: bytes) -> bytes:
    """Return the lines with U+FFFD in the place of bytes that are not UTF-8.

    Metaflow's client can't show a log that holds a single such byte (``to_unicode`` in ``metaflow/util.py``, 2.19).
    """
    if lines.isascii():
        return lines
    try:
        lines.decode()
        return lines
    except UnicodeDecodeError:
        return lines.decode(errors="replace").encode()
