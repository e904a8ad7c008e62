"""What a node tells of its ranks' progress; with a clock that the test holds, and real files."""

import json
import re
from pathlib import Path

import pytest

from metaflow_extensions.torchrun.plugins.torchrun.features.progress import words
from metaflow_extensions.torchrun.plugins.torchrun.features.progress.kept import Progress
from metaflow_extensions.torchrun.plugins.torchrun.features.progress.lines import Line
from metaflow_extensions.torchrun.plugins.torchrun.features.progress.paces import RankPace
from metaflow_extensions.torchrun.plugins.torchrun.features.progress.ranks import (
    MAX_POINTS,
    MAX_POINTS_BYTES,
    Ranks,
    fitting,
    thinned,
)
from metaflow_extensions.torchrun.plugins.torchrun.features.progress.told import Pace, Point

ROOT = Path(__file__).parents[2]


class Node:
    """A node with two ranks, whose scripts write what the test has them write."""

    def __init__(self, folder, first_rank=0):
        self.now, self.ended, self.folder = 100.0, set(), folder
        ranks = {0: first_rank, 1: first_rank + 1}
        self.metrics = Ranks(str(folder), ranks, self.ended.__contains__, lambda: self.now)

    def write(self, name, *lines):
        with open(self.folder / "metrics" / f"{name}.jsonl", "ab") as file:
            file.write(
                b"".join((json.dumps(line) if isinstance(line, dict) else line).encode() + b"\n" for line in lines)
            )

    def wait(self, seconds):
        """Let time go by in seconds, with a look at each; return what is told."""
        told = []
        for _ in range(seconds):
            self.now += 1
            told.append(self.metrics.due())
        return [each for each in told if each is not None]


@pytest.fixture
def node(tmp_path):
    return Node(tmp_path)


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
        ([(0.0, 1)], 100.0, 0.01),  # its next step takes more than 100 s
        ([(0.0, 0), (10.0, 20)], 10.0, 2.0),
        ([(0.0, 0), (10.0, 20)], 30.0, 21 / 30),  # it stands still: only step 21 may be nearly done
        ([(float(at), 2 * at) for at in range(101)], 100.0, 2.0),
        ([(float(at), at) for at in range(50)] + [(50.0 + at, 50 + 4 * at) for at in range(51)], 100.0, 4.0),
        ([(0.0, 0), (50.0, 1), (100.0, 2)], 100.0, 0.02),  # steps longer than what is looked at
        ([(0.0, 1000), (1.0, 2), (11.0, 12)], 11.0, 1.0),  # it has begun anew
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
        ([(0.0, 0), (50.0, 1)], 199.0, True),  # its steps are long
        ([(0.0, 0), (50.0, 1)], 201.0, False),
        ([*STEPS, (140.0, 41)], 150.0, False),  # it goes on, and how fast nobody knows yet
        ([*STEPS, (140.0, 41)], 201.0, True),  # its first step since then takes long
        ([*STEPS, (140.0, 41), (240.0, 42)], 241.0, True),  # so it is slow now
        ([(1.0, 0), (1.0, 79)], 90.0, False),  # many steps before the first look, and none since
    ],
)
def test_a_rank_that_stands_still_is_not_slow(steps, now, has_speed):
    assert (seen(*steps).pace(now).steps_per_s is not None) is has_speed


@pytest.mark.parametrize(
    ("first", "last", "total", "is_done"),
    [(0, 79, 80.0, True), (1, 80, 80.0, True), (0, 78, 80.0, False), (1, 79, 80.0, False), (1, 79, None, False)],
)
def test_a_rank_that_has_done_its_steps_has_no_speed_any_more(first, last, total, is_done):
    rank = RankPace()
    for at in range(first, last + 1):
        rank.see(Line(at, total, 0.1), float(at))
    assert (rank.pace(last + 1.0) == Pace(last)) is is_done


def test_a_rank_without_a_step_has_no_pace():
    rank = RankPace()
    rank.see(Line(None, values={"loss": 1.0}), 0.0)
    assert rank.pace(100.0) is None


def test_the_seconds_of_a_step_are_the_mean_of_the_last_ones():
    rank = RankPace()
    for at, seconds in [(0.0, 9.0), (30.0, 0.2), (31.0, 0.4)]:
        rank.see(Line(int(at), seconds=seconds), at)
    assert rank.pace(31.0).seconds == pytest.approx(0.3)


def test_what_is_kept_of_a_rank_is_bounded():
    rank = RankPace()
    for number in range(100_000):
        rank.see(Line(number, seconds=0.1), number // 1000)
    assert len(rank._steps) < 100
    assert len(rank._seconds) <= 256


# --- what is told ---------------------------------------------------------------------------------


def test_nothing_is_told_where_nothing_is_written(node):
    assert node.wait(20) == []
    assert node.metrics.rest() is None


def test_every_5_s_the_gang_hears_of_points_and_paces(node):
    node.write(0, {"step": 1, "loss": 3.0, "total": 50})
    node.write(1, {"step": 1})
    assert node.wait(4) == []
    node.write(0, {"step": 2, "loss": 2.0}, {"accuracy": 0.5})
    (told,) = node.wait(1)
    assert told.total == 50.0
    assert told.points == (Point(1, {"loss": 3.0}), Point(2, {"loss": 2.0}), Point(2, {"accuracy": 0.5}))
    assert told.paces == {0: Pace(2, pytest.approx(0.25)), 1: Pace(1)}
    (told,) = node.wait(5)
    assert told.points == ()
    assert told.paces[0].steps_per_s < 0.25, "it has stood still for 5 s more"


def test_another_nodes_ranks_have_paces_only(tmp_path):
    node = Node(tmp_path, first_rank=4)
    node.write(1, {"step": 7, "loss": 3.0, "total": 50})
    (told,) = node.wait(5)
    assert (told.paces, told.points, told.total) == ({5: Pace(7)}, (), None)


def test_step_and_seconds_on_lines_of_their_own_count_for_each_rank_and_nothing_hides_them(node):
    for name in (0, 1):
        node.write(name, {"step": 1}, {"seconds": 0.5}, {"total": 90})
        node.write(name, *({f"loss {number}": 1.0} for number in range(100)))
    (told,) = node.wait(5)
    assert told.paces == {0: Pace(1, None, 0.5), 1: Pace(1, None, 0.5)}
    for name in (0, 1):
        node.write(name, *({"step": number} for number in range(2, 91)), *({"seconds": 0.5} for _ in range(1000)))
    (told,) = node.wait(5)
    assert told.paces == {0: Pace(90), 1: Pace(90)}, "both have done all their steps"


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("count", [100, 20_000], ids=["few", "more than one look can read"])
def test_a_step_0_is_told_however_many_lines_follow_it(node, first, count):
    node.write(0, *({"step": first + number, "total": count, "loss": 0.5} for number in range(count)))
    (told,) = node.wait(5)
    assert (told.counts_from_0, told.points[-1].step) == (first == 0, first + count - 1)


def test_the_example_of_the_documents_ends_at_the_whole(node, monkeypatch):
    (first, *_) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "metrics.md").read_text(), re.DOTALL)
    monkeypatch.setenv("TORCHRUN_METRICS", str(node.folder / "metrics" / "0.jsonl"))
    exec(first, names := {})
    names["metrics"].close()
    progress = Progress(0)
    for told in node.wait(5):
        progress.take(0, told, node.now)
    assert words.step(progress.as_dict()) == "1000 of 1000 steps (100 %)"


def test_a_rank_that_has_ended_is_not_compared(node):
    node.write(0, {"step": 1})
    node.write(1, {"step": 1})
    node.ended.add(1)
    (told,) = node.wait(5)
    assert list(told.paces) == [0]


def test_what_was_written_last_is_told_at_the_end(node):
    node.write(0, {"step": 1, "loss": 3.0})
    node.wait(5)
    node.write(0, {"step": 2, "loss": 1.0})
    node.ended |= {0, 1}
    told = node.metrics.rest()
    assert (told.points, told.paces) == ((Point(2, {"loss": 1.0}),), {})
    assert node.metrics.rest() is None


def test_of_many_points_neighbours_are_put_together_and_no_key_is_lost(node):
    for number in range(1000):
        values = {"loss": float(number), **({"accuracy": 0.5} if number == 501 else {})}
        node.write(0, {"step": number, **values})
    (told,) = node.wait(5)
    assert MAX_POINTS <= len(told.points) < 2 * MAX_POINTS
    assert told.points[-1].step == 999
    assert [point.values["accuracy"] for point in told.points if "accuracy" in point.values] == [0.5]
    assert [point.step for point in told.points] == sorted(point.step for point in told.points)


def test_neighbours_are_put_together_with_the_last_value_of_each_key():
    points = [Point(1, {"a": 1.0, "b": 1.0}), Point(2, {"a": 2.0}), Point(3, {"a": None})]
    assert thinned(points) == [Point(2, {"a": 2.0, "b": 1.0}), Point(3, {"a": None})]


@pytest.mark.parametrize("key", ["k" * 80, "🙂" * 80])
def test_points_have_room_in_one_message_however_long_their_keys_are(key):
    values = {f"{number}{key}": 1.0 for number in range(20)}
    kept = fitting([Point(step, values) for step in range(2 * MAX_POINTS)])
    assert kept[-1] == Point(2 * MAX_POINTS - 1, values)
    assert 1 < len(kept) < 2 * MAX_POINTS
    assert len(json.dumps([point.values for point in kept])) < MAX_POINTS_BYTES


def test_the_first_line_that_tells_nothing_is_said_once(node):
    node.write(1, "größe \x1b[31m" + "x" * 1000, "another")
    node.wait(5)
    complaint = node.metrics.pop_complaint()
    assert complaint.startswith("rank 1 has written a line to its metrics")
    assert "another" in complaint or "größe" in complaint
    assert len(complaint) < 300
    node.write(0, "again")
    node.wait(5)
    assert node.metrics.pop_complaint() is None
