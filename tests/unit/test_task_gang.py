"""What a task does with its gang, without Metaflow around it; the channel is real."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
from fake_cards import cards_of_task
from limits import limit_s
from metaflow import current
from metaflow.datastore import FlowDataStore
from metaflow.metaflow_current import Parallel
from metaflow.plugins.datastores.local_storage import LocalStorage
from unit_helpers import HANG_S, PACKAGE, eventually

from metaflow_extensions.torchrun.plugins.torchrun.channel.registry import Registry
from metaflow_extensions.torchrun.plugins.torchrun.errors import LaunchFailed, LaunchTimeout, TorchrunPreempted
from metaflow_extensions.torchrun.plugins.torchrun.gang.cause import Cause
from metaflow_extensions.torchrun.plugins.torchrun.gang.failures import of_launch
from metaflow_extensions.torchrun.plugins.torchrun.gang.launch import Launch
from metaflow_extensions.torchrun.plugins.torchrun.gang.messages import Abort
from metaflow_extensions.torchrun.plugins.torchrun.logs.console import settle
from metaflow_extensions.torchrun.plugins.torchrun.settings import DEFAULTS, parse_settings
from metaflow_extensions.torchrun.plugins.torchrun.task import join as joining
from metaflow_extensions.torchrun.plugins.torchrun.task import task_gang
from metaflow_extensions.torchrun.plugins.torchrun.task.signs import STARTED_BY
from metaflow_extensions.torchrun.plugins.torchrun.task.step_timeout import TimeLimit

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
        made.append(task_gang.TaskGang(SETTINGS, datastore, "1", "train", "2", 0, **more))
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
    assert (stored.num_nodes, stored.nproc, stored.is_over) == (1, None, True)
    assert [(event.kind, event.nodes) for event in stored.events] == [("joined", [0]), ("finished", [0]), ("left", [0])]


def test_the_steps_timeout_ends_a_step_that_sleeps_on_the_control_node(control_task):
    began = time.monotonic()
    gang = control_task(limit=TimeLimit(began + 0.2, "longer than 🙂 allows"))

    def step():
        gang.join()
        time.sleep(3600)

    with pytest.raises(LaunchTimeout, match=r"🙂 allows\.\nIt happened outside of"):
        gang.run(step)


def test_an_error_of_the_step_is_raised_and_leaves_the_gang(gang, registry, monkeypatch):
    before, error, last_cards = signal.getsignal(signal.SIGTERM), ValueError("diverged"), []
    monkeypatch.setattr(task_gang.Cards, "make_last", lambda self: last_cards.append(True))

    def step():
        gang.join()
        raise error

    with pytest.raises(ValueError, match="diverged") as caught:
        gang.run(step)
    assert caught.value is error
    assert signal.getsignal(signal.SIGTERM) is before
    gang.fail(error)  # as `task_exception` does then; it is too late for that
    gang.leave_with(error)
    assert last_cards == [True]
    assert [event.kind for event in registry.load_view().events].count("left") == 1


@pytest.mark.parametrize("is_of_metaflow", [True, False])
def test_where_metaflow_sees_first_that_another_nodes_task_has_failed_the_gangs_word_counts(is_of_metaflow, gang):
    def _local_multinode_control_task_step_func():
        raise ValueError("Subprocess failed, return code -9")

    def step():
        member, _ = gang.join()
        error = LaunchFailed("node 1 failed")
        threading.Timer(0.3, lambda: member.deliver(Abort(error))).start()
        if is_of_metaflow:
            _local_multinode_control_task_step_func()
        raise ValueError("of the step's own")

    with pytest.raises(LaunchFailed if is_of_metaflow else ValueError, match="node 1" if is_of_metaflow else "own"):
        gang.run(step)


@pytest.mark.parametrize(
    ("codes", "is_well"),
    [
        ([{1: -9, 2: None}, {1: -9, 2: None}, {1: -9, 2: 0}], True),
        ([{1: -9, 2: 3}], False),
        ([{1: -9, 2: None}, {1: -9, 2: 3}], False),
        ([{1: 3, 2: None}, {1: 3, 2: 0}], True),
        ([{}], False),
    ],
    ids=["without the lost one", "another is bad", "another is bad later", "out, whatever its code", "unknown"],
)
def test_after_the_loss_of_a_node_the_ends_of_all_others_count(codes, is_well, gang, monkeypatch):
    def _local_multinode_control_task_step_func():
        raise ValueError("Subprocess failed, return code -9")

    def step():
        gang.join()
        _local_multinode_control_task_step_func()

    monkeypatch.setattr(task_gang, "_OTHERS_WORD_S", 0.3)
    left = list(codes)
    seen = SimpleNamespace(exit_codes=lambda _: left.pop(0) if len(left) > 1 else left[0], stop=lambda *_: None)
    gang._local_nodes = seen
    monkeypatch.setattr(gang, "_out", lambda: [1])
    with nullcontext() if is_well else pytest.raises(ValueError, match="code -9"):
        gang._run_step(step)


def test_a_report_that_can_not_be_made_leaves_the_error_as_it_is(gang, monkeypatch, capfd):
    def step():
        gang.join()
        raise ValueError("diverged")

    monkeypatch.setattr(gang, "_report", lambda error: 1 / 0)
    with pytest.raises(ValueError, match="diverged"):
        gang.run(step)
    assert "Left out: our own report of the error (ZeroDivisionError" in capfd.readouterr().err


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


@pytest.mark.parametrize("name", STORING)
def test_results_that_can_not_be_stored_leave_the_gang_with_that_error(name, gang):
    def refuse(*_):
        raise OSError("no space left")

    datastore = SimpleNamespace(**{**dict.fromkeys(STORING, lambda *_: "stored"), name: refuse})
    gang.watch_storing(datastore)
    member, _ = gang.join()
    gang.run_code(bool)
    before = STORING[: STORING.index(name)]
    assert [getattr(datastore, other)({}) for other in before] == ["stored"] * len(before)
    assert member.is_storing
    with pytest.raises(OSError, match="no space left"):
        getattr(datastore, name)({})
    assert not member.is_storing


def test_a_control_node_writes_the_other_nodes_lines(control_task, registry, capfd):
    gang = control_task(num_nodes=2, runtime="kubernetes")
    gang.join()
    with ThreadPoolExecutor() as pool:
        other, _ = pool.submit(joining.join_as_member, registry, 1, 2, SETTINGS, print).result()
        other.link.send("lines", "stderr", "[rank 1] a line\n")
        pool.submit(other.leave).result()
    gang.leave(None)
    assert "[rank 1] a line\n" in capfd.readouterr().err


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


def test_another_nodes_task_makes_no_card_of_the_gang(control_task, registry, monkeypatch, tmp_path):
    task = cards_of_task(monkeypatch, tmp_path, "torchrun", "default", task="GangFlow/1/train/2_node_1")
    with ThreadPoolExecutor() as pool:
        others = registry, 2, "127.0.0.1", SETTINGS, print, True, joining.rules_of(SETTINGS)
        control = pool.submit(joining.join_as_control, *others).result()
        gang = control_task(num_nodes=2, node_index=1, control_task_id="2")
        gang.join()
        task.end_well()
        gang.leave(None)
        pool.submit(control.leave).result()
    assert task.stored() == {}
    assert [each["--type"] for each in task.commands] == ["default", "default"]


WROTE = Cause("exception", 1, "b", 3, 1, 1, "ValueError: 2 * 3", "Traceback:\n  File 'it*s.py'\nValueError: 2 * 3")
ENDED = replace(WROTE, kind="exit", exit_code=3, exception=None)


@pytest.mark.parametrize(
    ("cause", "shows_output", "count", "is_above"),
    [
        (WROTE, True, 1, False),  # a copy of it may stand above, or be left out
        (ENDED, True, 1, False),
        (replace(WROTE, node=0), True, 0, True),  # here the worker itself would have written it
        (replace(WROTE, node=0), False, 1, False),  # as with logs="rank0"
    ],
)
def test_a_traceback_of_its_own_workers_stands_once_in_the_log_of_a_remote_control_node(
    cause, shows_output, count, is_above, control_task, registry, capfd
):
    gang = control_task(num_nodes=2, runtime="kubernetes")

    def step():
        member, _ = gang.join()
        other, _ = pool.submit(joining.join_as_member, registry, 1, 2, SETTINGS, print).result()
        pool.submit(other.leave).result()
        member.begin_launch(shows_output)
        error = of_launch(Launch(0), cause)
        member.end_launch(error)
        raise error

    with ThreadPoolExecutor() as pool, pytest.raises(LaunchFailed):
        gang.run(step)
    assert settle(60)
    log = "".join(capfd.readouterr())
    assert log.count("File 'it*s.py'") == count
    assert ("is above." in log) is is_above


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
from PACKAGE.gang.messages import Ready
member.send(Ready(0, 1, "digest"))
member.link.wait(lambda: False, 600.0)
"""


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_a_remote_task_in_the_place_of_one_that_was_killed_does_not_run_the_step_again(
    num_nodes, control_task, registry, tmp_path
):
    second, ran = control_task(num_nodes, runtime="kubernetes"), []
    code = FIRST.replace("PACKAGE", PACKAGE)
    first = subprocess.Popen([sys.executable, "-c", code, str(tmp_path), str(num_nodes)])
    try:
        eventually(lambda: registry.peek(1.0), "the first task's record")
    finally:
        first.kill()
        first.wait()
    with pytest.raises(TorchrunPreempted, match=r"control node's pod .* replaced"):
        second.run(lambda: ran.append(second.join()))
    assert ran == []
    stored = registry.load_view()
    assert (stored.events[-1].kind, stored.outcome) == ("lost", "failed")
