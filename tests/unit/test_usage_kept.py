"""What is kept of what the nodes use, however long a gang lives."""

import json
import sys

import pytest

from metaflow_extensions.torchrun.plugins.torchrun.features.usage.feature import KINDS, Usage
from metaflow_extensions.torchrun.plugins.torchrun.features.usage.meter import STEP_S, Used, step_s
from metaflow_extensions.torchrun.plugins.torchrun.gang.protocol import Told
from metaflow_extensions.torchrun.plugins.torchrun.gang.wire import to_plain


def told(kept, node, at_s, **values):
    kept.handle(node, Told(0, 0, "usage", to_plain(Used("container", values, {"cpus": 8.0}))), at_s)


def test_each_part_of_time_has_what_was_measured_in_it():
    kept = Usage().keeper(2, of_all=True)
    for at_s, cpus in ((1.0, 2.0), (6.0, 4.0), (9.9, 5.0), (21.0, 1.2345)):
        told(kept, 1, at_s, cpus=cpus, memory_mib=cpus * 100)
    told(kept, 0, 2.0, cpus=1.5)
    shared = {"of": "container", "limits": {"cpus": 8.0}}
    # Of two in one part the mean, of a memory the most.
    measured = {"cpus": [2.0, 4.5, None, None, 1.23], "memory_mib": [200, 500, None, None, 123]}
    nodes = {"0": {**shared, "cpus": [1.5]}, "1": {**shared, **measured}}
    assert json.dumps(kept.record()) == json.dumps({"step_s": STEP_S, "nodes": nodes})


def test_the_nodes_of_a_large_gang_are_asked_less_often_and_their_series_begin_coarser():
    assert (step_s(1), step_s(50), step_s(1000)) == (STEP_S, STEP_S, 100.0)
    for of_all in (True, False):
        kept = Usage().keeper(1000, of_all)
        assert kept.record() == {"step_s": 100.0, "nodes": {}}
        for at_s in (1.0, 101.0, 202.0):
            told(kept, 3, at_s, cpus=2.0)
        assert kept.record()["nodes"]["3"]["cpus"] == [2.0, 2.0, 2.0]


def test_all_nodes_have_the_same_parts_of_time():
    kept = Usage().keeper(2, of_all=True)
    for part in range(200):
        told(kept, 0, part * STEP_S, cpus=1.0)
    for part in (100, 101):
        told(kept, 1, part * STEP_S, cpus=3.0)
    data = kept.record()
    assert data["step_s"] == 2 * STEP_S
    assert len(data["nodes"]["0"]["cpus"]) == 100
    assert data["nodes"]["1"]["cpus"] == [None] * 50 + [3.0]


@pytest.mark.parametrize(
    ("num_nodes", "points", "most_stored", "most_held"),
    [(1, 120, 20_000, 30_000), (256, 64, 1_200_000, 4_000_000), (1000, 24, 2_000_000, 10_000_000)],
)
def test_what_is_kept_has_a_bound_in_memory_and_in_the_datastore(num_nodes, points, most_stored, most_held):
    kept = Usage().keeper(num_nodes, of_all=True)
    few = min(num_nodes, 4)
    for node in range(few):
        for part in range(points * 2):
            told(kept, node, part * step_s(num_nodes), **dict.fromkeys(KINDS, 123456.7))
    data = kept.record()
    assert {len(series) for node in data["nodes"].values() for series in (node[kind] for kind in KINDS)} == {points}
    assert len(json.dumps(data)) * num_nodes / few < most_stored
    series = [each for node in kept._nodes.values() for each in node.series.values()]
    held = sum(sys.getsizeof(part) for each in series for part in (each, vars(each), each._xs, each._values))
    assert held * num_nodes / few < most_held
