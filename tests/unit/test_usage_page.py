"""What is kept of what the nodes use, and the table of it."""

import json

from gang_snapshots import a_gang

from metaflow_extensions.torchrun.plugins.torchrun.elements.model import Table
from metaflow_extensions.torchrun.plugins.torchrun.features.usage.keep import KINDS, UsageKeeper
from metaflow_extensions.torchrun.plugins.torchrun.features.usage.on_page import PART
from metaflow_extensions.torchrun.plugins.torchrun.features.usage.told import STEP_S, Used, step_s
from metaflow_extensions.torchrun.plugins.torchrun.gang.messages import Report
from metaflow_extensions.torchrun.plugins.torchrun.gang.wire import to_plain

LIMITS = {"cpus": 96.0, "memory_mib": 2.0**20, "gpus": 8.0, "gpu_memory_mib": 640 * 1024.0}


def told(kept, node, of="container", **values):
    kept.handle(node, Report("usage", 0, 0, to_plain(Used(of, values, LIMITS))), 1.0)


def parts(kept, num_nodes=2):
    return PART.parts(json.loads(json.dumps(kept.record())), a_gang(num_nodes=num_nodes).summary)


def test_the_last_and_the_highest_values_are_kept_and_shown():
    kept = UsageKeeper.of(2)
    for cpus in (2.0, 4.5, 1.2345):
        told(kept, 1, cpus=cpus, memory_mib=cpus * 1024)
    told(kept, 0, cpus=1.5)
    assert kept.record()["nodes"]["1"]["highest"] == {"cpus": 4.5, "memory_mib": 4610}
    table, said = parts(kept)
    assert table.header == ("node", "CPU, cores", "memory, GiB")
    assert table.rows == (
        ("0", "1.5, highest 1.5 of 96", ""),
        ("1", "1.23, highest 4.5 of 96", "1.23, highest 4.5 of 1024"),
    )
    assert "the node's container" in said.text


def test_all_kinds_have_a_column_and_nodes_of_a_large_gang_measure_less_often():
    kept = UsageKeeper.of(1)
    told(kept, 0, "processes", **dict.fromkeys(KINDS, 2048.0))
    table, said = parts(kept, 1)
    assert len(table.header) == len(KINDS), "a gang of one needs no number"
    assert "those of the machine" in said.text
    assert (step_s(1), step_s(50), step_s(1000)) == (STEP_S, STEP_S, 100.0)


def test_of_many_nodes_those_that_use_the_most_memory_are_shown():
    kept = UsageKeeper.of(300)
    for node in range(300):
        told(kept, node, memory_mib=float(node))
    table, said = parts(kept, 300)
    assert isinstance(table, Table)
    assert [row[0] for row in table.rows] == [str(node) for node in range(284, 300)]
    assert "Of 300 nodes, the 16" in said.text


def test_without_values_and_of_older_records_nothing_is_shown():
    assert list(PART.parts(None, a_gang().summary)) == []
    old = {"step_s": 5.0, "nodes": {"0": {"of": "container", "cpus": [1.0]}}}
    assert PART.parts(old, a_gang().summary) == []
