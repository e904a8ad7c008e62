"""What the control node keeps of a launch's progress, and which ranks it calls slow; with a clock that the test holds."""

import json

import pytest

from metaflow_extensions.torchrun.plugins.torchrun.features.progress.in_task import Metrics as MetricsOfResult
from metaflow_extensions.torchrun.plugins.torchrun.features.progress.keep import MAX_POINTS, ProgressKeeper
from metaflow_extensions.torchrun.plugins.torchrun.features.progress.stragglers import Change, Speeds, Stragglers, lines
from metaflow_extensions.torchrun.plugins.torchrun.features.progress.told import MAX_KEYS, Metrics, Pace, Point
from metaflow_extensions.torchrun.plugins.torchrun.gang.keepers import Happened, Where
from metaflow_extensions.torchrun.plugins.torchrun.gang.messages import Report
from metaflow_extensions.torchrun.plugins.torchrun.gang.wire import to_plain


class Kept:
    """What the control node keeps, told by nodes of one rank each."""

    def __init__(self):
        self.keeper = ProgressKeeper()

    def take(self, *points, node=0, pace=None, total=None, at_s=1.0, launch=0):
        """Take points as (step, values) and the pace of the node's rank."""
        by_key = {}
        for step, values in points:
            for key, value in values.items():
                by_key.setdefault(key, []).append(Point(step, value))
        told = {key: tuple(each) for key, each in by_key.items()}
        step = points[-1][0] if points else pace and pace.step
        metrics = Metrics({node: pace} if pace else {}, told, None if node else step, total)
        return self.keeper.handle(node, Report("progress", launch, 0, to_plain(metrics)), at_s)

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
    assert (kept.keeper.verdict(0, True, None), MetricsOfResult().result({}, print)) == (
        {},
        {"metrics": {}, "history": {}},
    )


def test_rank_0s_points_become_series_with_last_values_and_the_time_left(kept):
    kept.take((10, {"loss": 3.0, "lr": 0.1}), (20, {"loss": None}), pace=Pace(20, 2.0), total=100.0)
    kept.take(node=1, pace=Pace(19, 1.0))
    kept.compare(5.0)
    found = kept.keeper.record()
    slowest = {"rank": 1, "node": 1, "speed": 1.0}
    rates = {"by": "steps_per_s", "ranks": 2, "median": 1.5, "slowest": slowest, "stragglers": []}
    own = {"launch": 0, "step": 20, "done": 20, "total": 100.0, "steps_per_s": 2.0, "left_s": 40.0}
    series = {"loss": [(10, 3.0), (20, None)], "lr": [(10, 0.1)]}
    kept_of_0 = {**own, "last": {"loss": None, "lr": 0.1}, "series": series, "speeds": [(1.0, 2.0)]}
    assert found == {**kept_of_0, "rates": rates}
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
    told = {"last": {"step": 5, "lr": 1.0}, "history": {"lr": [(5, 1.0)]}}
    assert [kept.keeper.verdict(launch, True, None) for launch in (0, 1)] == [{}, told]
    assert kept.keeper.verdict(1, False, None) == {**told, "history": {}}, "the curves are long, and one node is enough"


def test_rank_0_is_followed_to_the_node_that_has_it(kept):
    """Where node 0 is left out, another node has rank 0."""
    kept.take((1, {"loss": 3.0}), pace=Pace(1, 2.0), total=10.0)
    kept.keeper.ended(0, ok=False)
    kept.keeper.begin(0, {}, 20.0)
    told = Metrics({0: Pace(2, 4.0)}, {"loss": (Point(2, 2.0),)}, 2, None)
    kept.keeper.handle(1, Report("progress", 0, 1, to_plain(told)), 30.0)
    assert (kept["step"], kept["left_s"], kept["last"]) == (2, 2.0, {"loss": 2.0})
    kept.keeper.handle(0, Report("progress", 0, 1, to_plain(Metrics({3: Pace(9, 1.0)}))), 30.0)
    assert kept["step"] == 2, "node 0 has other ranks now"
    kept.keeper.ended(1, ok=True)
    assert kept["steps_per_s"] is None


# --- what the log says ----------------------------------------------------------------------------


def test_the_first_report_is_an_event_and_the_log_has_a_line_soon_and_then_one_a_minute(kept):
    said = []
    assert kept.take(node=1, pace=Pace(0), at_s=0) is None, "of rank 0 nothing is known"
    for now in range(0, 200, 5):
        found = kept.take((now, {"loss": 1 / (now + 1)}), pace=Pace(now, 1.0), total=200.0, at_s=now)
        assert (found is not None) is (now == 0)
        if found is not None:
            assert found.happened == (
                Happened("progress", 0, "step 0 of 200 (0 %), 1 steps/s, 3 min 20 s left, loss 1", 0),
            )
        said += [(now, line) for line in kept.compare(now).lines]
    assert said == [
        (10, "step 10 of 200 (5 %), 1 steps/s, 3 min 10 s left, loss 0.09091"),
        (70, "step 70 of 200 (35 %), 1 steps/s, 2 min 10 s left, loss 0.01408"),
        (130, "step 130 of 200 (65 %), 1 steps/s, 1 min 10 s left, loss 0.007634"),
        (190, "step 190 of 200 (95 %), 1 steps/s, 10 s left, loss 0.005236"),
    ]
    kept.keeper.begin(1, {}, 300)
    assert kept.compare(500).lines == (), "what the launch before had reported is no news of this one"
    assert kept.take((1, {"loss": 1.0}), at_s=600, launch=1).happened == (Happened("progress", 0, "step 1, loss 1", 0),)


@pytest.mark.parametrize(
    ("looked_at", "last", "ok", "line"),
    [
        (10, 4, True, "5 of 5 steps (100 %), loss 0.5"),
        (10, 3, False, "step 3 of 5 (60 %), loss 0.5"),
        (10, 2, False, None),
        (5, 4, True, None),
    ],
    ids=["steps from 0", "a failure", "nothing new", "no line so far"],
)
def test_a_log_with_lines_of_progress_ends_with_the_last_step(looked_at, last, ok, line, kept):
    kept.take((2, {"loss": 1.0}), total=5.0, at_s=0)
    kept.compare(looked_at)
    kept.take((last, {"loss": 0.5}), at_s=11)
    said = kept.keeper.ended(0, ok)
    assert (None if said is None else said.lines) == (None if line is None else (line,))


def test_a_rank_0_that_stands_still_is_no_news(kept):
    kept.take((9, {"loss": 0.5}), pace=Pace(9), total=10.0, at_s=0)
    said = []
    for now in range(5, 300, 5):
        kept.keeper.handle(0, Report("progress", 0, 0, to_plain(Metrics({1: Pace(now)}, {}, 9, 10.0))), float(now))
        said += kept.compare(now).lines
    assert said == ["step 9 of 10 (90 %), loss 0.5"]


def test_after_a_restart_the_end_and_the_speed_before_it_do_not_count(kept):
    kept.take((9, {"loss": 0.5}), pace=Pace(9, 2.0), total=10.0)
    kept.keeper.ended(0, ok=True)  # another node's workers failed
    assert kept["done"] == 10
    kept.keeper.begin(0, {}, 10.0)
    assert (kept["done"], kept["steps_per_s"], kept["left_s"]) == (9, None, None)
    kept.take((9, {"loss": 0.5}), pace=Pace(9, 2.0), total=10.0)
    kept.keeper.begin(0, {}, 15.0)  # its node was lost
    assert (kept["steps_per_s"], kept["rates"]) == (None, None)
    kept.keeper.ended(0, ok=True)
    kept.keeper.begin(1, {}, 20.0)
    assert kept["done"] == 10, "the launch before has ended"


@pytest.mark.parametrize(
    ("points", "line"),
    [
        ([(3, {})], "step 3"),
        ([(3, {"a": 1, "b": None, "c": 1e-9, "d": 4})], "step 3, a 1, b not finite, c 1e-09, d 4"),
        ([(3, dict.fromkeys("abcdefg", 1))], "step 3, a 1, b 1, c 1, d 1, and 3 more values"),
    ],
)
def test_a_line_has_what_is_known(points, line, kept):
    kept.take(*points, at_s=0)
    assert kept.compare(10).lines == (line,)


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
        kept.take(node=node, pace=Pace(5, 2.0), at_s=14.0)
    kept.compare(14.9)
    assert (kept["rates"]["ranks"], kept["rates"]["median"]) == (4, 1.0)
    kept.compare(20.0)
    assert (kept["rates"]["ranks"], kept["rates"]["median"]) == (3, 2.0), "node 3 has told nothing for 20 s"
    kept.keeper.ended(2, ok=True)
    kept.compare(25.0)
    assert kept["rates"]["ranks"] == 2


def test_a_straggler_is_a_line_and_a_record_and_so_is_its_recovery(kept):
    said, happened = [], []
    for now in range(0, 220, 5):
        for node in range(4):
            kept.take(node=node, pace=Pace(5, 0.3 if node == 3 and now < 120 else 1.0), at_s=now)
        remarks = kept.compare(now)
        said += [line for line in remarks.lines if line.startswith("rank")]
        happened += remarks.happened
    slow, recovered = (
        f"is {word}slow: {speed} steps/s, the median is 1 steps/s" for word, speed in (("", 0.3), ("no longer ", 1))
    )
    assert said == [f"rank 3 (node 3, host host) {text}" for text in (slow, recovered)]
    assert happened == [Happened("straggler", 3, slow, 3), Happened("recovered", 3, recovered, 3)]


# --- which ranks are slow -------------------------------------------------------------------------


def where(rank):
    return Where(rank // 2, rank, f"h{rank // 2}")


def judged(*parts, by="steps_per_s"):
    """Return what was said as (second, rank, is slow), and the changes; parts are (seconds, speeds by rank)."""
    stragglers, now, said, changes = Stragglers(), 0, [], []
    for seconds, speeds in parts:
        known = {rank: speed for rank, speed in enumerate(speeds) if speed is not None}
        for _ in range(seconds // 5):
            now += 5
            found = stragglers.judge(Speeds(by, known), now)
            said += [(now, change.rank, change.is_slow) for change in found]
            changes += found
    return said, changes, stragglers.as_data(Speeds(by, known), where)["stragglers"]


SLOW, FAST = (1, 1, 1, 0.4), (1, 1, 1, 1)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([(600, SLOW)], [(65, 3, True)]),
        ([(600, (1, 1, 0.5))], []),  # half of the median is no straggler
        ([(600, (1, 1, 5))], []),
        ([(100, SLOW), (50, FAST), (10, SLOW), (100, FAST)], [(65, 3, True), (225, 3, False)]),
        ([(50, SLOW), (5, FAST), (50, SLOW), (5, FAST), (50, SLOW)], []),  # moments are no minute
        ([(600, (1, 0.1))], []),  # nobody could say which of two is normal
        ([(50, SLOW), (5, (1, 0.1)), (60, SLOW), (5, SLOW)], [(120, 3, True)]),  # nor does the time before count
        ([(100, SLOW), (50, (1, 1, 1)), (60, SLOW), (5, SLOW)], [(65, 3, True), (215, 3, True)]),  # it had ended
        ([(50, SLOW), (50, (1, 1, 1, None)), (60, SLOW), (5, SLOW)], [(165, 3, True)]),  # it had stood still
    ],
)
def test_a_rank_slower_than_half_the_median_for_a_minute_is_named_once(parts, said):
    assert judged(*parts)[0] == said


@pytest.mark.parametrize(
    ("by", "text"),
    [
        ("steps_per_s", "is slow: 0.4 steps/s, the median is 1.2 steps/s"),
        ("seconds", "is slow: 2.5 s of own work a step, the median is 0.8 s of own work a step"),
    ],
)
def test_those_that_are_slow_now_are_told(by, text):
    _, _, slow = judged((70, (1.25, 1.25, 0.4)), by=by)
    assert slow == [{"rank": 2, "node": 1, "speed": 0.4, "text": text}]
    assert judged((70, SLOW), (70, FAST))[2] == judged((70, SLOW), (5, (1, 1, 1)))[2] == []


# --- what is compared -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("paces", "speeds"),
    [
        ([(1.0, 0.1), (1.0, 0.5)], Speeds("seconds", {0: 10.0, 1: 2.0})),
        ([(1.0, 0.1), (1.0, 0.5), (None, None)], Speeds("seconds", {0: 10.0, 1: 2.0})),
        ([(1.0, 0.1), (1.5, None), (None, None)], Speeds("steps_per_s", {0: 1.0, 1: 1.5})),
        ([(None, None)], Speeds("steps_per_s", {})),
    ],
)
def test_where_all_ranks_say_their_own_seconds_these_count(paces, speeds):
    assert Speeds.of({rank: Pace(5, *pace) for rank, pace in enumerate(paces)}) == speeds


# --- what is said ---------------------------------------------------------------------------------


def test_many_at_once_are_one_line_for_each_kind():
    changes = [Change(rank, rank < 5, 0.4, "is slow") for rank in range(10)]
    slow, recovered = lines(changes, where)
    assert slow.startswith("ranks 0, 1, 2, 3, 4 have become slow")
    assert recovered.startswith("ranks 5, 6, 7, 8, 9 are no longer slow")
    assert lines(changes[1:5], where)[0] == "rank 1 (node 0, host h0) is slow"
    assert len(lines(changes[1:], where)) == 4 + 1
