"""Which ranks are slow; with a clock that the test holds."""

import pytest

from metaflow_extensions.torchrun.plugins.torchrun.features.progress.stragglers import Change, Speeds, Stragglers, lines
from metaflow_extensions.torchrun.plugins.torchrun.features.progress.told import Pace
from metaflow_extensions.torchrun.plugins.torchrun.gang.keepers import Where


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


def test_those_that_are_slow_now_are_told():
    _, _, slow = judged((70, (1.25, 1.25, 0.4)))
    assert slow == [{"rank": 2, "node": 1, "speed": 0.4, "text": "is slow: 0.4 steps/s, the median is 1.2 steps/s"}]
    assert judged((70, SLOW), (70, FAST))[2] == judged((70, SLOW), (5, (1, 1, 1)))[2] == []


def test_when_something_else_is_compared_the_minute_begins_anew():
    stragglers = Stragglers()
    said = [
        bool(stragglers.judge(Speeds("steps_per_s" if now < 60 else "seconds", {0: 1.0, 1: 1.0, 2: 0.1}), now))
        for now in range(0, 125, 5)
    ]
    assert said == [*[False] * 24, True]


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


def test_a_line_names_rank_and_place_and_speeds():
    _, changes, _ = judged((70, (10.0, 10.0, 2.0)), (70, (10.0, 10.0, 8.0)), by="seconds")
    place, median = "rank 2 (node 1, host h1) is", "the median is 0.1 s of own work a step"
    assert lines(changes, where) == [
        f"{place} slow: 0.5 s of own work a step, {median}",
        f"{place} no longer slow: 0.12 s of own work a step, {median}",
    ]


@pytest.mark.parametrize(("is_slow", "said"), [(True, "have become slow"), (False, "are no longer slow")])
def test_many_at_once_are_one_line(is_slow, said):
    changes = [Change(rank, is_slow, 0.4, "is slow") for rank in range(5)]
    (line,) = lines(changes, where)
    assert line.startswith(f"ranks 0, 1, 2, 3, 4 {said}")
    assert len(lines(changes[:4], where)) == 4
