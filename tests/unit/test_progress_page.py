"""How far a launch is, as the gang's card shows it."""

import json
import sys
from dataclasses import replace

import pytest
from gang_snapshots import JOINED, MARKUP, RESTARTED, a_gang, failed, snapshot

from metaflow_extensions.torchrun.plugins.torchrun.elements.model import Bar, Cells, Chart, Facts, Sentence
from metaflow_extensions.torchrun.plugins.torchrun.features.progress import on_page
from metaflow_extensions.torchrun.plugins.torchrun.features.progress.keep import ProgressKeeper
from metaflow_extensions.torchrun.plugins.torchrun.features.progress.lines import parse_line
from metaflow_extensions.torchrun.plugins.torchrun.features.progress.told import Metrics, Pace, Point
from metaflow_extensions.torchrun.plugins.torchrun.gang.keepers import Where
from metaflow_extensions.torchrun.plugins.torchrun.gang.messages import Report
from metaflow_extensions.torchrun.plugins.torchrun.gang.wire import to_plain
from metaflow_extensions.torchrun.plugins.torchrun.show.as_card import layout
from metaflow_extensions.torchrun.plugins.torchrun.show.as_text import lines_of
from metaflow_extensions.torchrun.plugins.torchrun.show.page import Place, page_of


def told_by(*steps, total=None, speed=None, slow=None):
    """Return what is stored of the progress of a launch of 2 x 2; rank 3 is so fast."""
    kept = ProgressKeeper()
    series = {}
    for step, values in steps:
        for key, value in values.items():
            series.setdefault(key, []).append(Point(step, value))
    series = {key: tuple(points) for key, points in series.items()}
    of_0 = Metrics({0: Pace(steps[-1][0], speed), 1: Pace(0, speed)}, series, steps[-1][0], total)
    of_1 = Metrics({2: Pace(0, speed), 3: Pace(0, slow or speed)})
    for now in range(0, 100, 5):
        for node, metrics in enumerate((of_0, of_1)):
            kept.handle(node, Report("progress", 0, 0, to_plain(metrics)), now)
        kept.tick(now, lambda rank: Where(rank // 2, rank, "host"))
    return json.loads(json.dumps(kept.record()))


def page_with(progress, gang=None):
    known = replace(gang or a_gang(), features={"progress": progress})
    return page_of(known, Place("Flow", "1", "train", "2"), {"progress": on_page.PART})


def progress_of(progress, gang=None):
    """Return the bar, the sentences, the facts and the charts over steps of a page."""
    page = page_with(progress, gang)
    json.dumps(layout(page), allow_nan=False)
    (section,) = [each for each in page.sections if each.name == "progress"]

    def of(kind):
        return [part for part in section.parts if isinstance(part, kind)]

    facts = dict(row for part in of(Facts) for row in part.rows if row[1])
    return (
        of(Bar),
        [part.text for part in of(Sentence)],
        facts,
        [chart.spec for chart in of(Chart) if "data" in chart.spec],
    )


def test_where_scripts_tell_nothing_there_is_a_place_for_what_they_may_tell_later():
    assert progress_of({"paces": {"1": {"step": 3}}}) == ([], [], {}, [])
    (how,) = progress_of(None)[1]
    assert how.startswith("No metrics: a script reports them with metaflow_torchrun.report(")
    before = page_with(None, snapshot(JOINED))
    assert {"type": "section", "id": "gang-progress", "contents": []} in layout(before)["contents"]
    assert "Progress" not in lines_of(before)


def test_progress_has_a_bar_the_time_left_speeds_and_a_chart_for_each_key():
    told = told_by((1, {"loss": 3.0, MARKUP: 1.0}), (30, {"loss": None}), total=200.0, speed=2.0)
    bar, _, facts, charts = progress_of(told)
    assert bar == [Bar(15)]
    assert facts == {
        "rank 0": "step 30 of 200 (15 %)",
        "speed": "2 steps/s, 1 min 25 s left",
        "all ranks": "median of 4 ranks: 2 steps/s; slowest: rank 0 (node 0), 2 steps/s",
        "last values": f"loss not finite, {MARKUP} 1",
    }
    assert [chart["data"]["values"] for chart in charts] == [
        [{"step": 1, "value": 3.0}, {"step": 30, "value": None}]
    ], "one value is no line"
    assert charts[0]["title"]["text"] == "loss: not finite"
    assert all(chart["width"] == "container" for chart in charts)


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
    *_, (chart,) = progress_of(told_by(*((step, {"lr": each}) for step, each in enumerate(values))))
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
    told = told_by(*((line.step, line.values) for line in lines))
    *_, (chart,) = progress_of(told)
    assert [row["value"] for row in chart["data"]["values"]] == drawn
    assert all(line.isprintable() or "\ud800" in name for line in lines_of(page_with(told)))


def test_what_is_stored_of_an_older_version_can_be_read_even_if_there_are_numbers_in_it_that_are_none():
    told = told_by((30, {"loss": 1.0}), speed=2.0)
    del told["done"]
    told["rates"]["median"], told["last"]["loss"], told["total"] = float("inf"), float("nan"), TINY
    assert progress_of(told)[0] == [Bar(100)]


def test_steps_that_count_from_0_end_at_the_whole():
    told = told_by((119, {"loss": 1.0}), total=120.0)
    assert progress_of(told)[2]["rank 0"] == "step 119 of 120 (99 %)"
    assert progress_of({**told, "done": 120})[2]["rank 0"] == "120 of 120 steps (100 %)"


def test_stragglers_come_first_while_the_gang_runs_and_are_remembered_after_its_end():
    told = told_by((30, {}), speed=2.0, slow=0.5)
    _, (slow,), *_ = progress_of(told, a_gang(host="<b>h"))
    assert slow == "rank 3 (node 1, host <b>h-1) is slow: 0.5 steps/s, the median is 2 steps/s"
    _, slow, of_failed, _ = progress_of({**told, "left_s": 5.0}, failed(a_gang(), 1, "no"))
    assert slow == ["rank 3 (node 1, host host-1) was slow: 0.5 steps/s, the median was 2 steps/s"]
    assert of_failed["speed"] == "2 steps/s"


def test_what_an_earlier_launch_has_reported_is_not_taken_for_the_running_ones():
    told = {**told_by((30, {"loss": 3.0}), speed=2.0, slow=0.5), "launch": 4}
    _, said, facts, _ = progress_of(told, a_gang())
    assert said == ["Launch 0 has reported nothing so far. This is what launch 4 reported."]
    assert facts["rank 0"].startswith("step 30")
    assert {cell.mark for cell in cells_of(told, a_gang())} == {""}


def cells_of(progress, gang):
    parts = [part for section in page_with(progress, gang).sections for part in section.parts]
    return next(part.cells for part in parts if isinstance(part, Cells))


def test_a_slow_rank_is_marked_among_the_cells_but_not_while_workers_start_again():
    told = told_by((30, {}), speed=2.0, slow=0.5)
    for gang in (a_gang(), failed(a_gang(), 1, "no")):
        assert [cell.mark for cell in cells_of(told, gang)] == ["", "", "", "slow: 0.5 steps/s"]
    again = snapshot([each for each in RESTARTED if each[0] < 10])
    assert again.summary.outcome == "restarting"
    assert {cell.mark for cell in cells_of(told, again)} == {""}
    assert cells_of(told, a_gang(9, 8))[0].mark == "rank 3 slow: 0.5 steps/s"
    assert "tr-odd" in json.dumps(layout(page_with(told)))


def test_the_speed_over_time_is_a_chart_with_the_restarts_of_the_gang():
    told = told_by((30, {}), speed=2.0)
    restarted = snapshot(RESTARTED, features={"progress": told})
    (section,) = [each for each in page_with(told, restarted).sections if each.name == "progress"]
    (chart,) = [part.spec for part in section.parts if isinstance(part, Chart)]
    line, marks = chart["layer"]
    assert {row["value"] for row in line["data"]["values"]} == {2.0}
    assert marks["data"]["values"] == [{"at": 9.0, "what": "restart"}]
    del told["speeds"]  # as older versions have stored it
    (section,) = [each for each in page_with(told).sections if each.name == "progress"]
    assert not [part for part in section.parts if isinstance(part, Chart)]
