"""Which ranks are slow; with a clock that the test holds."""

import pytest

from metaflow_extensions.torchrun.plugins.torchrun.features.progress.lines import Line
from metaflow_extensions.torchrun.plugins.torchrun.features.progress.paces import RankPace
from metaflow_extensions.torchrun.plugins.torchrun.features.progress.stragglers import (
    SLOW_S,
    Change,
    Speeds,
    Stragglers,
    lines,
)
from metaflow_extensions.torchrun.plugins.torchrun.features.progress.told import Pace
from metaflow_extensions.torchrun.plugins.torchrun.gang.keepers import Where


def where(rank):
    return Where(rank // 2, rank, f"h{rank // 2}")


class Ranks:
    """Ranks whose speeds the test sets."""

    def __init__(self, *speeds, by="steps_per_s"):
        self.stragglers, self.now, self.by = Stragglers(), 0.0, by
        self.speeds = dict(enumerate(speeds))

    def go_on(self, seconds, **speeds):
        """Let time go by with a look every 5 s; return what was said, as (second, rank, is slow)."""
        self.speeds |= {int(rank[1:]): speed for rank, speed in speeds.items()}
        said = []
        for _ in range(int(seconds / 5)):
            said += [(self.now, change.rank, change.is_slow) for change in self.judge()]
        return said

    def judge(self):
        self.now += 5
        return self.stragglers.judge(Speeds(self.by, self.speeds), self.now)

    @property
    def slow(self):
        return [each["rank"] for each in self.stragglers.as_list(where)]


def test_a_rank_slower_than_half_the_median_for_a_minute_is_named_once():
    ranks = Ranks(1.0, 1.0, 1.0, 0.4)
    assert ranks.go_on(60) == []
    assert ranks.go_on(600) == [(5 + SLOW_S, 3, True)]
    assert ranks.slow == [3]
    assert ranks.stragglers.as_list(where) == [
        {"rank": 3, "node": 1, "speed": 0.4, "text": "is slow: 0.4 steps/s, the median is 1 steps/s"}
    ]


def test_it_has_recovered_when_it_was_fast_for_a_minute():
    ranks = Ranks(1.0, 1.0, 0.4)
    ranks.go_on(100)
    assert ranks.go_on(50, r2=0.9) == []
    assert ranks.go_on(10, r2=0.4) == [], "that was no minute"
    assert ranks.go_on(100, r2=0.9) == [(160 + 5 + SLOW_S, 2, False)]
    assert ranks.slow == []


@pytest.mark.parametrize("speed", [0.5, 0.6, 5.0])
def test_half_of_the_median_is_no_straggler(speed):
    assert Ranks(1.0, 1.0, speed).go_on(600) == []


def test_a_moment_is_no_minute():
    ranks = Ranks(1.0, 1.0, 1.0)
    for _ in range(10):
        assert ranks.go_on(50, r2=0.1) == []
        assert ranks.go_on(5, r2=1.0) == []


def test_two_ranks_are_not_compared():
    ranks = Ranks(1.0, 0.1)
    assert ranks.go_on(600) == []
    assert ranks.go_on(30, r2=1.0) == []
    del ranks.speeds[2]
    assert ranks.go_on(5) == []
    assert ranks.go_on(60, r2=1.0) == [], "the time before does not count"
    assert ranks.go_on(5) == [(700.0, 1, True)]


def test_a_rank_that_ends_is_no_straggler_any_more():
    ranks = Ranks(1.0, 1.0, 1.0, 0.1)
    ranks.go_on(100)
    del ranks.speeds[3]
    assert ranks.go_on(100) == []
    assert ranks.slow == []


# --- what is compared -----------------------------------------------------------------------------


def test_where_all_ranks_say_their_own_seconds_these_count():
    alike = {rank: Pace(5, 1.0, seconds) for rank, seconds in enumerate([0.1, 0.1, 0.1, 0.5])}
    found = Speeds.of(alike)
    assert (found.by, found.by_rank) == ("seconds", {0: 10.0, 1: 10.0, 2: 10.0, 3: 2.0})
    assert found.as_dict(where)["slowest"] == {"rank": 3, "node": 1, "speed": 2.0}
    some = Speeds.of({**alike, 4: Pace(5, 1.5), 5: Pace(1)})
    assert (some.by, some.by_rank) == ("steps_per_s", {0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0, 4: 1.5})


def test_a_rank_of_which_no_speed_is_known_does_not_change_what_is_compared():
    found = Speeds.of({0: Pace(5, 1.0, 0.1), 1: Pace(5, 1.0, 0.1), 2: Pace(80)})
    assert (found.by, list(found.by_rank)) == ("seconds", [0, 1])


def test_the_time_before_a_rank_stood_still_does_not_count():
    ranks = Ranks(1.0, 1.0, 1.0, 0.1)
    ranks.go_on(50)
    speed = ranks.speeds.pop(3)
    ranks.go_on(50)
    assert ranks.go_on(60, r3=speed) == []
    assert [rank for _, rank, _ in ranks.go_on(5)] == [3]


def test_ranks_that_have_done_fewer_steps_and_wait_are_never_named():
    now, said, stragglers = 0.0, [], Stragglers()
    ranks = {rank: RankPace() for rank in range(4)}
    for at in range(600):
        now = float(at)
        for rank, pace in ranks.items():
            if at < (600 if rank else 80):
                pace.see(Line(at), now)
        if at % 5 == 0:
            paces = {rank: pace.pace(now) for rank, pace in ranks.items()}
            said += stragglers.judge(Speeds.of(paces), now)
    assert said == []


def test_when_something_else_is_compared_the_minute_begins_anew():
    ranks = Ranks(1.0, 1.0, 0.1)
    ranks.go_on(60)
    ranks.by = "seconds"
    assert ranks.go_on(60) == []
    assert len(ranks.go_on(5)) == 1


# --- what is said ---------------------------------------------------------------------------------


def test_a_line_names_rank_and_place_and_speeds():
    ranks = Ranks(1.25, 1.25, 0.4)
    ranks.go_on(60)
    (slow,) = ranks.judge()
    assert lines([slow], where) == ["rank 2 (node 1, host h1) is slow: 0.4 steps/s, the median is 1.2 steps/s"]
    ranks = Ranks(10.0, 10.0, 2.0, by="seconds")
    ranks.go_on(100)
    ranks.go_on(60, r2=8.0)
    (fast,) = ranks.judge()
    said = "is no longer slow: 0.12 s of own work a step, the median is 0.1 s of own work a step"
    assert lines([fast], where) == [f"rank 2 (node 1, host h1) {said}"]


@pytest.mark.parametrize(("is_slow", "said"), [(True, "have become slow"), (False, "are no longer slow")])
def test_many_at_once_are_one_line(is_slow, said):
    changes = [Change(rank, is_slow, 0.4, "is slow") for rank in range(5)]
    (line,) = lines(changes, where)
    assert line.startswith(f"ranks 0, 1, 2, 3, 4 {said}")
    assert len(lines(changes[:4], where)) == 4
