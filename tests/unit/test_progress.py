"""How far a launch is: what the gang keeps, which ranks it calls slow, and what the log and the page say."""

import json
import sys
from itertools import pairwise

import pytest
from gang_views import Story, place

from metaflow_extensions.torchrun.plugins.torchrun.gang.progress import (
    Metrics,
    Pace,
    Progress,
    Series,
)
from metaflow_extensions.torchrun.plugins.torchrun.gang.wire import to_plain
from metaflow_extensions.torchrun.plugins.torchrun.show.page import page_of
from metaflow_extensions.torchrun.plugins.torchrun.show.parts import Chart, Facts, Sentence, layout, lines_of
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.progress_observer import parse_line


class Kept(Progress):
    """What the gang keeps, told by nodes of one rank each."""

    def __init__(self):
        super().__init__(lambda rank: f"rank {rank} (node {rank}, host h)")

    def says(self, *points, node=0, pace=None, step=None, total=None, at_s=1.0, launch=0):
        """Take points as (step, values) and the pace of the node's rank."""
        by_key = {}
        for step, values in points:
            for key, value in values.items():
                by_key.setdefault(key, []).append((step, value))
        step = points[-1][0] if points else step
        metrics = Metrics({node: pace} if pace else {}, by_key, None if node else step, total)
        return self.take(node, launch, to_plain(metrics), at_s)

    def __getitem__(self, field):
        return self.record[field]


@pytest.fixture
def kept():
    return Kept()


# --- what is kept ---------------------------------------------------------------------------------


def test_rank_0s_points_become_series_with_last_values_and_the_time_left(kept):
    kept.says((10, {"loss": 3.0, "lr": 0.1}), (20, {"loss": None}), pace=Pace(2.0), total=100.0)
    kept.says(node=1, pace=Pace(1.0))
    kept.tick(5.0)
    own = {"launch": 0, "step": 20, "done": 20, "total": 100.0, "from_0": False, "steps_per_s": 2.0, "left_s": 40.0}
    series = {"loss": [(10, 3.0), (20, None)], "lr": [(10, 0.1)]}
    assert kept.record == {**own, "last": {"loss": None, "lr": 0.1}, "series": series}


@pytest.mark.parametrize(
    ("step", "ended_well", "done"),
    [(119, True, 120), (119, False, 119), (119, None, 119), (120, True, 120), (60, True, 60)],
)
def test_where_steps_count_from_0_the_last_is_one_before_the_whole(kept, step, ended_well, done):
    kept.says(pace=Pace(2.0), step=step, total=120.0)
    if ended_well is not None:
        kept.ended(0, ended_well)
    assert kept["done"] == done


def test_after_a_restart_the_series_goes_on_and_the_end_and_the_speed_before_it_do_not_count(kept):
    kept.says((1, {"loss": 3.0}), (2, {"loss": 2.0}), pace=Pace(4.0), total=3.0)
    kept.tick(5.0)
    kept.ended(0, ok=True)  # another node's workers failed
    assert kept["done"] == 3
    kept.begin(0)
    assert [kept[name] for name in ("done", "steps_per_s", "left_s")] == [2, None, None]
    kept.says((2, {"loss": 2.5}), at_s=30.0)
    assert kept["series"] == {"loss": [(1, 3.0), (2, 2.5)]}
    assert (kept["step"], kept["total"], kept["left_s"]) == (2, 3.0, None), "its speed is not known yet"
    kept.says(pace=Pace(2.0), step=2, at_s=35.0)
    assert kept["left_s"] == 0.5
    kept.ended(0, ok=True)
    kept.begin(1)
    assert kept["done"] == 3, "the launch before has ended"


def test_another_launch_has_its_own(kept):
    kept.says((1, {"loss": 3.0}), pace=Pace(2.0), total=10.0)
    kept.tick(5.0)
    kept.says((5, {"lr": 1.0}), launch=1)
    assert (kept["launch"], kept["total"], kept["series"]) == (1, None, {"lr": [(5, 1.0)]})
    told = {"last": {"step": 5, "lr": 1.0}, "history": {"lr": [(5, 1.0)]}}
    assert [kept.verdict(launch, True) for launch in (0, 1)] == [{}, told]
    assert kept.verdict(1, False) == {**told, "history": {}}, "the curves are long, and one node is enough"


# --- what the log says ----------------------------------------------------------------------------


def test_the_log_has_a_line_soon_after_the_first_report_and_then_one_a_minute(kept):
    assert kept.says(node=1, pace=Pace(), at_s=0) == "", "of rank 0 nothing is known"
    firsts, said = [], []
    for now in range(0, 200, 5):
        firsts.append(kept.says((now, {"loss": 1 / (now + 1)}), pace=Pace(1.0), total=200.0, at_s=now))
        said += [(now, line) for line in kept.tick(now)]
    assert firsts == ["step 1 of 200 (0 %), 1 steps/s, 3 min 19 s left, loss 1", *[""] * 39]
    assert said == [
        (10, "step 11 of 200 (5 %), 1 steps/s, 3 min 9 s left, loss 0.09091"),
        (70, "step 71 of 200 (35 %), 1 steps/s, 2 min 9 s left, loss 0.01408"),
        (130, "step 131 of 200 (65 %), 1 steps/s, 1 min 9 s left, loss 0.007634"),
        (190, "step 191 of 200 (95 %), 1 steps/s, 9 s left, loss 0.005236"),
    ]
    for now in range(200, 500, 5):  # rank 0 stands still, and another rank of its node goes on
        kept.take(0, 0, to_plain(Metrics({1: Pace()}, {}, 195, 200.0)), now)
        said += kept.tick(now)
    assert said[4:] == ["step 196 of 200 (98 %), loss 0.005102"]
    kept.begin(1)
    assert kept.tick(501) == [], "what the launch before had reported is no news of this one"
    assert kept.says((1, {"loss": 1.0}), at_s=600, launch=1) == "step 1, loss 1"


@pytest.mark.parametrize(
    ("looked_at", "last", "ok", "line"),
    [
        (10, 4, True, "step 5 of 5 (100 %), loss 0.5"),
        (10, 3, False, "step 3 of 5 (60 %), loss 0.5"),
        (10, 2, False, ""),
        (5, 4, True, ""),
    ],
    ids=["steps from 0", "a failure", "nothing new", "no line so far"],
)
def test_a_log_with_lines_of_progress_ends_with_the_last_step(looked_at, last, ok, line, kept):
    kept.says((2, {"loss": 1.0}), total=5.0, at_s=0)
    kept.tick(looked_at)
    kept.says((last, {"loss": 0.5}), at_s=11)
    assert kept.ended(0, ok) == line


def test_a_line_has_what_is_known(kept):
    assert Kept().says((3, {}), at_s=0) == "step 3"
    assert Kept().says((3, dict.fromkeys("abcdefg", 1)), at_s=0) == "step 3, a 1, b 1, c 1, d 1, and 3 more values"
    line = kept.says((3, {"a": 1, "b": None, "c": 1e-9, "d": 4}), at_s=0)
    assert line == "step 3, a 1, b not finite, c 1e-09, d 4"
    assert kept.tick(10) == [line]


# --- which ranks are slow -------------------------------------------------------------------------


def judged(*parts):
    """Return what was said, with its second; parts are seconds and paces by rank."""
    kept, now, said = Kept(), 0, []
    for seconds, paces in parts:
        known = {rank: each if isinstance(each, Pace) else Pace(each) for rank, each in enumerate(paces)}
        for _ in range(seconds // 5):
            now += 5
            kept.take(0, 0, to_plain(Metrics(known)), now)
            said += [(now, line) for line in kept.tick(now)]
    return said


SLOW, FAST = (1, 1, 1, 0.4), (1, 1, 1, 1)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([(600, SLOW)], [65]),
        ([(600, (1, 1, 1, 0.5))], []),  # half of the median is not slow
        ([(600, (1, 1, 1, 5))], []),
        ([(100, SLOW), (50, FAST), (100, SLOW)], [65]),
        ([(50, SLOW), (5, FAST), (50, SLOW), (5, FAST), (50, SLOW)], []),  # moments are no minute
        ([(600, (1, 0.1))], []),  # nobody could say which of two is normal
        ([(50, SLOW), (5, (1, 0.1)), (60, SLOW), (5, SLOW)], [120]),  # nor does the time before count
        ([(50, SLOW), (50, (1, 1, 1, None)), (60, SLOW), (5, SLOW)], [165]),  # it had stood still
    ],
)
def test_a_rank_slower_than_half_the_median_for_a_minute_is_named_once(parts, said):
    line = "rank 3 (node 3, host h) is slow: 0.4 steps/s, the median is 1 steps/s"
    assert judged(*parts) == [(at, line) for at in said]


@pytest.mark.parametrize(
    ("paces", "text"),
    [
        ([0.8, 0.8, 2.5], "is slow: 2.5 s of own work a step, the median is 0.8 s of own work a step"),
        ([0.8, 0.8, 2.5, None], "is slow: 2.5 s of own work a step, the median is 0.8 s of own work a step"),
        ([0.8, 0.8, (1.0, None)], None),  # one does not say its own seconds, and by the steps none is slow
    ],
)
def test_where_all_ranks_say_their_own_seconds_these_count(paces, text):
    known = [Pace(*(each if isinstance(each, tuple) else (each and 1.0, each))) for each in paces]
    assert [line for _, line in judged((70, known))] == ([f"rank 2 (node 2, host h) {text}"] if text else [])


# --- the page -------------------------------------------------------------------------------------


def shown(story):
    """Return the sentences, the facts and the charts of the section."""
    page = page_of(story.view, place())
    json.dumps(layout(page), allow_nan=False)
    (parts,) = [each.parts for each in page.sections if each.name == "progress"]
    said, facts, charts = ([part for part in parts if isinstance(part, kind)] for kind in (Sentence, Facts, Chart))
    rows = dict(row for part in facts for row in part.rows)
    return [part.text for part in said], rows, [chart.spec for chart in charts]


@pytest.mark.parametrize(
    ("values", "scale"),
    [
        ([0.5, 0.25], {"zero": False}),
        ([0.5, 0.004], {"type": "log"}),
        ([0.5, 0.004, -1.0], {"zero": False}),
        ([0.5, 0.5], {"domain": [0.25, 0.75]}),
        ([-2.0, None], {"domain": [-3.0, -1.0]}),
        ([0.0, 0.0], {"zero": False}),
    ],
)
def test_a_chart_has_an_axis_that_fits_its_values(values, scale):
    points = [(step, {"lr": each}) for step, each in enumerate(values)]
    (chart,) = shown(Story().running().progress({}, points))[2]
    assert chart["encoding"]["y"]["scale"] == scale


MAX, TINY = sys.float_info.max, 5e-324


@pytest.mark.parametrize(
    ("values", "drawn"),
    [
        ([MAX, 2.5, 2.25], [None, 2.5, 2.25]),  # "best so far", before there is any
        ([-MAX, MAX], [None, None]),
        ([float("inf"), float("-inf"), float("nan"), 10**400, 1.0], [None, None, None, None, 1.0]),
        ([0.0, TINY], [0.0, 0.0]),
        ([1e300, -1e300], [1e300, -1e300]),
    ],
)
@pytest.mark.parametrize("name", ["", "</script><script>window.hit = 1</script>", "\ud800", "ste\u0000p\n"])
def test_no_value_and_no_name_of_one_makes_a_page_that_no_browser_can_read(values, drawn, name):
    lines = [parse_line(json.dumps({"step": step, name: each}).encode()) for step, each in enumerate(values)]
    story = Story().running().progress({}, [(line.step, line.values) for line in lines])
    (chart,) = shown(story)[2]
    assert [row["value"] for row in chart["data"]["values"]] == drawn
    assert all(line.isprintable() or "\ud800" in name for line in lines_of(page_of(story.view, place())))


def test_what_an_earlier_launch_has_reported_is_not_taken_for_the_running_ones():
    story = Story().running().progress({0: 2.0}, [(30, {})], 60.0).at(10.0)
    said, facts, _ = shown(story.ended().ready(launch=1))
    assert said == ["Launch 1 has reported nothing so far. This is what launch 0 reported."]
    assert facts["rank 0"] == "step 30 of 60 (50 %)"


# --- a series keeps a bounded number of points, however long it goes on ---------------------------


def series(points, most=200):
    found = Series(most)
    for x, value in points:
        found.add(x, value)
    return found


@pytest.mark.parametrize("every", [1, 1000])
@pytest.mark.parametrize("count", [201, 12_345])
def test_of_a_long_series_evenly_spread_points_are_kept_to_the_last(count, every):
    kept = series((7 + every * number, float(number)) for number in range(count)).points
    assert 50 < len(kept) <= 200
    assert kept[-1] == (7 + every * (count - 1), count - 1)
    gaps = [after[0] - before[0] for before, after in pairwise(kept[:-1])]
    assert max(gaps) <= 2.1 * min(gaps)


def test_what_is_done_again_takes_the_place_of_what_was_there_and_later():
    whole = [(step, float(step)) for step in range(-50, 150)]
    assert series(whole).points == whole
    points = [(1, 1.0), (2, 2.0), (3, 3.0), (2, 9.0), (3, None)]
    assert series(points).points == [(1, 1.0), (2, 9.0), (3, None)]
    assert series([*points, (-5, 7.0)]).points == [(-5, 7.0)]
    again = [*((step, 0.0) for step in range(5000)), *((step, 1.0) for step in range(2500, 6000))]
    kept = series(again).points
    assert [value for _, value in kept] == [float(step >= 2500) for step, _ in kept]
