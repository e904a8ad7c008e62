"""Outputs of one launch on one node, and what the control node keeps of them."""

import pytest
from gang_views import Story, crash, place
from unit_helpers import MemoryStore, settings_of_run

from metaflow_extensions.torchrun.plugins.torchrun.errors import TorchrunConfigError
from metaflow_extensions.torchrun.plugins.torchrun.show.page import page_of
from metaflow_extensions.torchrun.plugins.torchrun.show.parts import lines_of
from metaflow_extensions.torchrun.plugins.torchrun.task.launch_outputs import LaunchOutputs


@pytest.fixture
def store():
    return MemoryStore()


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"outputs": ["../model"]}, r"run\(outputs\) has '../model'"),
        ({"outputs": "a", "outputs_from": "rank0"}, r"run\(outputs_from\) is 'rank0'.*'control'.*'all'"),
        ({"outputs": None, "outputs_from": "all"}, "outputs_from='all'.*outputs names none"),
        ({"outputs": "a", "store": None}, "needs a datastore"),
    ],
)
def test_what_can_not_be_asked_for_is_refused(given, why, store):
    store = None if given.pop("store", store) is None else store
    with pytest.raises(TorchrunConfigError, match=why):
        LaunchOutputs.of(settings_of_run(**given), 0, store)


# --- on the control node --------------------------------------------------------------------------

ROWS = {0: {"key": "k0", "files": 2, "size": 3_000_000, "names": ["a", "b"]}}
ROWS[1] = {"key": "k1", "files": 1, "size": 5, "names": []}


def storing(store, failing=(), **rules):
    """Return a gang whose nodes have told where their files are; node 0 has stored all that it has."""
    story = Story(2 + len(rules), **rules).running(policy={"max_restarts": len(rules)})
    story = story.failed(*failing) if failing else story
    story.ended(codes=(-15, -15) if failing else (0, 0), stores=True)
    for node, row in ROWS.items():
        story.report("outputs", node, **row)
    return story.stored(0)


@pytest.mark.parametrize("failing", [(), (crash(),)])
def test_where_outputs_are_is_known_told_and_shown(store, failing):
    story = storing(store, failing).stored(1)
    told = {node: story.got(node, "Verdict")[0].left["outputs"]["nodes"] for node in (0, 1)}
    of_control = {"0": ["k0", 2, 3_000_000]}
    assert told == {0: {**of_control, "1": ["k1", 1, 5]}, 1: of_control}
    assert story.view.outputs == {0: ROWS}
    lines = lines_of(page_of(story.view, place()))
    assert "launch 0  3 files, 3.0 MB: a, b, …" in lines
    stored = ["node 0: stored 2 files, 3.0 MB", "node 1: stored 1 file, 5 bytes"]
    assert [line.split(maxsplit=2)[2] for line in lines if ": stored " in line] == stored


def test_what_a_generation_before_has_stored_is_forgotten(store):
    """A node is lost while it stores; all starts again with a spare."""
    story = storing(store, spare_nodes=1).lost(1).at(9)
    assert (story.view.generation, story.view.outputs) == (1, {})
