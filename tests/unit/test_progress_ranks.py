"""What a node tells of its ranks' progress: from lines of JSON, in which nothing does harm; with a clock of the test."""

import asyncio
import json
import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit_helpers import Patient

from metaflow_extensions.torchrun.plugins.torchrun.gang.progress import Metrics, Pace
from metaflow_extensions.torchrun.plugins.torchrun.gang.wire import from_plain
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.progress_observer import (
    MAX_POINTS,
    LineReader,
    ProgressObserver,
    RankPace,
    Reported,
    parse_line,
)

# --- a line and its file --------------------------------------------------------------------------

WHOLE = b'{"step": 10, "total": 100, "seconds": 0.5, "loss": 1.25, "epoch": 1, "name": "a", "ok": true, "x": null}'


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (WHOLE, Reported(10, 100.0, 0.5, {"loss": 1.25, "epoch": 1.0})),
        (b'{"loss": 2}\r', Reported(values={"loss": 2.0})),
        (b'{"lo\\nss%s": 1}' % (b"k" * 500), Reported(values={"lo ss" + "k" * 75: 1.0})),
        (b'{"step": 3, "seconds": 0, "total": -1}', Reported(3)),
        (b'{"step": 3, "loss": NaN, "x": 1e999}', Reported(3, values={"loss": None, "x": None})),
        (b'{"step": 10, "lo', None),
        (b'{"nested": {"loss": 1}, "list": [1], "name": "a"}', None),
        (b'{"step": ' + b"1" * 10_000 + b"}", None),
    ],
)
def test_a_line_tells_step_total_seconds_and_values(text, line):
    assert parse_line(text) == line


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


def test_lines_come_once_and_whole_also_of_a_file_that_begins_anew_and_of_a_flood(tmp_path):
    path = tmp_path / "größe it's.jsonl"
    reader = LineReader(str(path))

    def read(*texts):
        """Append texts to the file; return the steps that are new."""
        with path.open("ab") as file:
            file.write(b"".join(texts))
        return [line.step for line in reader.new_lines()]

    assert list(reader.new_lines()) == []
    assert [read(b'{"step": 1}\n{"st'), read()] == [[1], []]
    assert read(b'ep": 2}\n\nbad\n{"loss": 3}\n') == [2, None]
    found = read(*(b'{"step": %d}\n' % step for step in range(160_000)), b"half")
    while more := read():
        found += more
    assert found == [*range(160_000)]
    path.write_bytes(b'{"step": 3}\n')  # truncated
    assert read() == [3]
    path.unlink()
    assert list(reader.new_lines()) == []


# --- a node -------------------------------------------------------------------------------------


class Node:
    """A node with two ranks, whose scripts write what the test has them write."""

    def __init__(self, folder, first_rank=0):
        self.now, self.codes, self.folder = 100.0, {}, folder
        self.call = SimpleNamespace(ranks=range(first_rank, first_rank + 2))
        self.files, self.reported_at = Patient(), None
        self.shown = []
        (folder / "metrics").mkdir()
        self.side = SimpleNamespace(say=lambda kind, text: self.shown.append(text))
        self.observer = ProgressObserver(self, self._clock)

    def _clock(self):
        self.now += 1e-9  # no two looks at a clock are the same
        return self.now

    def write(self, name, *lines):
        with open(self.folder / "metrics" / f"{name}.jsonl", "a") as file:
            file.writelines(f"{json.dumps(line) if isinstance(line, dict) else line}\n" for line in lines)

    def wait(self, seconds):
        """Let time go by in seconds, with a look at each; return what is told."""
        told = []
        for _ in range(seconds):
            self.now += 1
            told.append(self.observer.poll())
        return [from_plain(Metrics, each, "") for each in told if each is not None]

    def end(self):
        self.codes |= {0: 0, 1: 0}
        told = asyncio.run(self.observer.ended())
        return told and from_plain(Metrics, told, "")


@pytest.fixture
def node(tmp_path):
    return Node(tmp_path)


def test_steps_that_were_read_together_tell_no_speed(node):
    node.write(0, *({"step": number} for number in range(1, 111)))
    (told,) = node.wait(1)
    assert told.paces == {0: Pace()}


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


def test_names_that_are_too_many_are_told_once(node):
    for first in range(0, 60, 20):
        node.write(0, {"step": first} | {f"layer {number}": 1.0 for number in range(first, first + 20)})
        node.wait(5)
    said = "warning: rank 0 has reported more than 20 names, and only the first are kept: 'layer 20' is left out"
    assert node.shown == [said]


# --- how fast a rank is ---------------------------------------------------------------------------


def seen(*steps):
    """Return a rank of which these steps were seen, as (second, step)."""
    rank = RankPace()
    for at, step in steps:
        rank.see(Reported(step), at)
    return rank


STEPS = [(float(at), at) for at in range(41)]  # one a second


@pytest.mark.parametrize(
    ("steps", "now", "speed"),
    [
        ([(0.0, 1)], 10.0, None),  # when it began nobody knows
        ([(0.0, 0), (10.0, 20)], 10.0, 2.0),
        ([(0.0, 0), (10.0, 20)], 30.0, 21 / 30),  # it stands still: only step 21 may be nearly done
        ([(float(at), 2 * at) for at in range(101)], 100.0, 2.0),
        ([(0.0, 1000), (1.0, 2), (11.0, 12)], 11.0, 1.0),  # it has begun anew
        ([(0.0, 0), (10.0, 10), (10.0, 20)], 10.0, 2.0),  # two that were read at once
        (STEPS, 99.0, 21 / 79),  # it is slower than it was
        (STEPS, 101.0, None),  # it does nothing that could be fast or slow
        ([*STEPS, (140.0, 41)], 150.0, None),  # it goes on, and how fast nobody knows yet
        ([*STEPS, (140.0, 41), (240.0, 42)], 241.0, 0.01),  # it is slow now
    ],
)
def test_steps_a_second_are_of_the_last_part_of_a_minute_and_none_of_a_rank_that_stands_still(steps, now, speed):
    assert seen(*steps).pace(now).steps_per_s == (speed if speed is None else pytest.approx(speed))


# --- what is told ---------------------------------------------------------------------------------


def test_the_gang_hears_of_points_and_paces_at_once_and_then_every_5_s(node):
    assert node.wait(3) == []
    node.write(0, {"step": 1, "loss": 3.0, "total": 50})
    node.write(1, {"step": 1})
    assert node.wait(1) == [Metrics({0: Pace(), 1: Pace()}, {"loss": [(1, 3.0)]}, 1, 50.0)]
    assert node.wait(3) == []
    node.write(0, {"step": 2, "loss": 2.0, "seconds": 0.5}, {"accuracy": 0.5})
    assert node.wait(1) == []
    (told,) = node.wait(1)
    assert (told.step, told.total) == (2, 50.0)
    assert told.points == {"loss": [(2, 2.0)], "seconds": [(2, 0.5)], "accuracy": [(2, 0.5)]}
    assert told.paces == {0: Pace(pytest.approx(0.25), 0.5), 1: Pace()}
    (told,) = node.wait(5)
    assert (told.points, told.total) == ({}, 50.0)
    assert told.paces[0].steps_per_s < 0.25, "it has stood still for 5 s more"
    assert node.reported_at is not None


def test_what_was_written_last_is_told_at_the_end(node):
    assert node.wait(20) == []
    assert node.reported_at is None, "nothing was written"
    for name in (0, 1):
        node.write(name, {"step": 1, "loss": 3.0})
    node.codes[1] = 0
    (told,) = node.wait(5)
    assert list(told.paces) == [0], "a rank that has ended is not compared"
    node.write(0, {"step": 2, "loss": 1.0})
    assert node.end() == Metrics(points={"loss": [(2, 1.0)]}, step=2)
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
    assert told.points["loss"][-1] == (599, 599.0)
    assert told.points["accuracy"] == [(301, 0.5)]
