"""What a task does with its gang, without Metaflow around it: a gang of one, whose channel is real."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
from metaflow import current
from metaflow.datastore import FlowDataStore
from metaflow.metaflow_current import Parallel
from metaflow.plugins.datastores.local_storage import LocalStorage
from unit_helpers import PACKAGE, eventually

from metaflow_extensions.torchrun.plugins.torchrun.channel import join as joining
from metaflow_extensions.torchrun.plugins.torchrun.channel.registry import Registry
from metaflow_extensions.torchrun.plugins.torchrun.channel.relay import Relay
from metaflow_extensions.torchrun.plugins.torchrun.errors import LaunchTimeout, TorchrunPreempted
from metaflow_extensions.torchrun.plugins.torchrun.gang.cause import Cause
from metaflow_extensions.torchrun.plugins.torchrun.gang.launch import Launch
from metaflow_extensions.torchrun.plugins.torchrun.gang.policy import ConnectPolicy
from metaflow_extensions.torchrun.plugins.torchrun.gang.protocol import Lines
from metaflow_extensions.torchrun.plugins.torchrun.records.vanished import has_begun
from metaflow_extensions.torchrun.plugins.torchrun.settings import DEFAULTS, parse_settings
from metaflow_extensions.torchrun.plugins.torchrun.task.report import report
from metaflow_extensions.torchrun.plugins.torchrun.task.starters import STARTED_BY
from metaflow_extensions.torchrun.plugins.torchrun.task.task_gang import TaskGang


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
        gang.name_tasks([])
        members.append(gang.join()[0])
        assert STARTED_BY not in os.environ  # what the step's code starts is no task
        gang.finish()

    gang.run(step)
    assert members[0].is_storing
    gang.leave(None)
    assert not members[0].is_storing


def test_the_steps_timeout_ends_a_step_that_sleeps_on_the_control_node(gang):
    gang._deadline = time.monotonic() + 0.2
    began = time.monotonic()

    def step():
        gang.join()
        time.sleep(50)

    with pytest.raises(LaunchTimeout, match=r"@timeout allows\.\nIt happened outside of"):
        gang.run(step)
    assert time.monotonic() - began < 40


def test_what_has_happened_is_in_the_datastore_when_the_task_has_left(gang, datastore):
    gang.join()
    gang.finish()
    gang.leave(None)
    stored = Registry(datastore, "1", "train", "2", 0).load_snapshot()
    assert (stored.version, stored.num_nodes, stored.nproc_per_node) == (1, 1, None)
    assert [(event.kind, event.node) for event in stored.events] == [("joined", 0), ("finished", 0), ("left", 0)]


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
    with pytest.raises(TorchrunPreempted, match=r"\(pid 1234\) is gone"):
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


WROTE = Cause("exception", 1, "b", 3, 1, 1, "ValueError: 2 * 3", "Traceback:\n  File 'it*s.py'\nValueError: 2 * 3")


@pytest.mark.parametrize("cause", [WROTE, replace(WROTE, kind="exit", exit_code=3, exception=None)])
def test_a_traceback_stands_once_in_the_log_of_a_remote_control_node_that_has_copies_of_all_lines(cause, gang):
    """Where they have not come, the report has it."""
    gang.join()
    gang._is_local = False
    relay, written = Relay(), []
    relay.start(lambda stream, text: written.append(text) or True)
    gang._channel = SimpleNamespace(relay=relay)

    def log():
        told = report(
            Launch(0).error(cause, []), 0, shared=False, known=True, stands_above=partial(gang._stands_above, 0)
        )
        return "".join(written) + told

    try:
        assert log().count("File 'it*s.py'") == 1
        relay.add(1, Lines(stderr="".join(f"[rank 3] {line}\n" for line in cause.detail.splitlines())))
        relay.settle()
        assert log().count("File 'it*s.py'") == 1
        assert "is above." in log()
    finally:
        relay.close()
        gang._channel = None


def test_so_it_does_in_the_own_log_of_a_remote_node(gang):
    member = gang.join()[0]
    gang._is_local = False
    assert gang._stands_above(1, WROTE)
    assert not gang._stands_above(2, WROTE)
    member.shows_output = False  # as with logs="rank0"
    assert not gang._stands_above(1, WROTE)


# Is the first control node's task, until it is killed; argv: where the datastore is, and how many nodes there are.
FIRST = """
import os, sys, time
from metaflow import current
from metaflow.datastore import FlowDataStore
from metaflow.metaflow_current import Parallel
from metaflow.plugins.datastores.local_storage import LocalStorage
from PACKAGE.task.task_gang import TaskGang
from PACKAGE.settings import DEFAULTS, parse_settings
type(current).parallel = Parallel("127.0.0.1", int(sys.argv[2]), 0, None)
datastore = FlowDataStore("GangFlow", storage_impl=LocalStorage, ds_root=sys.argv[1])
member, _ = TaskGang(parse_settings(DEFAULTS, "train"), datastore, "1", "train", "2", 0).join()
member.begin_launch()
from PACKAGE.gang.protocol import Ready
member.send(Ready(0, 1, "digest"))
time.sleep(600)
"""


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_a_remote_task_in_the_place_of_one_that_was_killed_does_not_run_the_step_again(
    num_nodes, monkeypatch, datastore, tmp_path
):
    monkeypatch.setattr(joining, "_POLICY", ConnectPolicy(former_s=0.5))
    monkeypatch.setenv("METAFLOW_RUNTIME_ENVIRONMENT", "kubernetes")
    parallel = Parallel(main_ip="127.0.0.1", num_nodes=num_nodes, node_index=0, control_task_id=None)
    monkeypatch.setattr(type(current), "parallel", parallel, raising=False)
    code = FIRST.replace("PACKAGE", PACKAGE)
    first = subprocess.Popen([sys.executable, "-c", code, str(tmp_path), str(num_nodes)])
    registry = Registry(datastore, "1", "train", "2", 0)
    try:
        eventually(lambda: has_begun(registry.load_snapshot()), "the first task's record", 60.0)
    finally:
        first.kill()
        first.wait()
    before = registry.load_snapshot().events
    second, ran = TaskGang(parse_settings(DEFAULTS, "train"), datastore, "1", "train", "2", 0), []
    with pytest.raises(TorchrunPreempted, match=r"control node's pod .* replaced"):
        second.run(lambda: ran.append(second.join()))
    assert ran == []
    stored = registry.load_snapshot()
    assert stored.events[:-1] == before
    assert stored.events[-1].kind == "lost"
