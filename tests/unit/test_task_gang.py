"""What a task does with its gang, without Metaflow around it; the channel is real."""

import os
import signal
import sys
from types import SimpleNamespace

import pytest
from fake_cards import cards_of_task
from limits import limit_s
from metaflow import current
from metaflow.datastore import FlowDataStore
from metaflow.metaflow_current import Parallel
from metaflow.plugins.datastores.local_storage import LocalStorage
from unit_helpers import HANG_S

from metaflow_extensions.torchrun.plugins.torchrun.registry import Registry
from metaflow_extensions.torchrun.plugins.torchrun.settings import DEFAULTS, parse_settings
from metaflow_extensions.torchrun.plugins.torchrun.task import task_gang
from metaflow_extensions.torchrun.plugins.torchrun.task.signs import STARTED_BY

SETTINGS = parse_settings(DEFAULTS, "train")


@pytest.fixture
def datastore(tmp_path):
    return FlowDataStore("GangFlow", storage_impl=LocalStorage, ds_root=str(tmp_path))


@pytest.fixture
def registry(datastore):
    return Registry(datastore, "1", "train", "2", 0)


@pytest.fixture
def control_task(monkeypatch, datastore):
    """Return a function that makes the gang of a control node's task; all leave, and give the signals back."""
    before, made = signal.getsignal(signal.SIGTERM), []

    def control_task(num_nodes=1, runtime="local", node_index=0, control_task_id=None, **more):
        parallel = Parallel("127.0.0.1", num_nodes, node_index, control_task_id)
        monkeypatch.setattr(type(current), "parallel", parallel, raising=False)
        monkeypatch.setenv("METAFLOW_RUNTIME_ENVIRONMENT", runtime)
        made.append(task_gang.TaskGang(SETTINGS, datastore, ("1", "train", "2", 0), **more))
        return made[-1]

    yield control_task
    for gang in made:
        gang.leave(None)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.fixture
def gang(control_task):
    return control_task()


def test_a_task_stays_in_its_gang_until_its_results_are_stored_and_what_has_happened_is(gang, registry, monkeypatch):
    monkeypatch.setenv(STARTED_BY, "run=1")
    members = []

    def step():
        members.append(gang.join()[0])
        assert STARTED_BY not in os.environ  # what the step's code starts is no task
        gang.run_code(bool)

    gang.run(step)
    assert members[0].is_storing
    gang.leave(None)
    assert not members[0].is_storing
    stored = registry.load_view()
    assert (len(stored.nodes), stored.nproc, stored.is_over) == (1, None, True)
    assert [(event.kind, event.nodes) for event in stored.events] == [("joined", [0]), ("finished", [0]), ("left", [0])]


STORING = ("persist", "save_metadata", "done")


def test_a_control_node_leaves_when_all_is_stored_and_takes_along_what_ends_its_task(gang, registry):
    datastore = SimpleNamespace(**dict.fromkeys(STORING, lambda *_: "stored"))
    gang.watch_storing(datastore)
    gang.join()
    gang.run_code(bool)
    try:
        sys.exit("another decorator has had enough")
    except SystemExit:
        datastore.persist()
        assert gang._member.is_storing
        assert datastore.done() == "stored"
    assert registry.load_view().outcome == "failed"
    assert "enough" in registry.load_view().error


def test_the_gangs_card_is_made_in_the_control_nodes_task_alone_also_where_its_metadata_are_local(
    control_task, datastore, monkeypatch, tmp_path
):
    task = cards_of_task(monkeypatch, tmp_path, "torchrun", task="GangFlow/1/train/2")
    datastore.metadata = task.metadata
    gang = control_task(runtime="kubernetes")
    member, _ = gang.join()
    if (child := os.fork()) == 0:  # it goes on with the step's code, and ends with an error
        try:
            gang.leave(SystemExit(0))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert task.stored() == {}
    assert member.link.wait(lambda: len(task.stored()) == 2, limit_s(HANG_S))
