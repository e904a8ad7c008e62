"""The address record; a dict that keeps attempts apart plays Metaflow's datastore."""

import json

import pytest
from gang_views import BEGAN, Story

from metaflow_extensions.torchrun.plugins.torchrun.gang.view import Word
from metaflow_extensions.torchrun.plugins.torchrun.gang.wire import to_plain
from metaflow_extensions.torchrun.plugins.torchrun.registry import AddressRecord, Registry

RECORD = AddressRecord(("10.0.0.7", "fd00::7"), 40123, "secret")


class FlowDatastore:
    """Answers as Metaflow's does to what the registry asks; JSON lies between writing and reading."""

    def __init__(self):
        self.stored, self.questions = {}, 0

    def get_task_datastore(self, run_id, step, task_id, attempt=None, data_metadata=None, mode="r"):
        return TaskDatastore(self, (run_id, step, task_id, attempt), mode)

    def ask(self):
        self.questions += 1


class TaskDatastore:
    def __init__(self, flow, key, mode):
        self.flow, self.key, self.mode = flow, key, mode

    def save_metadata(self, contents):
        assert self.mode == "w"
        self.flow.ask()
        for name, content in contents.items():
            self.flow.stored[(*self.key, name)] = json.dumps(content)

    def load_metadata(self, names):
        self.flow.ask()
        found = {name: self.flow.stored.get((*self.key, name)) for name in names}
        return {name: None if content is None else json.loads(content) for name, content in found.items()}


@pytest.fixture
def flow():
    return FlowDatastore()


def registry_of(flow, run="7", step="train", task="3", attempt=0):
    return Registry(flow, run, step, task, attempt)


@pytest.mark.parametrize("so_far", ["", '{"addresses": ["10.0.', '{"addresses": ["h\u00f6'.encode()[:-1]])
def test_a_record_that_is_half_written_is_none_yet(flow, so_far):
    flow.stored["7", "train", "3", 0, "torchrun_gang.json"] = so_far
    assert registry_of(flow).load(AddressRecord) is None


# --- what others tell of a control node that is gone ----------------------------------------------

KNOWN = Story().running().view


def test_what_a_replacement_tells_counts_before_what_the_job_tells_and_neither_overwrites_anything(flow):
    registry = registry_of(flow)
    registry.save_view(KNOWN)
    registry.save_word(Word("the job's", BEGAN - 100.0, 2), "job")
    found = registry.load_view()
    assert (found.error, found.events[-1].at_s) == ("the job's", 4.0), "no earlier than what went before, by any clock"
    registry.save_word(Word("größe 🙂*\nmore", BEGAN + 11.0, 2), "replacement")
    found = registry_of(flow).load_view()
    assert (found.error, found.since_s, found.events[-1].text) == ("größe 🙂*\nmore", 11.0, "the job's")
    assert json.loads(flow.stored["7", "train", "3", 0, "torchrun_view.json"]) == to_plain(KNOWN)


def test_where_the_control_node_has_stored_nothing_what_others_tell_is_all(flow):
    assert registry_of(flow).load_view() is None
    registry_of(flow).save_word(Word("gone", 1000.0, 3), "job")
    found = registry_of(flow).load_view()
    assert (len(found.nodes), found.error) == (3, "gone")
    flow.stored["7", "train", "3", 0, "torchrun_view.json"] = '{"version": 2, "eve'  # half written
    assert registry_of(flow).load_view() == found
