"""What a node tells of its ranks' progress: from lines of JSON, in which nothing does harm; with a clock of the test."""

import asyncio
import json
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit_helpers import Patient

from metaflow_extensions.torchrun.plugins.torchrun.gang.progress import Metrics, Pace, Point, Progress
from metaflow_extensions.torchrun.plugins.torchrun.gang.wire import from_plain, to_plain
from metaflow_extensions.torchrun.plugins.torchrun.node.metric_lines import (
    FREED_BYTES,
    MAX_BYTES,
    Line,
    LineReader,
    parse_line,
)
from metaflow_extensions.torchrun.plugins.torchrun.node.paces import RankPace
from metaflow_extensions.torchrun.plugins.torchrun.node.progress_observer import MAX_POINTS, ProgressObserver

# --- a line and its file --------------------------------------------------------------------------

WHOLE = b'{"step": 10, "total": 100, "seconds": 0.5, "loss": 1.25, "epoch": 1, "name": "a", "ok": true, "x": null}'


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (WHOLE, Line(10, 100.0, 0.5, {"loss": 1.25, "epoch": 1.0})),
        (b'{"loss": 2}\r', Line(values={"loss": 2.0})),
        (b'{"%s": 1}' % (b"k" * 500), Line(values={"k" * 80: 1.0})),
        (b'{"step": 10, "lo', None),
        (b'{"nested": {"loss": 1}, "list": [1], "name": "a"}', None),
        (b"[" * 200_000, None),
        (b'{"step": ' + b"1" * 10_000 + b"}", None),
    ],
)
def test_a_line_tells_step_total_seconds_and_values(text, line):
    assert parse_line(text) == line


def test_a_name_fits_into_one_line():
    assert parse_line(json.dumps({"lo\nss\x1b 🙂é": 1}).encode()).values == {"lo ss  🙂é": 1.0}


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999", "1" + "0" * 400])
def test_a_number_that_is_not_finite_is_known_as_such(text):
    line = parse_line(f'{{"step": 3, "loss": {text}}}'.encode())
    assert line == Line(3, None, None, {"loss": None})
    assert parse_line(f'{{"step": {text}, "loss": 1}}'.encode()) == Line(None, None, None, {"loss": 1.0})


@pytest.mark.parametrize("key", ["seconds", "total"])
@pytest.mark.parametrize("value", [5e-324, 1e-10, sys.float_info.max, 2**54, 0, -1])
def test_numbers_of_which_no_speed_can_be_made_are_none(key, value):
    assert parse_line(json.dumps({"step": 3, key: value}).encode()) == Line(3)


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
    assert [file.read(), file.read()] == [[1], []]
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
    file.steps(0, 100_003)  # those from 100 000 on are longer, so that the first bytes are a part of a line
    first = file.read()
    assert MAX_BYTES // 16 - 2 <= len(first) <= MAX_BYTES // 16
    assert first == [*range(100_003 - len(first), 100_003)]
    file.steps(100_003, 100_005)
    assert file.read() == [100_003, 100_004]
    assert file.refused == []


def test_what_was_read_takes_no_place_on_the_disk(file):
    with open(file.path, "wb", buffering=0) as writer:  # not appending: it goes on at its own offset
        for each in range(40):
            writer.write(b"".join(b'{"step": %d}\n' % step for step in range(each * 4000, (each + 1) * 4000)))
            assert file.read()[-1] == (each + 1) * 4000 - 1
        status = file.path.stat()
        assert (status.st_size > 2_000_000, status.st_blocks * 512 < FREED_BYTES + 2 * MAX_BYTES) == (True, True)
        writer.write(b'{"step": 7}\n')
    assert (file.read(), file.refused) == ([7], [])
    file.path.write_bytes(b'{"step": 8}\n')  # begins anew
    assert file.read() == [8]


# --- a node -------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]


class Node:
    """A node with two ranks, whose scripts write what the test has them write."""

    def __init__(self, folder, first_rank=0):
        self.now, self.ended, self.folder = 100.0, set(), folder
        plan = SimpleNamespace(spec=SimpleNamespace(ranks=range(first_rank, first_rank + 2)))
        has_ended = self.ended.__contains__
        self.said, self.shown = [], []
        here = SimpleNamespace(
            request=plan,
            folder=str(folder),
            has_ended=has_ended,
            say=self.said.append,
            show=self.shown.append,
            files=Patient(),
        )
        self.watcher = ProgressObserver(here, lambda: self.now)

    def write(self, name, *lines):
        with open(self.folder / "metrics" / f"{name}.jsonl", "a") as file:
            file.writelines(f"{json.dumps(line) if isinstance(line, dict) else line}\n" for line in lines)

    def wait(self, seconds):
        """Let time go by in seconds, with a look at each; return what is told."""
        told = []
        for _ in range(seconds):
            self.now += 1
            told.append(self.watcher.poll())
        return [from_plain(Metrics, each, "") for each in told if each is not None]

    def end(self):
        self.ended |= {0, 1}
        told = asyncio.run(self.watcher.ended())
        return told and from_plain(Metrics, told, "")


@pytest.fixture
def node(tmp_path):
    return Node(tmp_path)


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([1, 2, 3, 3, None], ""),
        ([0, 1, 2, 0, 1, 0], "reported step 0 after step 2: of repeated steps only the last values are kept"),
        ([None, None, 1], "reported values without a step: only the last ones are kept"),
    ],
)
def test_what_makes_a_curve_lose_points_is_said_once(steps, said, node):
    for rank in (0, 1):
        node.write(rank, *({"loss": 1.0} if step is None else {"step": step, "loss": 1.0} for step in steps))
    node.wait(3)
    assert [said in text for text in node.shown] == ([True] if said else [])


# --- how fast a rank is ---------------------------------------------------------------------------


def seen(*steps):
    """Return a rank of which these steps were seen, as (second, step)."""
    rank = RankPace()
    for at, step in steps:
        rank.see(Line(step), at)
    return rank


@pytest.mark.parametrize(
    ("steps", "now", "speed"),
    [
        ([(0.0, 1)], 10.0, None),  # when it began nobody knows
        ([(0.0, 0), (10.0, 20)], 10.0, 2.0),
        ([(0.0, 0), (10.0, 20)], 30.0, 21 / 30),  # it stands still: only step 21 may be nearly done
        ([(float(at), 2 * at) for at in range(101)], 100.0, 2.0),
        ([(float(at), at) for at in range(50)] + [(50.0 + at, 50 + 4 * at) for at in range(51)], 100.0, 4.0),
        ([(0.0, 0), (50.0, 1), (100.0, 2)], 100.0, 0.02),  # steps longer than what is looked at
        ([(0.0, 1000), (1.0, 2), (11.0, 12)], 11.0, 1.0),  # it has begun anew
        ([(0.0, 0), (10.0, 10), (10.0, 20)], 10.0, 2.0),  # two that were read at once
    ],
)
def test_steps_a_second_are_of_the_last_part_of_a_minute(steps, now, speed):
    assert seen(*steps).pace(now).steps_per_s == (speed if speed is None else pytest.approx(speed))
    assert seen(*steps).pace(now).step == steps[-1][1]


STEPS = [(float(at), at) for at in range(41)]  # one a second


@pytest.mark.parametrize(
    ("steps", "now", "has_speed"),
    [
        (STEPS, 99.0, True),  # it is slower than it was
        (STEPS, 101.0, False),  # it does nothing that could be fast or slow
        ([*STEPS, (140.0, 41)], 150.0, False),  # it goes on, and how fast nobody knows yet
        ([*STEPS, (140.0, 41), (240.0, 42)], 241.0, True),  # it is slow now
        ([(1.0, 0), (1.0, 79)], 90.0, False),  # many steps before the first look, and none since
    ],
)
def test_a_rank_that_stands_still_is_not_slow(steps, now, has_speed):
    assert (seen(*steps).pace(now).steps_per_s is not None) is has_speed


@pytest.mark.parametrize(("last", "total", "is_done"), [(79, 80.0, True), (80, 80.0, True), (78, 80.0, False)])
def test_a_rank_that_has_done_its_steps_has_no_speed_any_more(last, total, is_done):
    rank = RankPace()
    for at in range(last + 1):
        rank.see(Line(at, total if at == 0 else None, 0.1), float(at))
    assert (rank.pace(last + 1.0) == Pace(last)) is is_done


# --- what is told ---------------------------------------------------------------------------------


def test_the_gang_hears_of_points_and_paces_at_once_and_then_every_5_s(node):
    assert node.wait(3) == []
    node.write(0, {"step": 1, "loss": 3.0, "total": 50})
    node.write(1, {"step": 1})
    assert node.wait(1) == [Metrics({0: Pace(1), 1: Pace(1)}, {"loss": (Point(1, 3.0),)}, 1, 50.0)]
    assert node.wait(3) == []
    node.write(0, {"step": 2, "loss": 2.0, "seconds": 0.5}, {"accuracy": 0.5})
    assert node.wait(1) == []
    (told,) = node.wait(1)
    assert (told.step, told.total) == (2, 50.0)
    assert told.points == {"loss": (Point(2, 2.0),), "seconds": (Point(2, 0.5),), "accuracy": (Point(2, 0.5),)}
    assert told.paces == {0: Pace(2, pytest.approx(0.25), 0.5), 1: Pace(1)}
    (told,) = node.wait(5)
    assert (told.points, told.total) == ({}, 50.0)
    assert told.paces[0].steps_per_s < 0.25, "it has stood still for 5 s more"
    assert node.watcher.saw_workers_at is not None


def test_the_example_of_the_documents_ends_at_the_whole(node, monkeypatch):
    (first, *_) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "metrics.md").read_text(), re.DOTALL)
    monkeypatch.setenv("TORCHRUN_METRICS", str(node.folder / "metrics" / "0.jsonl"))
    exec(first, {})
    kept = Progress(str)
    node.now += 1
    kept.take(0, 0, to_plain(node.end()), node.now)
    kept.ended(0, ok=True)
    assert [kept.record[name] for name in ("done", "total", "last")] == [1000, 1000, {"loss": 0.001}]


def test_what_was_written_last_is_told_at_the_end(node):
    assert node.wait(20) == []
    assert node.watcher.saw_workers_at is None, "nothing was written"
    for name in (0, 1):
        node.write(name, {"step": 1, "loss": 3.0})
    node.ended.add(1)
    (told,) = node.wait(5)
    assert list(told.paces) == [0], "a rank that has ended is not compared"
    node.write(0, {"step": 2, "loss": 1.0})
    assert node.end() == Metrics(points={"loss": (Point(2, 1.0),)}, step=2)
    assert node.end() is None


def test_of_many_points_some_are_told_and_no_key_is_lost(node):
    node.write(0, {"step": 0})
    node.wait(1)
    for number in range(600):
        node.write(0, {"step": number, "loss": float(number), **({"accuracy": 0.5} if number == 301 else {})})
        if number % 150 == 149:
            told = node.wait(1)
    (told,) = [*told, *node.wait(5)]
    assert MAX_POINTS // 4 < len(told.points["loss"]) <= MAX_POINTS
    assert told.points["loss"][-1] == Point(599, 599.0)
    assert told.points["accuracy"] == (Point(301, 0.5),)
