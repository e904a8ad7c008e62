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
    GrowingFile,
    Line,
    LineReader,
    parse_line,
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "größe it's.jsonl"


def append(path, data):
    with open(path, "ab") as file:
        file.write(data)


# --- one line -------------------------------------------------------------------------------------


def test_a_line_tells_step_total_seconds_and_values():
    line = b'{"step": 10, "total": 100, "seconds": 0.5, "loss": 1.25, "epoch": 1, "name": "a", "ok": true, "x": null}'
    assert parse_line(line) == Line(10, 100.0, 0.5, {"loss": 1.25, "epoch": 1.0})
    assert parse_line(b'{"loss": 2}\r') == Line(None, None, None, {"loss": 2.0})


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999", "1" + "0" * 400])
def test_a_number_that_is_not_finite_is_known_as_such(text):
    line = parse_line(f'{{"step": 3, "loss": {text}}}'.encode())
    assert line == Line(3, None, None, {"loss": None})
    assert parse_line(f'{{"step": {text}, "loss": 1}}'.encode()) == Line(None, None, None, {"loss": 1.0})


@pytest.mark.parametrize("value", [5e-324, 1e-10, 1e10, sys.float_info.max, 0, -1])
def test_seconds_of_which_no_speed_can_be_made_are_none(value):
    assert parse_line(json.dumps({"step": 3, "seconds": value}).encode()) == Line(3)


@pytest.mark.parametrize("value", [5e-324, 0.5, 2**54, 0, -1])
def test_a_total_that_no_step_can_reach_is_none(value):
    assert parse_line(json.dumps({"step": 3, "total": value}).encode()) == Line(3)


@pytest.mark.parametrize(
    "text",
    [
        b"step 10, loss 1.2",
        b'{"step": 10, "lo',
        b"[1, 2]",
        b"7",
        b"{}",
        b'{"name": "a"}',
        b'{"nested": {"loss": 1}, "list": [1]}',
        b'{"loss": \xff}',
        b"\x00\x01",
        b"[" * 200_000,
        b'{"step": ' + b"1" * 10_000 + b"}",
    ],
)
def test_what_tells_nothing_is_none(text):
    assert parse_line(text) is None


def test_of_a_wide_line_with_long_keys_a_part_is_kept():
    line = parse_line(json.dumps({f"{number:03}{'k' * 500}": number for number in range(1000)}).encode())
    assert len(line.values) == 40
    assert {len(key) for key in line.values} == {80}


@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_no_bytes_do_harm(data):
    line = parse_line(data)
    assert line is None or all(value is None or math.isfinite(value) for value in line.values.values())


@given(
    st.dictionaries(
        st.text(max_size=8) | st.sampled_from(["step", "total", "seconds"]),
        st.floats() | st.integers() | st.none() | st.booleans() | st.lists(st.integers()),
    )
)
def test_no_object_does_harm(data):
    line = parse_line(json.dumps(data).encode())
    if line is not None:
        assert all(value is None or math.isfinite(value) for value in line.values.values())
        assert line.total is None or line.total > 0
        assert line.seconds is None or line.seconds > 0


# --- the file -------------------------------------------------------------------------------------


def test_lines_come_once_and_whole(path):
    file = GrowingFile(str(path))
    assert file.new_lines() == []
    append(path, b"one\ntw")
    assert file.new_lines() == [b"one"]
    assert file.new_lines() == []
    append(path, b"o\n\nthree\n")
    assert file.new_lines() == [b"two", b"three"]


def test_a_file_that_begins_anew_is_read_from_its_begin(path):
    file = GrowingFile(str(path))
    append(path, b"one\ntwo\nhalf")
    assert file.new_lines() == [b"one", b"two"]
    path.write_bytes(b"three\n")  # truncated
    assert file.new_lines() == [b"three"]
    path.unlink()
    assert file.new_lines() == []
    path.write_bytes(b"four\nfive, and longer than before\n")
    assert file.new_lines() == [b"four", b"five, and longer than before"]


def test_another_file_of_the_same_name_is_read_from_its_begin(path, tmp_path):
    file = GrowingFile(str(path))
    append(path, b"one\n")
    assert file.new_lines() == [b"one"]
    (tmp_path / "next").write_bytes(b"a longer first line\n")
    os.replace(tmp_path / "next", path)
    assert file.new_lines() == [b"a longer first line"]


def test_of_a_flood_the_last_lines_come(path):
    file = GrowingFile(str(path))
    append(path, b"first\n")
    assert file.new_lines() == [b"first"]
    append(path, b"".join(b"%07d\n" % number for number in range(1_000_000)))
    lines = file.new_lines()
    assert MAX_BYTES // 8 - 1 <= len(lines) <= MAX_BYTES // 8
    assert lines == [b"%07d" % number for number in range(1_000_000 - len(lines), 1_000_000)]


def test_of_a_flood_at_the_first_look_the_first_line_comes_too(path):
    file = GrowingFile(str(path))
    append(path, b"".join(b"%07d\n" % number for number in range(100_000)))
    lines = file.new_lines()
    assert [int(line) for line in (lines[0], lines[-1])] == [0, 99_999]
    assert int(lines[1]) > 90_000
    append(path, b"".join(b"%07d\n" % number for number in range(100_000)))
    assert int(file.new_lines()[0]) > 90_000


def test_a_line_that_is_too_long_is_dropped_and_the_next_one_comes(path):
    file = GrowingFile(str(path))
    for _ in range(5):
        append(path, b"x" * (MAX_BYTES - 10))
        assert file.new_lines() == []
        assert len(file._rest) <= MAX_BYTES
    append(path, b"the rest\nnext\n")
    assert file.new_lines() == [b"next"]


@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_what_is_no_file_is_not_waited_for(kind, path):
    {"pipe": os.mkfifo, "folder": os.mkdir, "device": lambda p: os.symlink("/dev/zero", p)}[kind](path)
    assert GrowingFile(str(path)).new_lines() == []


# --- what a rank's file says ----------------------------------------------------------------------


def test_all_lines_or_those_about_the_pace(path):
    refused = []
    first, second = (LineReader(str(path), refused.append) for _ in range(2))
    append(path, b'{"step": 1, "loss": 3}\n{"step": 2, "loss": 2}\nbad\n{"loss": 1}\n{"step":')
    assert [line.step for line in first.all()] == [1, 2, None]
    assert refused == [b"bad"]
    assert [line.step for line in second.of_pace()] == [1, 2]
    assert second.of_pace() == []
    append(path, b" 3}\n{" + b'"loss": 1}\n{' * 100)
    assert second.of_pace() == [Line(3)]
    append(path, b"bad\n")
    assert second.of_pace() == []
    assert len(refused) == 2
    assert len(first.all()) == 101


def test_of_a_flood_the_first_and_the_last_lines_about_the_pace_are_looked_at(path):
    reader = LineReader(str(path), pytest.fail)
    append(path, b"".join(b'{"step": %d}\n' % number for number in range(2000)))
    steps = [line.step for line in reader.of_pace()]
    assert (steps[:2], steps[-1], len(steps) < 300) == ([0, 1], 1999, True)
