"""How bytes become lines of text, and a progress bar one line that is renewed.

A program that writes a progress bar begins each of its states with ``\\r``, or ends it so, and the whole bar with
``\\n``. On a terminal each state takes the place of the one before. A log would get hundreds, so it gets one a second.
"""

from __future__ import annotations

import codecs
import re
import time
from collections.abc import Callable, Iterator

# A longer line is shown in several pieces, so that memory stays bounded.
MAX_LINE_CHARS = 1024 * 1024
# At most one state of a line that is renewed is shown in this time, besides its last.
RENEWED_S = 1.0

_RETURNS = re.compile(r"\r+")


class LineSplitter:
    """Turns bytes, cut anywhere, into whole lines of text.

    A line ends with ``\\n`` or ``\\r\\n``. Any other ``\\r`` begins a new state of the line. The last state of a line is
    always shown, and a state at which it rests for a while.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._rest = ""  # the last state of a line without its end, perhaps with returns behind it
        self._is_renewed = False  # whether that line has had a return
        self._rest_at = 0.0  # when `_rest` has changed
        self._shown: str | None = None  # the state of that line that was shown last
        self._shown_at = float("-inf")  # when a state of any line was

    def feed(self, data: bytes, final: bool = False) -> Iterator[str]:
        """Yield what is to be shown now, without line ends; `final` flushes the rest. No data: some time has gone by."""
        text = self._decoder.decode(data, final)
        if data:  # perhaps the first half of a character
            self._rest_at = self._clock()
        if text:
            yield from self._renewed(text) if "\r" in text or self._is_renewed else self._plain(text)
        elif not data and self._is_renewed and self._clock() >= self._rest_at + RENEWED_S:
            yield from self._renew(self._rest.rstrip("\r"))
        while len(self._rest) > MAX_LINE_CHARS:
            yield self._rest[:MAX_LINE_CHARS]
            self._rest = self._rest[MAX_LINE_CHARS:]
        if final and self._rest.strip("\r"):
            yield from self._end_line()

    def _plain(self, text: str) -> list[str]:
        *lines, self._rest = (self._rest + text).split("\n")
        return lines

    def _renewed(self, text: str) -> Iterator[str]:
        *lines, rest = text.split("\n")
        for line in lines:
            yield from self._states(line)
            yield from self._end_line()
        yield from self._states(rest)

    def _states(self, text: str) -> Iterator[str]:
        """Add to the line; yield of its states those before the last that are to be shown."""
        if "\r" not in text and not self._rest.endswith("\r"):
            self._rest += text
            return
        joined = self._rest + text
        self._is_renewed = True
        *before, self._rest = _RETURNS.split(joined.strip("\r"))
        if joined.endswith("\r"):  # it may be the first half of a line's end
            self._rest += "\r"
        for state in before:
            yield from self._renew(state)

    def _renew(self, state: str) -> Iterator[str]:
        if state and state != self._shown and self._clock() >= self._shown_at + RENEWED_S:
            self._shown, self._shown_at = state, self._clock()
            yield state

    def _end_line(self) -> Iterator[str]:
        last = self._rest.rstrip("\r")
        if not self._is_renewed or last != self._shown:
            yield last
        self._rest, self._is_renewed, self._shown = "", False, None
