"""How far a launch is, as the gang's card shows it."""

import json
import sys

import pytest
from test_card import MARKUP, Reader, a_gang, failed

from metaflow_extensions.torchrun.plugins.torchrun.card.page import layout, parts
from metaflow_extensions.torchrun.plugins.torchrun.card.part import GangPart
from metaflow_extensions.torchrun.plugins.torchrun.card.progress import components as progress_components
from metaflow_extensions.torchrun.plugins.torchrun.features.progress.kept import Progress
from metaflow_extensions.torchrun.plugins.torchrun.features.progress.lines import parse_line
from metaflow_extensions.torchrun.plugins.torchrun.features.progress.told import Metrics, Pace, Point
from metaflow_extensions.torchrun.plugins.torchrun.gang.keepers import Where
from metaflow_extensions.torchrun.plugins.torchrun.records.summary import summarize


def told_by(*steps, total=None, speed=None, slow=None):
    """Return what is stored of the progress of a launch of 2 x 2; rank 3 is so fast."""
    progress = Progress(0)
    points = tuple(Point(step, values) for step, values in steps)
    for now in range(0, 100, 5):
        paces = {0: Pace(steps[-1][0], speed), 1: Pace(0, speed)}
        progress.take(0, Metrics(paces, points, total), now)
        progress.take(1, Metrics({2: Pace(0, speed), 3: Pace(0, slow or speed)}), now)
        progress.look(now, lambda rank: Where(rank // 2, rank, "host"))
    return json.loads(json.dumps(progress.as_dict()))


def progress_of(**content):
    """Return the section of progress, its text and its charts."""
    (section,) = [part for part in parts(a_gang(**content)) if part["id"] == "gang-progress"]
    json.dumps(section, allow_nan=False)
    found = section["contents"]
    text = " ".join(Reader(part["source"]).text for part in found if part["type"] == "markdown")
    charts = [chart for part in found if part["type"] == "section" for chart in part["contents"]]
    return section, text, charts


def test_where_scripts_tell_nothing_the_place_of_their_progress_is_empty():
    section, text, charts = progress_of()
    assert (section["contents"], text, charts) == ([], "", [])
    assert "title" not in section


def test_progress_has_a_bar_the_time_left_speeds_and_a_chart_for_each_key():
    told = told_by((1, {"loss": 3.0, MARKUP: 1.0}), (30, {"loss": None}), total=200.0, speed=2.0)
    section, text, charts = progress_of(progress=told)
    assert section["title"] == "Progress"
    bar = dict(Reader(section["contents"][0]["source"]).tags)["progress"]
    assert (bar["value"], bar["max"]) == ("15", "100")
    assert "step 30 of 200 (15 %)" in text
    assert "2 steps/s, 1 min 25 s left" in text
    assert "median of 4 ranks: 2 steps/s; slowest: rank 0 (node 0), 2 steps/s" in text
    assert [chart["spec"]["data"]["values"] for chart in charts] == [
        [{"step": 1, "value": 3.0}, {"step": 30, "value": None}],
        [{"step": 1, "value": 1.0}],
    ]
    assert charts[0]["spec"]["title"]["text"] == "loss: not finite"
    assert all(chart["spec"]["width"] == "container" for chart in charts)


@pytest.mark.parametrize(
    ("values", "scale"),
    [
        ([0.5, 0.25], {"zero": False}),
        ([0.5, 0.5], {"domain": [0.25, 0.75]}),
        ([-2.0, None], {"domain": [-3.0, -1.0]}),
        ([0.0, 0.0], {"zero": False}),
        ([None, None], {"zero": False}),
    ],
)
def test_a_value_that_never_changes_has_an_axis_around_it(values, scale):
    told = Progress()
    told.take(0, Metrics({0: Pace(2)}, tuple(Point(step, {"lr": each}) for step, each in enumerate(values))), 0.0)
    chart = progress_components(summarize([], 1, 1), told.as_dict())[1]["contents"][0]
    assert chart["spec"]["encoding"]["y"]["scale"] == scale


MAX, TINY = sys.float_info.max, 5e-324


@pytest.mark.parametrize(
    ("values", "drawn"),
    [
        ([MAX, 2.5, 2.25], [None, 2.5, 2.25]),  # "best so far", before there is any
        ([-MAX, MAX], [None, None]),
        ([MAX], [None]),
        ([float("inf"), float("-inf"), float("nan"), 10**400, 1.0], [None, None, None, None, 1.0]),
        ([TINY], [0.0]),
        ([0.0, TINY], [0.0, 0.0]),
        ([1e300, -1e300], [1e300, -1e300]),
        ([1e-300], [1e-300]),
        ([10**300], [1e300]),
    ],
)
@pytest.mark.parametrize("name", ["", "🙂", "</script><script>window.hit = 1</script>", "\ud800", "ste\u0000p\n"])
def test_no_value_and_no_name_of_one_makes_a_page_that_no_browser_can_read(values, drawn, name):
    progress = Progress(0)
    lines = [parse_line(json.dumps({"step": step, name: each}).encode()) for step, each in enumerate(values)]
    points = tuple(Point(line.step, line.values) for line in lines)
    progress.take(0, Metrics({0: Pace(len(values), 1.0)}, points), 0.0)
    content = {**a_gang(), "progress": progress.as_dict()}
    _, _, (chart,) = progress_of(progress=content["progress"])
    assert [row["value"] for row in chart["spec"]["data"]["values"]] == drawn
    for page in (layout(content), parts(content), GangPart((), lambda: content).render()):
        json.dumps(page, allow_nan=False)


def test_what_is_stored_of_an_older_version_can_be_read_even_if_there_are_numbers_in_it_that_are_none():
    told = told_by((30, {"loss": 1.0}), speed=2.0)
    told["rates"]["median"], told["last"]["loss"], told["total"] = float("inf"), float("nan"), TINY
    content = a_gang(progress=told)
    for page in (layout(content), parts(content)):
        json.dumps(page, allow_nan=False)


def test_without_a_total_there_is_no_bar():
    section, text, _ = progress_of(progress=told_by((30, {"loss": 1.0}), speed=2.0))
    assert "<progress" not in section["contents"][0]["source"]
    assert "step 30" in text


def test_stragglers_come_first_while_the_gang_runs():
    told = told_by((30, {}), speed=2.0, slow=0.5)
    _, text, _ = progress_of(progress=told, host="<b>h")
    assert text.startswith("rank 3 (node 1, host <b>h-1) is slow: 0.5 steps/s, the median is 2")
    (slow,) = [part for part in parts(failed(a_gang(progress=told), 1, "no")) if part["id"] == "gang-progress"]
    assert "is slow" not in slow["contents"][0]["source"]


def test_a_chart_of_a_long_run_is_small():
    _, _, (chart,) = progress_of(progress=told_by(*((step, {"loss": 1.0}) for step in range(400))))
    values = chart["spec"]["data"]["values"]
    assert len(values) <= 201
    assert (values[0]["step"], values[-1]["step"]) == (0, 399)
