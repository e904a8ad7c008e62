"""Outputs of one launch on one node, and what the control node keeps of them."""

import pytest
from gang_views import Story
from unit_helpers import MemoryStore, settings_of_run

from metaflow_extensions.torchrun.plugins.torchrun.errors import TorchrunConfigError
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


def test_what_a_generation_before_has_stored_is_forgotten(store):
    """A node is lost while it stores; all starts again with a spare."""
    story = Story(3, spare_nodes=1).running(policy={"max_restarts": 1}).ended(codes=(0, 0), stores=True)
    story.report("outputs", 0, key="k0", files=2, size=3_000_000, names=["a", "b"])
    assert story.stored(0).view.outputs
    story = story.lost(1).at(9)
    assert (story.view.generation, story.view.outputs) == (1, {})
