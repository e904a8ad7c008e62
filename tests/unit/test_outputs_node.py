"""Outputs of one launch on one node, and what the control node keeps of them."""

import json
import os
import time

import pytest
from fake_node import ERROR, FakeNode
from gang_snapshots import snapshot
from metaflow_extensions.torchrun.plugins.torchrun.features.outputs.keep import OutputsKeeper
from metaflow_extensions.torchrun.plugins.torchrun.gang.keepers import Keepers
from unit_helpers import MemoryStore, settings_of_run

from metaflow_extensions.torchrun.plugins.torchrun.errors import TorchrunConfigError
from metaflow_extensions.torchrun.plugins.torchrun.features.outputs import on_page
from metaflow_extensions.torchrun.plugins.torchrun.features.outputs.in_task import Outputs
from metaflow_extensions.torchrun.plugins.torchrun.gang.messages import Ended, Report, Store, Stored
from metaflow_extensions.torchrun.plugins.torchrun.launch.services import RunCall, Services


def rows(store, key):
    return [(row["name"], row["older"]) for row in json.loads(store.data[key])["files"]]


@pytest.fixture
def store():
    return MemoryStore()


def services_of(store, number=0, **arguments):
    return Services.of({"outputs": Outputs()}, RunCall(settings_of_run(**arguments), 2, number, store))


@pytest.fixture
def writing(tmp_path, store):
    """Return a function that makes a node, whose workers write a file."""

    def make(number=0, whose="control"):
        work = tmp_path / "work"
        work.mkdir()
        (work / "old.pt").write_text("weights")
        os.utime(work / "old.pt")
        time.sleep(0.02)
        services = services_of(store, number, outputs=["*.pt", "*.json"], outputs_from=whose)
        node = FakeNode(tmp_path, number=number, store=store, services=services, spec={"cwd": str(work)})
        node.agent = node.running()
        time.sleep(0.02)
        (work / "model.pt").write_text("weights")
        return node

    return make


def stored_of(node, error=None):
    """Have the gang ask for what there is; return what is told of the outputs, once they are stored, and *stored*."""
    node.seat.deliver(Store(0, 0, error, None if error is None else 60.0))
    told = None
    while not isinstance(message := node.next_message(), Stored):
        assert isinstance(message, Report)
        told = message.data if message.kind == "outputs" else told
    return told, message


def test_outputs_that_can_not_be_stored_are_a_failure_of_a_launch_that_had_ended_well(writing, store):
    store.fails = True
    node = writing()
    node.all_end_well(node.agent)
    node.expect(Ended)
    told, stored = stored_of(node)
    cause = stored.failures[0].cause
    assert (told, cause.kind, cause.rank) == (None, "store", None)
    assert cause.what.startswith(
        "has ended well, but its outputs (0 of 2 files so far, now 7 bytes of 'model.pt') could"
    )
    node.verdict(ERROR)


def test_what_is_stored_is_not_stored_again_where_another_node_fails(writing):
    node = writing()
    node.all_end_well(node.agent)
    node.expect(Ended)
    told, _ = stored_of(node)
    assert stored_of(node, ERROR)[0] is None
    assert len([text for text in node.texts("note") if "stored outputs" in text]) == 1
    node.verdict(ERROR, features={"outputs": {"nodes": {"0": list(told.values())[:3]}}})


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
    with pytest.raises(TorchrunConfigError, match=why):
        services_of(**{"store": store, **given})


# --- on the control node --------------------------------------------------------------------------

ROW = {"key": "key of a list", "files": 2, "size": 3_000_000, "names": ["a", "b"]}


@pytest.fixture
def keepers():
    return Keepers({"outputs": OutputsKeeper()})


def hear(keepers, node, launch, data):
    keepers.handle(node, Report("outputs", launch, 0, data), 0.0)


def test_where_outputs_are_is_recorded_and_told(keepers):
    hear(keepers, 0, 3, ROW)
    hear(keepers, 1, 3, {**ROW, "files": 1, "size": 5})
    kept = json.loads(json.dumps(keepers.record()["outputs"]))
    assert kept == {"3": {"0": ROW, "1": {**ROW, "files": 1, "size": 5}}}
    (shown,) = on_page.PART.parts(kept, snapshot([]).summary)
    assert shown.rows == (("launch 3", "3 files, 3.0 MB: a, b, a, b"),)
    for node in kept["3"].values():
        node["names"] = node["names"][:1]
    (shown,) = on_page.PART.parts(kept, snapshot([]).summary)
    assert shown.rows == (("launch 3", "3 files, 3.0 MB: a, a, …"),)
    (first,), (second,) = (remarks.happened for remarks in keepers.pop_remarks())
    assert (first.kind, first.node, first.text, second.text) == ("stored", 0, "2 files, 3.0 MB", "1 file, 5 bytes")
    of_control = {"0": ["key of a list", 2, 3_000_000]}
    of_all = {**of_control, "1": ["key of a list", 1, 5]}
    for error in (None, ERROR):
        assert keepers.verdict(3, True, error) == {"outputs": {"nodes": of_all}}
        assert keepers.verdict(3, False, error) == {"outputs": {"nodes": of_control}}
        assert keepers.verdict(4, True, error) == {}
    keepers.begin(3, {}, 0.0)  # a restart
    assert (keepers.verdict(3, True, None), keepers.record()["outputs"]) == ({}, {})


def test_it_is_recorded_whether_any_should_be_stored(keepers, store):
    for given, wanted in (({"outputs": None}, False), ({"outputs": "a"}, True), ({"outputs": None}, True)):
        keepers.begin(0, services_of(store, **given).policies, 0.0)
        assert keepers.record()["wants_outputs"] is wanted


def test_of_thousands_of_launches_the_last_are_kept(keepers):
    for launch in range(2600):
        hear(keepers, 0, launch, ROW)
        hear(keepers, 1, launch, ROW)
    content = keepers.record()
    assert (len(content["outputs"]), content["launches_left_out"]) == (2000, 600)
