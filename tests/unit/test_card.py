"""The gang's page, as data: what stands on it, and that no text of a worker's can become markup."""

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
from metaflow._vendor import click
from metaflow.datastore import FlowDataStore
from metaflow.plugins.datastores.local_storage import LocalStorage
from unit_helpers import HOSTILE

from metaflow_extensions.torchrun.plugins.torchrun.card import gang_card
from metaflow_extensions.torchrun.plugins.torchrun.card.drawing import code_block, one_line
from metaflow_extensions.torchrun.plugins.torchrun.card.gang_card import GangCard
from metaflow_extensions.torchrun.plugins.torchrun.card.page import SECTIONS, layout, parts
from metaflow_extensions.torchrun.plugins.torchrun.card.part import GangPart
from metaflow_extensions.torchrun.plugins.torchrun.card.style import COLOURS, STYLE
from metaflow_extensions.torchrun.plugins.torchrun.channel.registry import Registry
from metaflow_extensions.torchrun.plugins.torchrun.errors import TorchrunConfigError
from metaflow_extensions.torchrun.plugins.torchrun.executor import TorchrunExecutor
from metaflow_extensions.torchrun.plugins.torchrun.gang.history import Record
from metaflow_extensions.torchrun.plugins.torchrun.records.summary import summarize
from metaflow_extensions.torchrun.plugins.torchrun.views.story import Story

MARKUP = (
    "</pre></div><script>window.hit = 1</script>\n\n# a title\n\n[x](javascript:window.hit=1) "
    "<img src=x onerror=window.hit=1>\r\n\x1b[31m\0"
)
HERE = {"launch": 0, "generation": 0}


def content_of(page):
    """Return what a page is made of, as text."""
    return base64.b64decode(re.search(r'__MF_DATA__\["[^"]*"\] = "([A-Za-z0-9+/=]*)"', page)[1]).decode()


def a_gang(num_nodes=2, nproc=2, host="host", **more):
    """Return what is stored of a gang whose workers run."""
    nodes = range(num_nodes)
    records = [Record("joined", 0.5, 1000.5, node=node, text=f"{host}-{node}") for node in nodes]
    records += [Record("ready", 1.0, 1001.0, node=node, launch=0) for node in nodes]
    records += [Record("go", 1.5, 1001.5, **HERE)]
    records += [Record("output", 2.0, 1002.0, node=node, **HERE) for node in nodes]
    return {
        "num_nodes": num_nodes,
        "nproc_per_node": nproc,
        "events": [record.as_dict() for record in records],
        "task": "Flow/1/train/2",
        **more,
    }


def failed(content, rank, text, /, **cause):
    """Let a rank of the gang fail."""
    node = rank // content["nproc_per_node"]
    facts = {"node": node, "rank": rank, "exit_code": 1, **HERE}
    records = [
        Record("exited", 5.0, 1005.0, **facts),
        Record("stopped", 5.0, 1005.0, node=node, **HERE),
        Record("cause", 5.0, 1005.0, text=text, **facts),
        Record("failed", 5.0, 1005.0, text=text, **HERE),
    ]
    told = {
        "kind": "exception",
        "node": node,
        "host": "h",
        "rank": rank,
        "exit_code": 1,
        "exception": text,
        "detail": text,
    }
    content["events"] += [record.as_dict() for record in records]
    return {**content, "cause": {**told, **cause}}


class Reader(HTMLParser):
    """Collects the tags and the text of a page's part."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.open, self.words = [], [], []
        self.feed(html)
        self.close()
        assert self.open == [], "a tag is not closed"

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    def count(self, name):
        return sum(name in attrs.get("class", "").split() for _, attrs in self.tags)

    @property
    def text(self):
        return " ".join(self.words)


def read(content):
    """Return the parts of the page, those of HTML as `Reader`."""
    found = {}
    for part in parts(content):
        json.dumps(part)
        if part["type"] == "markdown":
            assert part["source"].startswith("<div ")
            assert not {"\n", "\r"} & set(part["source"]), "Markdown would see where a line ends"
        found[part["id"]] = Reader(part["source"]) if part["type"] == "markdown" else part
    return found


@pytest.mark.parametrize("text", [*HOSTILE, MARKUP, "\ud800"])
def test_a_text_stays_a_text(text):
    reader = Reader(one_line(text))
    assert reader.tags == []
    assert "".join(reader.words) == text.translate({0x1B: "\ufffd", 0: "\ufffd"})
    assert [tag for tag, _ in Reader(code_block(text, text)).tags] == ["div", "pre"]


def test_no_name_or_traceback_becomes_markup():
    known = {"command": MARKUP, "facts": {"torch": MARKUP}, "reports": restarted(1, MARKUP, MARKUP)["reports"]}
    content = failed(a_gang(host=MARKUP, **known), 1, MARKUP, host=MARKUP)
    page = read(content)
    allowed = {"div", "span", "p", "b", "dl", "dt", "dd", "pre", "ul", "li", "small", "details", "summary"}
    for part in page.values():
        if isinstance(part, Reader):
            assert {tag for tag, _ in part.tags} <= allowed
            assert all(set(attrs) <= {"class", "title"} for _, attrs in part.tags)
    rows = page["gang-nodes"]["data"]
    assert all(isinstance(cell, str) for row in rows for cell in row), "Metaflow shows a string in a table as text"


def test_a_failure_comes_first_with_its_place_and_traceback():
    content = failed(
        a_gang(), 3, "Rank 3 on node 1 (host h) failed with ValueError: no", detail="Traceback: here\n  there"
    )
    first = layout(content)["contents"][0]
    assert first["id"] == "gang-outcome"
    text = Reader(first["source"]).text
    assert "failed Failed after 5 s: Rank 3 on node 1 (host h) failed with ValueError: no." in text
    assert "rank 3, node 1 on host h" in text
    assert "Traceback: here\n  there" in text


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        (
            {"kind": "hang", "rank": None, "detail": "Rank 0 was at f"},
            ["the launch as a whole", "Where the ranks were"],
        ),
        ({"kind": "exit", "detail": "bye"}, ["rank 1, node 0 on host h", "Last lines of its stderr", "bye"]),
        ({"kind": "lost", "rank": None, "exit_code": None}, ["node 0 on host h"]),
    ],
)
def test_each_kind_of_cause_is_told_in_its_way(cause, words):
    text = read(failed(a_gang(), 1, "no", **cause))["gang-outcome"].text
    assert [word for word in words if word not in text] == []
    assert ("exit code" in text) == (cause.get("exit_code", 1) is not None)


def test_an_error_without_a_cause_is_told_whole():
    content = {
        **failed(a_gang(), 1, "The nodes differ"),
        "cause": None,
        "error": "The nodes differ\nin the torch version",
    }
    assert "The nodes differ\nin the torch version" in read(content)["gang-outcome"].text


def restarted(times, text="", detail="Traceback: here"):
    """Return a gang that has started again so often."""
    cause = {
        "kind": "exception",
        "node": 1,
        "host": "h",
        "rank": 3,
        "exit_code": 1,
        "exception": text,
        "detail": detail,
    }
    reports = [
        {"at_s": 60.0 * number, "error": None, "text": f"Rank 3 failed with {number}{text}.\n  | x", "cause": cause}
        for number in range(1, times + 1)
    ]
    fatal = {"at_s": 900.0, "error": "WorkerFailed", "text": "the end", "cause": cause}
    return {**a_gang(), "reports": [*reports, fatal]}


def test_restarts_are_told_with_their_tracebacks_the_newest_first():
    found = read(restarted(2))["gang-restarts"]
    assert found.count("tr-restart") == 2
    first, second = found.text.index("After 2 min 0 s: Rank 3 failed with 2."), found.text.index("After 1 min 0 s:")
    assert first < second
    assert "rank 3, node 1 on host h" in found.text
    assert found.text.count("Traceback: here") == 2
    assert read(restarted(0))["gang-restarts"].text == ""


def test_of_many_restarts_and_long_tracebacks_the_last_is_shown():
    found = read(restarted(12, detail="a" * 9000 + "the error itself"))["gang-restarts"]
    assert found.count("tr-restart") == 5
    assert "The causes of 7 earlier restarts are not shown here." in found.text
    assert found.text.count("the error itself") == 5
    assert "3016 characters are left out here" in found.text
    assert len(found.text) < 5 * 7000


def test_a_rank_has_a_cell_with_its_state_in_a_word():
    content = failed(a_gang(), 3, "no")
    content["events"].insert(-1, Record("exited", 5.0, 1005.0, node=0, rank=0, exit_code=-15, **HERE).as_dict())
    cells = read(content)["gang-ranks"]
    assert "rank 0 stopped, SIGTERM node 0, host-0" in cells.text
    assert (cells.count("tr-cell"), cells.count("tr-failed")) == (4, 1)
    assert "rank 3 failed, exit code 1 node 1, host-1" in cells.text


@pytest.mark.parametrize(
    ("num_nodes", "nproc", "cells", "small"),
    [(1, 1, 1, 0), (8, 8, 64, 0), (5, 13, 5, 0), (64, 2, 64, 0), (256, 8, 256, 1)],
)
def test_many_ranks_are_drawn_together(num_nodes, nproc, cells, small):
    page = read(failed(a_gang(num_nodes, nproc), num_nodes * nproc - 1, "no"))
    assert (page["gang-ranks"].count("tr-cell"), page["gang-ranks"].count("tr-small")) == (cells, small)
    assert page["gang-ranks"].count("tr-failed") >= 1
    if num_nodes * nproc > 64:
        last = num_nodes * nproc - 1
        assert f"failed: rank {last} on node {num_nodes - 1}" in page["gang-ranks"].text
    assert len(page["gang-nodes"]["data"]) == (num_nodes if num_nodes <= 64 else 2)


@pytest.mark.parametrize("num_nodes", [1, 2, 256])
def test_the_timeline_fits_on_a_page(num_nodes):
    spec = read(a_gang(num_nodes, now_s=60.0))["gang-times"]["spec"]
    assert spec["width"] == "container"
    assert 20 <= spec["height"]["step"] * num_nodes <= 520
    rows = spec["data"]["values"]
    assert {row["node"] for row in rows} == set(range(num_nodes))
    assert max(row["to"] for row in rows) == 60.0
    assert spec["encoding"]["color"]["scale"]["domain"] == ["missing", "own code", "waiting", "starting", "running"]


def test_every_state_has_a_colour():
    content = failed(a_gang(), 1, "no")
    events = [Record.from_dict(event) for event in content["events"]]
    for end in range(len(events) + 1):
        found = summarize(events[:end], 2, 2)
        assert {rank.state for rank in found.ranks} <= COLOURS.keys()
        assert {span.state for node in found.nodes for span in node.spans} <= COLOURS.keys()
        assert found.outcome in COLOURS
    assert all(f".tr-{state.replace(' ', '-')} " in STYLE for state in COLOURS)


def test_what_can_change_has_a_place_on_the_first_page():
    def ids(component):
        own = [component["id"]] if "id" in component else []
        return [*own, *(name for each in component.get("contents", []) for name in ids(each))]

    content = a_gang()
    assert ids(layout(content)) == [part["id"] for part in parts(content)]


def test_a_users_card_gets_the_parts_that_it_names_in_our_order_and_their_style():
    shown = GangPart(("timeline", "outcome"), a_gang)
    shown.component_id = "mine"
    found = shown.render()
    json.dumps(found)
    assert (found["type"], found["id"]) == ("section", "mine")
    style, outcome, restarts, timeline = found["contents"]
    assert style["source"].startswith("<style>")
    assert ":root" not in style["source"], "it would change the rest of the user's card"
    assert ".tr-running" in style["source"]
    assert (outcome["id"], restarts["id"], timeline["title"]) == ("gang-outcome", "gang-restarts", "Timeline")
    everything = GangPart((), a_gang).render()["contents"][1:]
    assert everything == layout(a_gang())["contents"]


def test_every_part_is_told_where_people_look():
    page = (Path(__file__).parents[2] / "docs" / "card.md").read_text(encoding="utf-8")
    for name in SECTIONS:
        assert f'`"{name}"`' in page
        assert f'``"{name}"``' in TorchrunExecutor.card.__doc__


def test_a_part_that_shows_nothing_says_why():
    part = GangPart(("outcome",), lambda: {"events": "no list"})
    assert "Render failed of component named `GangPart`" in part.render()["data"]


def test_an_unknown_part_is_refused_where_it_is_asked_for():
    with pytest.raises(
        TorchrunConfigError, match=r"knows no part 'rank'\. The parts are 'outcome', 'progress', 'ranks'"
    ):
        GangPart(("rank",), a_gang)


def test_tasks_are_links_where_the_ui_is_known():
    tasks = ["1/train/2", "1/train/3"]
    (_, task), (_, other) = [(row[0], row[-1]) for row in read(a_gang(tasks=tasks))["gang-nodes"]["data"]]
    assert (task, other) == ("Flow/1/train/2", "Flow/1/train/3")
    linked = read(a_gang(tasks=tasks, ui_url="https://ui/"))["gang-nodes"]["data"][1][-1]
    assert linked == {"type": "markdown", "source": "[Flow/1/train/3](https://ui/Flow/1/train/3)"}


def test_it_says_how_many_records_are_left_out():
    content = a_gang()
    assert "left out" not in read(content)["gang-facts"].text
    gap = Record("omitted", 3.0, 1003.0, text="12 records are left out here")
    content["events"].append(gap.as_dict())
    assert "12 records are left out here" in read(content)["gang-facts"].text


def test_a_nodes_state_is_told_in_the_words_of_torchrun_show():
    content = failed(a_gang(), 3, "ValueError: x")
    ends = [("left", 1, "its step has failed"), ("finished", 0, ""), ("left", 0, "")]
    records = [Record(kind, 6.0, 1006.0, node=node, text=text).as_dict() for kind, node, text in ends]
    content["events"] = [*content["events"], *records]
    told = [row[2] for row in read(content)["gang-nodes"]["data"]]
    assert told == [Story(content).state_of(node) for node in (0, 1)] == ["finished", "failed"]


def test_a_task_without_records_says_so():
    assert "There are no records of a gang" in layout({"task": "Flow/1/train/5"})["contents"][0]["source"]
    assert parts({"task": "Flow/1/train/5"}) == []


def a_flow(**steps):
    """Return what Metaflow has of a flow: by step the names of its decorators, and whether it is entered in parallel."""
    found = {"start": {"type": "split-parallel", "next": list(steps), "decorators": []}}
    return {**found, **{name: {"decorators": [{"name": each} for each in names]} for name, names in steps.items()}}


@pytest.mark.parametrize(
    ("graph", "step", "said"),
    [
        (a_flow(train=["card", "torchrun"]), "start", "Step start is no gang: it has no @torchrun"),
        (a_flow(train=["card", "torchrun"]), "start", "The gang of this run is that of Flow/1/train."),
        (a_flow(tune=["torchrun"], train=["torchrun"]), "end", "of this run are: Flow/1/train, Flow/1/tune."),
        (a_flow(train=["card", "torchrun"]), "train", "There are no records of a gang with this task"),
        (a_flow(train=["card"]), "start", "There are no records of a gang with this task"),
        (None, "start", "There are no records of a gang with this task"),
    ],
)
def test_a_page_of_a_step_without_a_gang_says_so_and_where_the_gang_is(graph, step, said, monkeypatch):
    monkeypatch.setattr(gang_card, "_stored", lambda task: {})
    task = SimpleNamespace(pathspec=f"Flow/1/{step}/5")
    assert said in content_of(GangCard(graph=graph).render(task))


def test_metaflow_knows_the_card():
    from metaflow.plugins import CARDS

    assert GangCard in CARDS


@pytest.mark.parametrize("is_known", [True, False])
def test_what_is_stored_is_found_without_metadata_of_the_task_which_a_killed_pod_may_leave_none_of(
    is_known, tmp_path, monkeypatch
):
    monkeypatch.setattr(LocalStorage, "datastore_root", str(tmp_path))
    datastore = FlowDataStore("Flow", storage_impl=LocalStorage, ds_root=str(tmp_path))
    for attempt in (0, 1):
        datastore.get_task_datastore("1", "train", "2", attempt=attempt, mode="w").init_task()
    stored = failed(a_gang(), 3, "of the second attempt")
    Registry(datastore, "1", "train", "2", 1).save_events(stored, 5.0)
    datastore._storage_impl.datastore_root = str(tmp_path / "mf.cards")  # as Metaflow's commands for cards set it
    facts = {"ds-type": "local", "ds-root": str(tmp_path)} if is_known else {}
    task = SimpleNamespace(pathspec="Flow/1/train/2", metadata_dict=facts)
    other = SimpleNamespace(pathspec="Flow/1/train/3", metadata_dict=facts)
    asked = SimpleNamespace(flow_datastore=None if is_known else datastore)
    with click.Context(click.Command("create"), obj=asked):
        page, of_other = (content_of(GangCard().render(each)) for each in (task, other))
    assert "of the second attempt" in page
    assert "There are no records" in of_other
    assert is_known or "There are no records" in content_of(GangCard().render(task))
