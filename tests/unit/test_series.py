"""A series keeps a bounded number of points, however long it goes on."""

from itertools import pairwise

import pytest

from metaflow_extensions.torchrun.plugins.torchrun.gang.progress import Series


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
