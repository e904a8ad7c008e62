"""Bytes become lines wherever they are cut, and a progress bar does not fill a log."""

import itertools
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from metaflow_extensions.torchrun.plugins.torchrun.supervisor import lines as module
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.lines import RENEWED_S, LineSplitter


class Clock:
    """Stands still unless it is told to go on."""

    def __init__(self, step=0.0):
        self.now, self._step = 100.0, step

    def __call__(self):
        self.now += self._step
        return self.now


def shown(splitter, data, final=False):
    """Return the lines that the splitter shows when it is fed, as text."""
    return splitter.feed(data, final).decode().split("\n")[:-1]


def lines_of(*pieces, clock=None):
    splitter = LineSplitter(clock or Clock())
    fed = [line for piece in pieces for line in shown(splitter, piece)]
    return [*fed, *shown(splitter, b"", final=True)]


def cut(data, places):
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


NASTY = st.lists(
    st.one_of(
        st.sampled_from(
            [b"\n", b"\r", b"\r\n", b"\n\r", b"\r\r\n", b"a", b"bar", "größe".encode(), "🙂".encode(), b"\xff"]
        ),
        st.binary(max_size=6),
    ),
    max_size=20,
).map(b"".join)
CUTS = st.lists(st.integers(0, 200), max_size=6)


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"dos\r\nlines\r\n\r\n", ["dos", "lines", ""]),
        (b"10%\r50%\r100%\n", ["10%", "100%"]),
        (b"\r10%\r20%\r30%", ["10%", "30%"]),
        (b"\r1%\r2%\ndone\n\r3%\r4%\n", ["1%", "2%", "done", "4%"]),
        (b"a\rb\nc\n", ["a", "b", "c"]),
        (b"100%\r\r100%\r\n", ["100%"]),
        (b"pty\r\r\n\r\n\rend", ["pty", "", "end"]),
        (b"bad \xff\xfe bytes\n", ["bad \ufffd\ufffd bytes"]),
        (b"form\x0cfeed\x0bvt\x85\n", ["form\x0cfeed\x0bvt\ufffd"]),
    ],
)
def test_bytes_become_lines(data, lines):
    assert lines_of(data) == lines
    assert lines_of(*(bytes([byte]) for byte in data)) == lines


@given(NASTY, CUTS)
def test_a_cut_anywhere_changes_nothing(data, places):
    lines = lines_of(*cut(data, places))
    assert lines == lines_of(data)
    without_returns = data.replace(b"\r", b"")
    expected = without_returns.decode("utf-8", errors="replace").split("\n")
    assert lines_of(*cut(without_returns, places)) == (expected if expected[-1] else expected[:-1])


@given(st.lists(st.tuples(NASTY, st.sampled_from([0.0, 0.6, RENEWED_S])), max_size=6))
def test_what_comes_at_once_is_taken_as_byte_by_byte(chunks):
    """Lines without returns go through together; single bytes never do."""
    clocks = Clock(), Clock()
    at_once, single = (LineSplitter(clock) for clock in clocks)
    for data, seconds in [*chunks, (b"\n", 0.0)]:
        for clock in clocks:
            clock.now += seconds
        together = shown(at_once, data) if data else []  # no data would mean that the line rests
        assert together == [line for byte in data for line in shown(single, bytes([byte]))]


@example(b"\ra\xf0\x9f\x99\x82", [2, 3])
@example(b"\x80\r\xff", [])  # two states that are shown alike
@given(NASTY, CUTS)
def test_where_time_enough_goes_by_only_line_ends_are_lost(data, places):
    split = [re.split(b"\r+", line.strip(b"\r")) for line in data.split(b"\n")]
    states = [state.decode(errors="replace") for line in split for state, _ in itertools.groupby(line)]
    pieces = filter(None, cut(data, places))  # no data would mean that the line rests
    lines = lines_of(*pieces, clock=Clock(step=2 * RENEWED_S))
    assert lines == (states if states[-1] else states[:-1])


@example("xxxxxxx🙂xx", [8, 9, 10])
@given(st.text(st.sampled_from("xöß模🙂"), max_size=100), CUTS)
def test_a_long_line_is_cut_between_characters(text, places):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "MAX_LINE_BYTES", 10)
        pieces = lines_of(*cut(text.encode(), places))
    assert "".join(pieces) == text
    assert all(7 <= len(piece.encode()) <= 10 for piece in pieces[:-1])


# --- a progress bar, as tqdm writes it: each state begins with a return -----------------------------


def test_a_bar_that_rests_shows_where_and_says_so_once():
    clock = Clock()
    splitter = LineSplitter(clock)
    assert shown(splitter, b"\r10%\r20%\r30%") == ["10%"]
    assert shown(splitter, b"") == []
    clock.now += RENEWED_S
    assert shown(splitter, b"") == ["30%"]
    clock.now += 100 * RENEWED_S
    assert shown(splitter, b"") == []
    assert shown(splitter, b"\n") == []
    assert shown(splitter, b"half a line") == []
    clock.now += RENEWED_S
    assert shown(splitter, b"") == []  # no bar: it may go on
    assert shown(splitter, b" and half\n") == ["half a line and half"]
