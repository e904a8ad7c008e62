"""The charts of what the nodes use: what they show, and that they stay small."""

import json

import pytest
from gang_snapshots import a_gang

from metaflow_extensions.torchrun.plugins.torchrun.features.usage.feature import KINDS, Usage
from metaflow_extensions.torchrun.plugins.torchrun.features.usage.meter import Used, step_s
from metaflow_extensions.torchrun.plugins.torchrun.features.usage.page import _PANELS, picked, usage_parts
from metaflow_extensions.torchrun.plugins.torchrun.gang.protocol import Told
from metaflow_extensions.torchrun.plugins.torchrun.gang.wire import to_plain
from metaflow_extensions.torchrun.plugins.torchrun.show.parts.charts import LINES
from metaflow_extensions.torchrun.plugins.torchrun.show.parts.model import Chart, Keys, Sentence
from metaflow_extensions.torchrun.plugins.torchrun.show.style import STYLE

LIMITS = {"cpus": 96.0, "memory_mib": 2.0**20, "gpus": 8.0, "gpu_memory_mib": 640 * 1024.0}


def usage_of(num_nodes, samples, kinds=KINDS, of="container", value=lambda node, part: 1000.0 + node + part):
    kept = Usage().keeper(num_nodes, of_all=True)
    for node in range(num_nodes):
        for part in range(samples):
            used = Used(of, {kind: value(node, part) for kind in kinds}, LIMITS)
            kept.handle(node, Told(0, 0, "usage", to_plain(used)), part * step_s(num_nodes))
    return json.loads(json.dumps(kept.record()))


def charts_of(usage):
    """Return the words, the legend and the charts by their titles' first words."""
    parts = usage_parts(usage, a_gang().summary)
    charts = {part.spec["title"]["text"]: part for part in parts if isinstance(part, Chart)}
    legend = [key for part in parts if isinstance(part, Keys) for key in part.keys]
    return " ".join(part.text for part in parts if isinstance(part, Sentence)), legend, charts


def rows_of(chart):
    """Return the lines of a chart as name -> [(time, value)]."""
    rows = [row for layer in chart.spec["layer"] for row in layer["data"]["values"] if "v" in row]
    return {row["node"]: list(zip(row["t"], row["v"], strict=True)) for row in rows if isinstance(row["t"], list)}


def test_each_of_few_nodes_has_a_line_in_each_chart():
    _, legend, charts = charts_of(usage_of(8, 3, value=lambda node, part: 2048 * (node + 1) + part * 1024))
    assert list(charts) == [
        "CPU of 96 cores",
        "Memory of 1024 GiB",
        "GPU utilisation, %, 8 GPUs a node",
        "GPU memory of 640 GiB, 8 GPUs a node",
        "Network, received, MiB/s",
        "Network, sent, MiB/s",
        "Output, KiB/s",
    ]
    memory = charts["Memory of 1024 GiB"]
    rows = rows_of(memory)
    assert list(rows) == [f"node {node}" for node in range(8)]
    assert rows["node 1"] == [(2.5, 4.0), (7.5, 5.0), (12.5, 6.0)]
    assert memory.said.startswith("Memory of 1024 GiB: node 0 4, node 1 6, node 2 8")
    colours = memory.spec["layer"][0]["encoding"]["color"]["scale"]
    assert (colours["domain"], colours["range"]) == (list(rows), list(LINES))
    assert legend == [(f"node {place}", f"line-{place}") for place in range(8)]
    assert all(f".tr-line-{place} {{ --tr-c: {LINES[place]}; }}" in STYLE for place in range(8))


@pytest.mark.parametrize(
    ("samples", "unit", "last"), [(100, "seconds", 497.5), (240, "minutes", 19.917), (2400, "hours", 3.306)]
)
def test_times_are_told_in_a_unit_that_fits(samples, unit, last):
    _, _, charts = charts_of(usage_of(1, samples, ("cpus",)))
    (chart,) = charts.values()
    assert chart.spec["encoding"]["x"]["axis"]["title"] == f"{unit} since the start"
    assert rows_of(chart)["node 0"][-1][0] == pytest.approx(last, rel=0.02)


def test_each_kind_that_is_kept_has_its_chart():
    assert {panel.kind for panel in _PANELS} == set(KINDS)


def test_what_is_not_measured_has_no_chart():
    words, _, charts = charts_of(usage_of(2, 3, ("cpus", "output_bytes_s"), of="processes"))
    assert list(charts) == ["CPU of 96 cores", "Output, KiB/s"]
    assert ("processes" in words, "container" in words) == (True, False)
    assert charts_of({"step_s": 5.0, "nodes": {}}) == ("Nothing has been measured.", [], {})


def test_a_late_sample_makes_no_gap_but_a_pause_does():
    values = [1.0, None, 2.0, None, None, None, 3.0]
    usage = {"step_s": 5.0, "nodes": {"0": {"of": "container", "limits": {}, "cpus": [None, *values, *[None] * 4]}}}
    _, _, charts = charts_of(usage)
    assert rows_of(charts["CPU, cores"])["node 0"] == [(7.5, 1.0), (17.5, 2.0), (32.5, None), (37.5, 3.0)]


@pytest.mark.parametrize(("samples", "count"), [(1, 0), (2, 1)])
def test_a_single_measurement_is_a_sentence_and_no_chart_of_one_dot(samples, count):
    for num_nodes in (2, 9):
        words, _, charts = charts_of(usage_of(num_nodes, samples, ("cpus",)))
        assert (len(charts), "CPU of 96 cores: " in words) == (count, count == 0)


def test_of_many_nodes_the_highest_the_median_and_the_lowest_have_a_line_with_their_names():
    def value(node, part):
        return {17: 40.0, 5: 96.0}.get(node, 50.0 + node / 8)

    words, legend, charts = charts_of(usage_of(256, 4, ("gpu_percent",), value=value))
    (chart,) = charts.values()
    rows = rows_of(chart)
    assert list(rows) == ["highest: node 5", "median: node 128", "lowest: node 17"]
    assert rows["lowest: node 17"] == [(12.8, 40.0), (38.4, 40.0), (64.0, 40.0), (89.6, 40.0)]
    assert ("each chart shows three" in words, legend) == (True, [])
    colour = chart.spec["layer"][0]["encoding"]["color"]
    assert (colour["scale"]["domain"], colour["legend"]["orient"]) == (list(rows), "bottom")


@pytest.mark.parametrize(
    ("values", "names"),
    [({7: [1.0]}, {7: "lowest: node 7"}), ({7: [1.0], 8: [None, 2.0]}, {8: "highest: node 8", 7: "lowest: node 7"})],
)
def test_a_node_has_one_line_where_fewer_than_three_measure_something(values, names):
    assert picked(values) == names


@pytest.mark.parametrize(("num_nodes", "most_bytes"), [(8, 160_000), (1000, 60_000)])
def test_the_charts_have_a_bounded_size(num_nodes, most_bytes):
    few = min(num_nodes, 16)
    usage = usage_of(few, 500, value=lambda node, part: 123456.7 + node * part)
    usage["nodes"] = {str(node): usage["nodes"][str(node % few)] for node in range(num_nodes)}
    _, _, charts = charts_of(usage)
    assert len(json.dumps([chart.spec for chart in charts.values()], allow_nan=False)) < most_bytes


def test_of_an_old_run_there_is_nothing():
    assert Usage().parts(None, None) == ()
