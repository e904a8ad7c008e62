"""What the control node keeps of a launch's progress: bounded, and right after a restart."""

import json
from itertools import pairwise

import pytest

from metaflow_extensions.torchrun.plugins.torchrun.features.progress import words
from metaflow_extensions.torchrun.plugins.torchrun.features.progress.kept import MAX_POINTS, Progress, Series
from metaflow_extensions.torchrun.plugins.torchrun.features.progress.told import MAX_KEYS, Metrics, Pace, Point
from metaflow_extensions.torchrun.plugins.torchrun.gang.keepers import Where


def series(points):
    found = Series()
    for step, value in points:
        found.add(step, value)
    return found.points


def where(rank):
    return Where(rank // 2, rank, "host")


def told(*points, paces=None, total=None):
    return Metrics(paces or {}, tuple(Point(step, values) for step, values in points), total)


# --- the points of a key --------------------------------------------------------------------------


def test_a_short_series_is_kept_whole():
    points = [(step, float(step)) for step in range(MAX_POINTS)]
    assert series(points) == points


@pytest.mark.parametrize("count", [MAX_POINTS + 1, 10_000, 123_457])
def test_of_a_long_series_evenly_spread_points_are_kept_with_first_and_last(count):
    kept = series((step, float(step)) for step in range(count))
    assert MAX_POINTS // 4 < len(kept) <= MAX_POINTS
    assert (kept[0], kept[-1]) == ((0, 0.0), (count - 1, float(count - 1)))
    gaps = [after[0] - before[0] for before, after in pairwise(kept[:-1])]
    assert max(gaps) <= 4 * min(gaps)


def test_steps_that_are_repeated_take_the_place_of_those_before():
    assert series([(1, 1.0), (2, 2.0), (3, 3.0), (2, 9.0), (3, None)]) == [(1, 1.0), (2, 9.0), (3, None)]
    kept = series([*((step, 0.0) for step in range(5000)), *((step, 1.0) for step in range(2500, 6000))])
    assert [step for step, _ in kept] == sorted({step for step, _ in kept})
    assert {value for step, value in kept if step >= 2500} == {1.0}
    assert {value for step, value in kept if step < 2500} == {0.0}


# --- the launch -----------------------------------------------------------------------------------


def test_where_no_script_tells_anything_there_is_nothing():
    progress = Progress(0)
    assert progress.as_dict() is None
    assert progress.look(100.0, where) == []


def test_rank_0s_points_become_series_with_last_values_and_the_time_left():
    progress = Progress(0)
    points = [(10, {"loss": 3.0, "lr": 0.1}), (20, {"loss": None})]
    progress.take(0, told(*points, paces={0: Pace(20, 2.0), 1: Pace(19, 1.0)}, total=100.0), 5.0)
    progress.look(5.0, where)
    found = progress.as_dict()
    assert found == {
        "launch": 0,
        "step": 20,
        "done": 20,
        "total": 100.0,
        "steps_per_s": 2.0,
        "left_s": 40.0,
        "last": {"loss": None, "lr": 0.1},
        "series": {"loss": [(10, 3.0), (20, None)], "lr": [(10, 0.1)]},
        "rates": {
            "by": "steps_per_s",
            "ranks": 2,
            "median": 1.5,
            "slowest": {"rank": 1, "node": 0, "speed": 1.0},
            "stragglers": [],
        },
    }
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize(
    ("steps", "knows", "ended_well", "said"),
    [
        (range(120), True, True, "120 of 120 steps (100 %)"),
        (range(60), True, None, "60 of 120 steps (50 %)"),
        (range(1, 121), False, True, "step 120 of 120 (100 %)"),
        (range(1, 120), False, None, "step 119 of 120 (99 %)"),
        (range(60, 120), False, True, "120 of 120 steps (100 %)"),  # from a checkpoint on
        (range(60, 120), False, False, "step 119 of 120 (99 %)"),
        (range(121), True, True, "step 120 of 120 (100 %)"),  # the first one before any training
    ],
)
def test_progress_ends_at_the_whole_from_wherever_steps_count(steps, knows, ended_well, said):
    progress = Progress(0)
    points = tuple(Point(step, {"loss": 1.0}) for step in steps)
    progress.take(0, Metrics({0: Pace(steps[-1], 2.0)}, points, 120.0, knows), 1.0)
    assert progress.left_s == max(0, 120 - len([*range(steps[-1] + knows)])) / 2
    if ended_well is not None:
        progress.forget(0, ended_well)
    assert words.step(progress.as_dict()) == said


def test_of_an_older_version_the_step_is_what_is_done():
    assert words.step({"step": 119, "total": 120.0}) == "step 119 of 120 (99 %)"


def test_from_where_steps_count_is_known_after_a_restart():
    progress = Progress(0)
    progress.take(0, Metrics({0: Pace(0)}, (), 10.0, True), 1.0)
    progress.begin()
    progress.take(0, Metrics({0: Pace(7)}, (), 10.0, False), 2.0)
    assert progress.done == 8


def test_the_series_goes_on_after_a_restart():
    progress = Progress(0)
    progress.take(0, told((1, {"loss": 3.0}), (2, {"loss": 2.0}), paces={0: Pace(2, 4.0)}, total=10.0), 1.0)
    progress.begin()
    progress.take(0, told((2, {"loss": 2.5})), 30.0)
    found = progress.as_dict()
    assert found["series"]["loss"] == [(1, 3.0), (2, 2.5)]
    assert (found["step"], found["total"], found["left_s"]) == (2, 10.0, None), "its speed is not known yet"
    progress.take(0, told(paces={0: Pace(2, 2.0)}), 35.0)
    assert progress.as_dict()["left_s"] == 4.0


@pytest.mark.parametrize(
    ("rate", "total", "left"), [(None, 10.0, None), (0.0, 10.0, None), (2.0, None, None), (2.0, 3.0, 0)]
)
def test_the_time_left_is_told_only_where_it_can_be(rate, total, left):
    progress = Progress(0)
    progress.take(0, told(paces={0: Pace(5, rate)}, total=total), 1.0)
    assert progress.left_s == left


def test_the_first_keys_are_kept():
    progress = Progress(0)
    for number in range(100):
        progress.take(0, told((number, {f"key{number}": 1.0})), 1.0)
    assert list(progress.last) == list(progress.as_dict()["series"]) == [f"key{number}" for number in range(MAX_KEYS)]


def test_all_that_can_be_kept_is_small():
    progress = Progress(0)
    for step in range(20_000):
        progress.take(
            0, told((step, {f"a key with a long name {key}": 1 / (step + 3) for key in range(MAX_KEYS)})), 1.0
        )
    assert len(json.dumps(progress.as_dict())) < 400_000


def test_a_node_that_tells_nothing_any_more_is_not_compared():
    progress = Progress(0)
    for node in range(4):
        progress.take(node, told(paces={node: Pace(5, 1.0)}), 0.0)
    progress.look(10.0, where)
    assert progress.as_dict()["rates"]["ranks"] == 4
    for node in range(3):
        progress.take(node, told(paces={node: Pace(5, 1.0)}), 30.0)
    progress.look(30.0, where)
    assert progress.as_dict()["rates"]["ranks"] == 3
