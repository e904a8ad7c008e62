"""A file of JSON lines that grows: numbers come out of it, and nothing that is in it does harm or costs much."""

import json
import math
import os
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaflow_extensions.torchrun.plugins.torchrun.features.progress.lines import (
    MAX_BYTES,
    Line,
    LineReader,
    parse_line,
)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            b'{"step": 10, "total": 100, "seconds": 0.5, "loss": 1.25, "epoch": 1, "name": "a", "ok": true, "x": null}',
            Line(10, 100.0, 0.5, {"loss": 1.25, "epoch": 1.0}),
        ),
        (b'{"loss": 2}\r', Line(values={"loss": 2.0})),
        (b"step 10, loss 1.2", None),
        (b'{"step": 10, "lo', None),
        (b"[1, 2]", None),
        (b"{}", None),
        (b'{"nested": {"loss": 1}, "list": [1], "name": "a"}', None),
        (b'{"loss": \xff}', None),
        (b"[" * 200_000, None),
        (b'{"step": ' + b"1" * 10_000 + b"}", None),
    ],
)
def test_a_line_tells_step_total_seconds_and_values(text, line):
    assert parse_line(text) == line


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999", "1" + "0" * 400])
def test_a_number_that_is_not_finite_is_known_as_such(text):
    line = parse_line(f'{{"step": 3, "loss": {text}}}'.encode())
    assert line == Line(3, None, None, {"loss": None})
    assert parse_line(f'{{"step": {text}, "loss": 1}}'.encode()) == Line(None, None, None, {"loss": 1.0})


@pytest.mark.parametrize("key", ["seconds", "total"])
@pytest.mark.parametrize("value", [5e-324, 1e-10, sys.float_info.max, 2**54, 0, -1])
def test_numbers_of_which_no_speed_can_be_made_are_none(key, value):
    assert parse_line(json.dumps({"step": 3, key: value}).encode()) == Line(3)


def test_long_keys_are_cut():
    assert parse_line(json.dumps({"k" * 500: 1}).encode()) == Line(values={"k" * 80: 1.0})


@given(
    st.binary(max_size=200)
    | st.dictionaries(
        st.text(max_size=8) | st.sampled_from(["step", "total", "seconds"]),
        st.floats() | st.integers() | st.none() | st.booleans() | st.lists(st.integers()),
    ).map(lambda data: json.dumps(data).encode())
)
def test_no_bytes_do_harm(data):
    line = parse_line(data)
    if line is not None:
        assert all(value is None or math.isfinite(value) for value in line.values.values())
        assert line.total is None or line.total > 0
        assert line.seconds is None or line.seconds > 0


# --- the file -------------------------------------------------------------------------------------


class Growing:
    """A file that the test writes, and what is read of it."""

    def __init__(self, path):
        self.path, self.refused = path, []
        self._reader = LineReader(str(path), self.refused.append)

    def append(self, *texts):
        with open(self.path, "ab") as file:
            file.write(b"".join(texts))

    def steps(self, first, last):
        self.append(*(b'{"step": %d}\n' % step for step in range(first, last)))

    def read(self):
        """Return the steps that are new."""
        return [line.step for line in self._reader.new_lines()]


@pytest.fixture
def file(tmp_path):
    return Growing(tmp_path / "größe it's.jsonl")


def test_lines_come_once_and_whole(file):
    assert file.read() == []
    file.append(b'{"step": 1}\n{"st')
    assert file.read() == [1]
    assert file.read() == []
    file.append(b'ep": 2}\n\nbad\n{"loss": 3}\n')
    assert file.read() == [2, None]
    assert file.refused == [b"bad"]


def test_a_file_that_begins_anew_is_read_from_its_begin(file):
    file.append(b'{"step": 1}\n{"step": 2}\nhalf')
    assert file.read() == [1, 2]
    file.path.write_bytes(b'{"step": 3}\n')  # truncated
    assert file.read() == [3]
    file.path.unlink()
    assert file.read() == []


def test_of_a_flood_the_last_lines_come(file):
    file.steps(0, 100_000)
    first = file.read()
    assert MAX_BYTES // 16 - 1 <= len(first) <= MAX_BYTES // 16
    assert first == [*range(100_000 - len(first), 100_000)]
    file.steps(100_000, 100_003)
    assert file.read() == [100_000, 100_001, 100_002]
    assert file.refused == []


def test_a_line_that_is_too_long_is_dropped_and_the_next_one_comes(file):
    for _ in range(5):
        file.append(b"x" * (MAX_BYTES - 10))
        assert file.read() == []
    file.append(b'the rest\n{"step": 1}\n')
    assert file.read() == [1]
    assert all(len(text) < 2 * MAX_BYTES for text in file.refused)


@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_what_is_no_file_is_not_waited_for(kind, file):
    {"pipe": os.mkfifo, "folder": os.mkdir, "device": lambda p: os.symlink("/dev/zero", p)}[kind](file.path)
    assert file.read() == []
