"""What is known of a gang: it is stored and read again, and bounded however long the gang lives."""

import json
import re
from dataclasses import replace

import pytest
from gang_views import BEGAN, Story, crash, hostile
from test_pages import STORIES

from metaflow_extensions.torchrun.plugins.torchrun.gang.view import VERSION, GangView, Word, told_by_others
from metaflow_extensions.torchrun.plugins.torchrun.gang.wire import to_plain
from metaflow_extensions.torchrun.plugins.torchrun.show.words import timeline


@pytest.mark.parametrize("story", [*STORIES.values(), hostile], ids=[*STORIES, "hostile"])
def test_what_is_stored_is_read_again_equal(story):
    view = story().state.view
    again = GangView.read(json.loads(json.dumps(to_plain(view), allow_nan=False)))
    assert again == replace(view, progress=again.progress)
    assert to_plain(again) == to_plain(view)


def test_numbers_that_json_does_not_have_are_stored_as_null():
    view = Story().running().report("usage", 0, of="container", limits={}, values={"cpus": float("nan")}).state.view
    stored = json.loads(json.dumps(to_plain(view), allow_nan=False))
    assert GangView.read(stored).usage[0]["last"] == {"cpus": None}


@pytest.mark.parametrize(
    ("stored", "why"),
    [
        ({}, "of another version of metaflow-torchrun: None"),
        ({"version": VERSION + 1, "nproc": 2}, f"of another version of metaflow-torchrun: {VERSION + 1}"),
        ({"version": VERSION, "weather": "fine"}, "the view of the gang does not fit: KeyError: 'weather'"),
        ({"version": VERSION, "events": ["torn"]}, "the view of the gang does not fit: AttributeError"),
    ],
)
def test_what_is_of_another_version_or_damaged_is_refused(stored, why):
    with pytest.raises(ValueError, match=re.escape(why)):
        GangView.read(stored)


# --- bounds -----------------------------------------------------------------------------------------


def test_all_that_grows_with_launches_is_bounded():
    story = Story(1, 1).joined()
    for launch in range(220):
        text = f"KeyError: {launch}"
        story.ready(launch=launch).at(story.now + 1).report("started").at(story.now + 1).crashed(crash(0, text, 0))
    view = story.view
    assert (len(view.nodes[0].since), len(view.placed), len(view.reports)) == (60, 200, 20)
    assert [re.findall(r"KeyError: (\d+)", each.text)[0] for each in view.reports] == [*map(str, range(200, 220))]
    assert [each.since - BEGAN - view.now_s for each in view.placed[-2:]] == [-3.0, 10.0], "a late line may still come"
    assert len(json.dumps(to_plain(view))) < 300_000


def test_of_thousands_of_launches_the_places_of_the_last_outputs_are_kept():
    view = GangView()
    for launch in range(2600):
        for node in (0, 1):
            view.take_outputs(launch, node, {"key": "k"})
    assert list(view.outputs) == [*range(600, 2600)]


def test_an_end_that_the_control_node_has_recorded_stays_and_others_only_add_to_it():
    view = Story().running().ended().done().left().view
    known = told_by_others(view, [Word("größe 🙂*\nmore", BEGAN + 5, 2)])
    assert replace(known, events=view.events) == view
    assert [(each.kind, each.text) for each in known.events[len(view.events) :]] == [("told", "größe 🙂*; more")]


def test_a_report_that_can_not_be_read_costs_nothing_else_and_a_line_says_so_once():
    story = Story().running()
    story.report("progress", 0, 1, paces="torn").report("usage").progress({0: 1.0}, [(3, {})])
    why = "ValueError: progress does not fit: AttributeError: 'str' object has no attribute 'items'"
    assert (story.notes(0), story.notes(1)) == ([f"warning: node 0's progress is not kept: {why}"], [])
    assert (story.view.outcome, story.view.progress["step"]) == ("running", 3)


def test_a_spare_waits_while_the_others_start_again():
    story = Story(3, spare_nodes=1).running(policy={"max_restarts": 1}).failed(crash()).ended(codes=(-15, -9))
    assert [node.state for node in story.view.nodes] == ["starting", "starting", "waiting"]


def test_a_cause_is_dated_by_when_it_happened_and_told_once():
    story = Story().running().at(8).lost(1).at(9).ended(0, codes=(-15, -15))
    assert [event.at_s for event in story.view.events if event.kind == "cause"] == [8.0]
    rows = [text.partition(":")[0] for _, _, text in timeline(story.view)]
    assert rows[-6:-3] == ["cause", "node 1", "all nodes are told to stop"]
