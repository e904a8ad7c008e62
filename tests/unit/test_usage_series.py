"""What is kept of what the nodes use, however long a gang lives."""

import json
import math
import sys

import pytest

from metaflow_extensions.torchrun.plugins.torchrun.features.usage.series import (
    KINDS,
    STEP_S,
    Series,
    UsageHistory,
    most_points,
    step_s,
)


def told(history, node, at_s, **values):
    history.note(node, at_s, "container", values, {"cpus": 8.0})


def test_each_part_of_time_has_what_was_measured_in_it():
    history = UsageHistory(2)
    for at_s, cpus in ((1.0, 2.0), (6.0, 4.0), (9.9, 5.0), (21.0, 1.0)):
        told(history, 1, at_s, cpus=cpus, memory_mib=cpus * 100)
    told(history, 0, 2.0, cpus=1.5)
    assert history.as_data() == {
        "step_s": STEP_S,
        "nodes": {
            "0": {"of": "container", "limits": {"cpus": 8.0}, "cpus": [1.5]},
            "1": {
                "of": "container",
                "limits": {"cpus": 8.0},
                "cpus": [2.0, 4.5, None, None, 1.0],  # the mean of two in one part
                "memory_mib": [200, 500, None, None, 100],  # of a memory the most
            },
        },
    }
    json.dumps(history.as_data(), allow_nan=False)


def test_the_nodes_of_a_large_gang_are_asked_less_often_and_their_series_begin_coarser():
    assert (step_s(1), step_s(8), step_s(50), step_s(1000)) == (STEP_S, STEP_S, STEP_S, 100.0)
    history = UsageHistory(1000, step_s(1000))
    assert history.as_data() == {"step_s": 100.0, "nodes": {}}
    for at_s in (1.0, 101.0, 202.0):
        told(history, 3, at_s, cpus=2.0)
    assert history.as_data()["nodes"]["3"]["cpus"] == [2.0, 2.0, 2.0]


def test_a_full_series_gets_coarser_and_keeps_the_whole_life():
    series = Series(4)
    for part in range(32):
        series.note(part * STEP_S + 1, {"cpus": float(part), "memory_mib": float(part)})
    assert series.step_s == 8 * STEP_S
    assert series.as_data()["cpus"] == [3.5, 11.5, 19.5, 27.5]
    assert series.as_data()["memory_mib"] == [7.0, 15.0, 23.0, 31.0]


def test_one_late_part_does_not_count_more_after_a_merge():
    series = Series(4)
    for at_s in (1, 6, 11, 16):
        series.note(at_s, {"cpus": 1.0})
    series.note(22, {"cpus": 4.0})  # now parts are twice as long
    series.note(27, {"cpus": 2.0})
    assert series.as_data()["cpus"] == [1.0, 1.0, 3.0]


def test_a_node_that_comes_late_has_the_same_parts_of_time():
    history = UsageHistory(2)
    for part in range(400):
        told(history, 0, part * STEP_S, cpus=1.0)
    told(history, 1, 100 * STEP_S, cpus=3.0)
    data = history.as_data()
    assert data["step_s"] == 2 * STEP_S
    assert len(data["nodes"]["0"]["cpus"]) == 200
    assert data["nodes"]["1"]["cpus"] == [None] * 50 + [3.0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e300])
def test_what_is_no_number_is_not_kept(value):
    history = UsageHistory(1)
    told(history, 0, 1.0, cpus=value, nonsense=3.0)
    history.note(0, 2.0, "container", {}, {"nonsense": 1.0})
    assert history.as_data()["nodes"] == {"0": {"of": "container", "limits": {}}}


@pytest.mark.parametrize(
    ("num_nodes", "points", "most_stored", "most_held"),
    [
        (1, 240, 20_000, 20_000),
        (8, 240, 150_000, 150_000),
        (256, 64, 1_200_000, 1_200_000),
        (1000, 24, 2_000_000, 2_500_000),
    ],
)
def test_what_is_kept_has_a_bound_in_memory_and_in_the_datastore(num_nodes, points, most_stored, most_held):
    assert most_points(num_nodes) == points
    history = UsageHistory(num_nodes)
    few = min(num_nodes, 8)
    for node in range(few):
        for part in range(points * 2):
            told(history, node, part * STEP_S, **dict.fromkeys(KINDS, 123456.7))
    data = history.as_data()
    assert {len(series) for node in data["nodes"].values() for series in (node[kind] for kind in KINDS)} == {points}
    assert len(json.dumps(data)) * num_nodes / few < most_stored
    held = sum(sys.getsizeof(each) for series in history._nodes.values() for each in series._values.values())
    assert held * num_nodes / few < most_held
