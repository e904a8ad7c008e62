"""What a task does with its gang, without Metaflow around it: a gang of one, whose channel is real."""

import os
import signal
import threading
from types import SimpleNamespace

import pytest
from metaflow import current
from metaflow.datastore import FlowDataStore
from metaflow.metaflow_current import Parallel
from metaflow.plugins.datastores.local_storage import LocalStorage

from metaflow_extensions.torchrun.plugins.torchrun.border.starters import STARTED_BY
from metaflow_extensions.torchrun.plugins.torchrun.border.task_gang import TaskGang
from metaflow_extensions.torchrun.plugins.torchrun.channel.registry import Registry
from metaflow_extensions.torchrun.plugins.torchrun.errors import TorchrunPreempted
from metaflow_extensions.torchrun.plugins.torchrun.settings import DEFAULTS, parse_settings


@pytest.fixture
def datastore(tmp_path):
    return FlowDataStore("GangFlow", storage_impl=LocalStorage, ds_root=str(tmp_path))


@pytest.fixture
def gang(monkeypatch, datastore):
    """Return the gang of a task that is the only node; its signals are given back in any case."""
    parallel = Parallel(main_ip="127.0.0.1", num_nodes=1, node_index=0, control_task_id=None)
    monkeypatch.setattr(type(current), "parallel", parallel, raising=False)
    monkeypatch.setenv(STARTED_BY, "run=1")
    before = signal.getsignal(signal.SIGTERM)
    gang = TaskGang(parse_settings(DEFAULTS, "train"), datastore, "1", "train", "2", 0)
    yield gang
    gang.leave(None)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_task_stays_in_its_gang_until_its_results_are_stored(gang):
    members = []

    def step():
        members.append(gang.join()[0])
        assert STARTED_BY not in os.environ  # what the step's code starts is no task
        gang.finish()

    gang.run(step)
    assert members[0].is_storing
    gang.leave(None)
    assert not members[0].is_storing


def test_what_has_happened_is_in_the_datastore_when_the_task_has_left(gang, datastore):
    gang.join()
    gang.finish()
    gang.leave(None)
    stored = Registry(datastore, "1", "train", "2", 0).load_events()
    assert (stored["version"], stored["num_nodes"], stored["nproc_per_node"]) == (1, 1, None)
    assert [(event["kind"], event["node"]) for event in stored["events"]] == [
        ("joined", 0),
        ("finished", 0),
        ("left", 0),
    ]


def test_an_error_of_the_step_is_raised_and_leaves_the_gang(gang):
    before, error = signal.getsignal(signal.SIGTERM), ValueError("diverged")

    def step():
        gang.join()
        raise error

    with pytest.raises(ValueError, match="diverged") as caught:
        gang.run(step)
    assert caught.value is error
    assert signal.getsignal(signal.SIGTERM) is before
    gang.fail(error)  # as `task_exception` does then; it is too late for that


STORING = ("persist", "save_metadata", "done")


@pytest.mark.parametrize("name", STORING)
def test_results_that_can_not_be_stored_leave_the_gang_with_that_error(name, gang):
    def refuse(*_):
        raise OSError("no space left")

    datastore = SimpleNamespace(**{**dict.fromkeys(STORING, lambda *_: "stored"), name: refuse})
    gang.watch_storing(datastore)
    member, _ = gang.join()
    gang.finish()
    assert [getattr(datastore, other)({}) for other in STORING if other != name] == ["stored", "stored"]
    assert member.is_storing
    with pytest.raises(OSError, match="no space left"):
        getattr(datastore, name)({})
    assert not member.is_storing


def test_a_run_that_is_gone_ends_its_task_as_a_preemption_and_at_once_before_it_has_joined(gang):
    assert gang._run_is_gone(1234) == 0.0
    gang.join()
    with pytest.raises(TorchrunPreempted, match=r"the process of the run \(pid 1234\) is gone"):
        gang._run_is_gone(1234)


@pytest.mark.parametrize("runtime", ["local", "kubernetes"])
def test_a_remote_control_node_alone_writes_the_other_nodes_lines(runtime, monkeypatch, datastore):
    """On a local run they stand in the same terminal already."""
    parallel = Parallel(main_ip="127.0.0.1", num_nodes=2, node_index=0, control_task_id=None)
    monkeypatch.setattr(type(current), "parallel", parallel, raising=False)
    monkeypatch.setenv("METAFLOW_RUNTIME_ENVIRONMENT", runtime)
    before = {thread.name for thread in threading.enumerate()}
    gang = TaskGang(parse_settings(DEFAULTS, "train"), datastore, "1", "train", "2", 0)
    try:
        gang.join()
        started = {thread.name for thread in threading.enumerate()} - before
        assert ("torchrun-relay" in started) is (runtime == "kubernetes")
    finally:
        gang.leave(None)
    assert "torchrun-relay" not in {thread.name for thread in threading.enumerate()} - before


@pytest.mark.parametrize(
    ("runtime", "metadata", "is_live"), [("local", "local", True), ("pod", "local", False), ("pod", "service", True)]
)
def test_where_metaflow_can_make_no_card_it_is_said_how_to_make_it_later(
    runtime, metadata, is_live, gang, datastore, monkeypatch, capfd
):
    datastore.metadata = SimpleNamespace(TYPE=metadata)
    gang._is_local = runtime == "local"
    shown = SimpleNamespace(refresh=lambda content: None, _card_creator_args={"card_uuid": "of-a-test"})
    current._update_env({"card": {"torchrun": [shown]}})
    try:
        gang.join()
    finally:
        current._update_env({"card": None})
    assert ("torchrun-card" in {thread.name for thread in threading.enumerate()}) is is_live
    assert ("card create 1/train/2 --type torchrun" in capfd.readouterr().err) is not is_live
