"""What the control node keeps of a launch's progress: bounded, and right after a restart."""

import json

import pytest

from metaflow_extensions.torchrun.plugins.torchrun.features.progress.feature import Progress
from metaflow_extensions.torchrun.plugins.torchrun.features.progress.kept import MAX_POINTS
from metaflow_extensions.torchrun.plugins.torchrun.features.progress.told import MAX_KEYS, Metrics, Pace, Point
from metaflow_extensions.torchrun.plugins.torchrun.gang.keepers import Where
from metaflow_extensions.torchrun.plugins.torchrun.gang.protocol import Told
from metaflow_extensions.torchrun.plugins.torchrun.gang.wire import to_plain


class Kept:
    """What the control node keeps, told by nodes of one rank each."""

    def __init__(self):
        self.keeper = Progress().keeper(4, of_all=True)

    def take(self, *points, node=0, pace=None, total=None, at_s=1.0, launch=0):
        """Take points as (step, values) and the pace of the node's rank."""
        by_key = {}
        for step, values in points:
            for key, value in values.items():
                by_key.setdefault(key, []).append(Point(step, value))
        told = {key: tuple(each) for key, each in by_key.items()}
        step = points[-1][0] if points else pace and pace.step
        metrics = Metrics({node: pace} if pace else {}, told, None if node else step, total)
        self.keeper.handle(node, Told(launch, 0, "progress", to_plain(metrics)), at_s)

    def compare(self, at_s):
        return self.keeper.tick(at_s, lambda rank: Where(rank, rank, "host"))

    def __getitem__(self, field):
        return self.keeper.record()[field]


@pytest.fixture
def kept():
    return Kept()


def test_where_no_script_tells_anything_there_is_nothing(kept):
    assert kept.keeper.record() is None
    assert kept.compare(100.0).lines == ()
    assert kept.keeper.verdict(0, True, None) == {}


def test_rank_0s_points_become_series_with_last_values_and_the_time_left(kept):
    kept.take((10, {"loss": 3.0, "lr": 0.1}), (20, {"loss": None}), pace=Pace(20, 2.0), total=100.0)
    kept.take(node=1, pace=Pace(19, 1.0))
    kept.compare(5.0)
    found = kept.keeper.record()
    assert found == {
        "launch": 0,
        "step": 20,
        "done": 20,
        "total": 100.0,
        "steps_per_s": 2.0,
        "left_s": 40.0,
        "last": {"loss": None, "lr": 0.1},
        "series": {"loss": [(10, 3.0), (20, None)], "lr": [(10, 0.1)]},
        "speeds": [(1.0, 2.0)],
        "rates": {
            "by": "steps_per_s",
            "ranks": 2,
            "median": 1.5,
            "slowest": {"rank": 1, "node": 1, "speed": 1.0},
            "stragglers": [],
        },
    }
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize(
    ("step", "ended_well", "done"),
    [(119, True, 120), (119, False, 119), (119, None, 119), (120, True, 120), (60, True, 60)],
)
def test_where_steps_count_from_0_the_last_is_one_before_the_whole(kept, step, ended_well, done):
    kept.take(pace=Pace(step, 2.0), total=120.0)
    if ended_well is not None:
        kept.keeper.ended(0, ended_well)
    assert kept["done"] == done


def test_the_series_goes_on_after_a_restart(kept):
    kept.take((1, {"loss": 3.0}), (2, {"loss": 2.0}), pace=Pace(2, 4.0), total=10.0)
    kept.keeper.begin(0, {}, 20.0)
    kept.take((2, {"loss": 2.5}), at_s=30.0)
    assert kept["series"] == {"loss": [(1, 3.0), (2, 2.5)]}
    assert (kept["step"], kept["total"], kept["left_s"]) == (2, 10.0, None), "its speed is not known yet"
    kept.take(pace=Pace(2, 2.0), at_s=35.0)
    assert kept["left_s"] == 4.0


def test_another_launch_has_its_own(kept):
    kept.take((1, {"loss": 3.0}), pace=Pace(1, 2.0), total=10.0)
    kept.compare(5.0)
    kept.take((5, {"lr": 1.0}), launch=1)
    assert (kept["launch"], kept["total"], kept["series"], kept["rates"]) == (1, None, {"lr": [(5, 1.0)]}, None)
    assert [kept.keeper.verdict(launch, True, None) for launch in (0, 1)] == [{}, {"lr": 1.0}]


@pytest.mark.parametrize(
    ("rate", "total", "left"), [(None, 10.0, None), (0.0, 10.0, None), (2.0, None, None), (2.0, 3.0, 0)]
)
def test_the_time_left_is_told_only_where_it_can_be(kept, rate, total, left):
    kept.take(pace=Pace(5, rate), total=total)
    assert kept["left_s"] == left


def test_all_that_can_be_kept_is_small_and_the_first_keys_stay(kept):
    for step in range(3000):
        kept.take((step, {f"a key with a long name {step // 100 + key}": 1 / (step + 3) for key in range(10)}))
    names = [f"a key with a long name {number}" for number in range(MAX_KEYS)]
    assert list(kept["last"]) == list(kept["series"]) == names
    for _ in range(2):
        kept.take(*((step, dict.fromkeys(names, 1 / 3)) for step in range(10 * MAX_POINTS)))
    assert {len(points) <= MAX_POINTS for points in kept["series"].values()} == {True}
    assert len(json.dumps(kept.keeper.record())) < 200_000


def test_ranks_are_compared_every_5_s_while_their_node_tells_anything(kept):
    for node in range(4):
        kept.take(node=node, pace=Pace(5, 1.0), at_s=0.0)
    kept.compare(10.0)
    assert kept["rates"]["ranks"] == 4
    for node in range(3):
        kept.take(node=node, pace=Pace(5, 1.0), at_s=14.0)
    kept.compare(14.9)
    assert kept["rates"]["ranks"] == 4
    kept.compare(20.0)
    assert kept["rates"]["ranks"] == 3, "node 3 has told nothing for 20 s"
    kept.keeper.ended(2, ok=True)
    kept.compare(25.0)
    assert kept["rates"]["ranks"] == 2
