"""What is kept of what the nodes use, and the charts of it: what they show, and that both stay small."""

import json

import pytest
from gang_snapshots import a_gang

from metaflow_extensions.torchrun.plugins.torchrun.elements.charts import LINES
from metaflow_extensions.torchrun.plugins.torchrun.elements.model import Chart, Keys, Sentence
from metaflow_extensions.torchrun.plugins.torchrun.features.usage import on_page
from metaflow_extensions.torchrun.plugins.torchrun.features.usage.keep import KINDS, UsageKeeper
from metaflow_extensions.torchrun.plugins.torchrun.features.usage.on_page import picked
from metaflow_extensions.torchrun.plugins.torchrun.features.usage.told import STEP_S, Used, step_s
from metaflow_extensions.torchrun.plugins.torchrun.gang.protocol import Told
from metaflow_extensions.torchrun.plugins.torchrun.gang.wire import to_plain
from metaflow_extensions.torchrun.plugins.torchrun.show.style import STYLE

LIMITS = {"cpus": 96.0, "memory_mib": 2.0**20, "gpus": 8.0, "gpu_memory_mib": 640 * 1024.0}


def told(kept, node, at_s, of="container", **values):
    kept.handle(node, Told(0, 0, "usage", to_plain(Used(of, values, LIMITS))), at_s)


# --- what is kept -----------------------------------------------------------------------------------


def test_each_part_of_time_has_what_was_measured_in_it():
    kept = UsageKeeper.of(2)
    for at_s, cpus in ((1.0, 2.0), (6.0, 4.0), (9.9, 5.0), (21.0, 1.2345)):
        told(kept, 1, at_s, cpus=cpus, memory_mib=cpus * 100)
    told(kept, 0, 2.0, cpus=1.5)
    shared = {"of": "container", "limits": LIMITS}
    # Of two in one part the mean, of a memory the most.
    measured = {"cpus": [2.0, 4.5, None, None, 1.23], "memory_mib": [200, 500, None, None, 123]}
    nodes = {"0": {**shared, "cpus": [1.5]}, "1": {**shared, **measured}}
    assert json.dumps(kept.record()) == json.dumps({"step_s": STEP_S, "nodes": nodes})


def test_the_nodes_of_a_large_gang_are_asked_less_often_and_their_series_begin_coarser():
    assert (step_s(1), step_s(50), step_s(1000)) == (STEP_S, STEP_S, 100.0)
    kept = UsageKeeper.of(1000)
    assert kept.record() == {"step_s": 100.0, "nodes": {}}
    for at_s in (1.0, 101.0, 202.0):
        told(kept, 3, at_s, cpus=2.0)
    assert kept.record()["nodes"]["3"]["cpus"] == [2.0, 2.0, 2.0]


def test_all_nodes_have_the_same_parts_of_time():
    kept = UsageKeeper.of(2)
    for part in range(200):
        told(kept, 0, part * STEP_S, cpus=1.0)
    for part in (100, 101):
        told(kept, 1, part * STEP_S, cpus=3.0)
    data = kept.record()
    assert data["step_s"] == 2 * STEP_S
    assert len(data["nodes"]["0"]["cpus"]) == 100
    assert data["nodes"]["1"]["cpus"] == [None] * 50 + [3.0]


@pytest.mark.parametrize(
    ("num_nodes", "points", "most_bytes"), [(1, 120, 20_000), (256, 64, 1_200_000), (1000, 24, 2_000_000)]
)
def test_what_is_kept_has_a_bound(num_nodes, points, most_bytes):
    data = usage_of(num_nodes, 2 * points, nodes=min(num_nodes, 4), value=lambda node, part: 123456.7)
    assert {len(node[kind]) for node in data["nodes"].values() for kind in KINDS} == {points}
    assert len(json.dumps(data)) * num_nodes / len(data["nodes"]) < most_bytes


# --- the charts -------------------------------------------------------------------------------------


def usage_of(num_nodes, samples, kinds=KINDS, of="container", nodes=None, value=lambda node, part: 1000 + node + part):
    """Return what is kept of so many samples of each node, or of the first `nodes` alone."""
    kept = UsageKeeper.of(num_nodes)
    for node in range(nodes or num_nodes):
        for part in range(samples):
            told(kept, node, part * step_s(num_nodes), of, **{kind: value(node, part) for kind in kinds})
    return json.loads(json.dumps(kept.record()))


def charts_of(usage):
    """Return the words, the legend and the charts by their titles' first words."""
    parts = on_page.PART.parts(usage, a_gang().summary)
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
        "CPU: cores used of 96",
        "Memory: GiB used of 1024",
        "GPU utilisation, %, 8 GPUs a node",
        "GPU memory: GiB used of 640, 8 GPUs a node",
        "Network, received, MiB/s",
        "Network, sent, MiB/s",
        "Output, KiB/s",
    ]
    memory = charts["Memory: GiB used of 1024"]
    rows = rows_of(memory)
    assert list(rows) == [f"node {node}" for node in range(8)]
    assert rows["node 1"] == [(2.5, 4.0), (7.5, 5.0), (12.5, 6.0)]
    assert memory.said.startswith("Memory: GiB used of 1024: node 0 4, node 1 6, node 2 8")
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


def test_what_is_not_measured_has_no_chart():
    words, _, charts = charts_of(usage_of(2, 3, ("cpus", "output_bytes_s"), of="processes"))
    assert list(charts) == ["CPU: cores used of 96", "Output, KiB/s"]
    assert ("processes" in words, "container" in words) == (True, False)
    assert charts_of({"step_s": 5.0, "nodes": {}}) == ("Nothing has been measured.", [], {})
    assert charts_of(None) == ("", [], {}), "an old run has kept nothing"


def test_a_late_sample_makes_no_gap_but_a_pause_does():
    values = [1.0, None, 2.0, None, None, None, 3.0]
    usage = {"step_s": 5.0, "nodes": {"0": {"of": "container", "limits": {}, "cpus": [None, *values, *[None] * 4]}}}
    _, _, charts = charts_of(usage)
    assert rows_of(charts["CPU, cores"])["node 0"] == [(7.5, 1.0), (17.5, 2.0), (32.5, None), (37.5, 3.0)]


@pytest.mark.parametrize("num_nodes", [2, 9])
def test_a_single_measurement_is_a_sentence_and_no_chart_of_one_dot(num_nodes):
    for samples, count in ((1, 0), (2, 1)):
        words, _, charts = charts_of(usage_of(num_nodes, samples, ("cpus",)))
        assert (len(charts), "CPU: cores used of 96: " in words) == (count, count == 0)


def test_of_many_nodes_the_highest_the_median_and_the_lowest_have_a_line_with_their_names():
    values = {17: 40.0, 5: 96.0}
    usage = usage_of(256, 4, ("gpu_percent",), value=lambda node, part: values.get(node, 50.0 + node / 8))
    words, legend, charts = charts_of(usage)
    (chart,) = charts.values()
    rows = rows_of(chart)
    assert list(rows) == ["highest: node 5", "median: node 128", "lowest: node 17"]
    assert rows["lowest: node 17"] == [(12.8, 40.0), (38.4, 40.0), (64.0, 40.0), (89.6, 40.0)]
    assert ("each chart shows three" in words, legend) == (True, [])
    colour = chart.spec["layer"][0]["encoding"]["color"]
    assert (colour["scale"]["domain"], colour["legend"]["orient"]) == (list(rows), "bottom")
    # Where fewer than three measure something, each has one line.
    assert picked({7: [1.0]}) == {7: "lowest: node 7"}
    assert picked({7: [1.0], 8: [None, 2.0]}) == {8: "highest: node 8", 7: "lowest: node 7"}


@pytest.mark.parametrize(("num_nodes", "most_bytes"), [(8, 160_000), (1000, 60_000)])
def test_the_charts_have_a_bounded_size(num_nodes, most_bytes):
    few = min(num_nodes, 16)
    usage = usage_of(few, 500, value=lambda node, part: 123456.7 + node * part)
    usage["nodes"] = {str(node): usage["nodes"][str(node % few)] for node in range(num_nodes)}
    _, _, charts = charts_of(usage)
    assert len(json.dumps([chart.spec for chart in charts.values()], allow_nan=False)) < most_bytes
