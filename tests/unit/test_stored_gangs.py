"""What the commands find in a flow's datastore; the datastore is Metaflow's own, on this disk."""

import json
from types import SimpleNamespace

import pytest
from metaflow.datastore import FlowDataStore
from metaflow.exception import CommandException
from metaflow.plugins.datastores.local_storage import LocalStorage

from metaflow_extensions.torchrun.plugins.torchrun.border import commands, stored_gangs
from metaflow_extensions.torchrun.plugins.torchrun.border.stored_gangs import StoredGangs, place_of
from metaflow_extensions.torchrun.plugins.torchrun.border.stored_logs import _PIECE, StoredLogs

RUN = "100"


@pytest.fixture
def root(tmp_path):
    return tmp_path / "Flow" / RUN


@pytest.fixture
def stored(tmp_path, monkeypatch):
    monkeypatch.setattr(LocalStorage, "datastore_root", str(tmp_path))
    return StoredGangs(FlowDataStore("Flow", None, storage_impl=LocalStorage))


@pytest.fixture
def obj(stored):
    steps = {"start": False, "train": True, "tune": True}
    graph = [SimpleNamespace(name=name, parallel_step=is_parallel) for name, is_parallel in steps.items()]
    return SimpleNamespace(flow=SimpleNamespace(name="Flow"), graph=graph, echo=print)


def write(root, path, text=""):
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_bytes(text if isinstance(text, bytes) else text.encode())


def begin(root, step, *tasks, attempt=0):
    for task in tasks:
        write(root, f"{step}/{task}/{attempt}.attempt.json", '{"time": 1}')


def logged(*lines, source="task"):
    """Return lines of (seconds, text) as Metaflow stores them."""
    return "".join(f"[MFLOG|0|2026-11-22T02:00:{at:02d}.000000Z|{source}|an-id]{text}\n" for at, text in lines)


NAMES = [
    ({"4", "4_node_1", "4_node_10"}, {"4": 0, "4_node_1": 1, "4_node_10": 10}),
    ({"t-1", "t-1-worker-0", "t-1-worker-1"}, {"t-1": 0, "t-1-worker-0": 1, "t-1-worker-1": 2}),
    ({"control-x-0", "worker-x-0", "worker-x-1"}, {"control-x-0": 0, "worker-x-0": 1, "worker-x-1": 2}),
    ({"control-7", "7-node-1"}, {"control-7": 0, "7-node-1": 1}),
    ({"7", "7-node-1"}, {"7": 0, "7-node-1": 1}),
]


@pytest.mark.parametrize(("tasks", "nodes"), NAMES, ids=["local", "kubernetes", "argo", "batch", "batch, a number"])
def test_a_tasks_name_tells_its_gang_and_node(tasks, nodes):
    assert {task: place_of(task, tasks)[1] for task in tasks} == nodes
    assert len({place_of(task, tasks)[0] for task in tasks}) == 1


def test_the_gangs_of_a_foreach_are_several_in_the_order_of_their_tasks(stored, root):
    begin(root, "train", "10", "10_node_1", "9", "9_node_1")
    assert [gang.control_task for gang in stored.gangs(RUN, "train")] == ["9", "10"]
    assert [gang.tasks for gang in stored.gangs(RUN, "train")] == [{0: "9", 1: "9_node_1"}, {0: "10", 1: "10_node_1"}]


def test_attempts_and_their_ends_are_known_by_the_names_of_files(stored, root):
    begin(root, "train", "4", "4_node_1")
    begin(root, "train", "4", attempt=1)
    write(root, "train/4/1.DONE.lock")
    (gang,) = stored.gangs(RUN, "train")
    assert gang.last_attempt == 1
    assert (gang.facts(0).is_done, gang.facts(1).is_done, gang.facts(1).last_attempt) == (False, True, 1)


def test_a_killed_task_has_ended_when_who_started_it_says_so(stored, root):
    begin(root, "train", "4")
    write(root, "train/4/0.runtime", "{}")
    (gang,) = stored.gangs(RUN, "train")
    assert gang.facts(0).is_done
    assert stored.told_by_metaflow(gang, 0) == {0: "was killed"}


def test_events_are_those_of_the_attempt(stored, root):
    begin(root, "train", "4")
    write(root, "train/4/1.torchrun_events.json", json.dumps({"version": 1}))
    (gang,) = stored.gangs(RUN, "train")
    assert stored.events(gang, 0) is None
    assert stored.events(gang, 1) == {"version": 1}
    assert stored.told_by_metaflow(gang, 0) == {0: "has begun; no end is known"}
    assert stored.told_by_metaflow(gang, 2) == {0: "has no such attempt"}


@pytest.mark.parametrize("named", ["100/train", "100/train/", "Flow/100/train", "100/train/4_node_1", "100"])
def test_a_gang_is_named_by_run_step_or_any_of_its_tasks(stored, obj, root, named):
    begin(root, "start", "1")
    begin(root, "train", "4", "4_node_1")
    assert [gang.control_task for gang in commands._find(obj, stored, named)] == ["4"]


def test_without_a_name_the_run_that_was_started_last_is_meant(stored, obj, root, tmp_path):
    with pytest.raises(CommandException, match=r"No run of Flow was started here. Name one"):
        commands._find(obj, stored, "")
    begin(root, "train", "4")
    (tmp_path / "Flow" / "latest_run").write_text(RUN)
    assert [gang.run for gang in commands._find(obj, stored, "")] == [RUN]


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("99", r"has no run 99 of Flow"),
        ("/", r"write RUN, RUN/STEP or RUN/STEP/TASK"),
        ("100/train/4/2", r"write RUN, RUN/STEP or RUN/STEP/TASK"),
        ("100/tran", r"Run 100 has no tasks of step tran. It has begun: start, train, tune"),
        ("100/train/5", r"has no task 5. Its gangs have the control tasks 4"),
        ("100", r"several gangs. Name the step: 100/train, 100/tune"),
    ],
)
def test_what_is_not_there_is_said_with_what_is(stored, obj, root, named, said):
    begin(root, "start", "1")
    begin(root, "train", "4")
    begin(root, "tune", "5")
    with pytest.raises(CommandException, match=said):
        commands._find(obj, stored, named)


def test_an_attempt_that_is_not_there_is_said(stored, root):
    begin(root, "train", "4")
    (gang,) = stored.gangs(RUN, "train")
    assert commands._checked(gang, None) == 0
    with pytest.raises(CommandException, match="has only attempt 0, not 1"):
        commands._checked(gang, 1)


def logs_of(stored, attempt=0):
    (gang,) = stored.gangs(RUN, "train")
    return StoredLogs(stored, gang, attempt)


def test_logs_of_all_tasks_and_streams_come_by_time_whatever_bytes_they_have(stored, root):
    begin(root, "train", "4", "4-worker-0")
    long = "x" * (_PIECE + 5)
    write(root, "train/4/0.task_stdout.log", logged((1, "[rank 0] a"), (4, f"[rank 0] {long}"), (5, "[rank 0] 🙂*")))
    write(root, "train/4/0.runtime_stderr.log", logged((2, "pod is pending"), source="runtime"))
    last = b"torn \xff line"
    write(root, "train/4-worker-0/0.task_stdout.log", logged((3, "b]c[MFLOG|")).encode() + last)
    found = [(line.time[-9:-7], line.task, line.stream, line.text) for line in logs_of(stored).lines()]
    assert found == [
        ("01", "4", "stdout", "[rank 0] a"),
        ("02", "4", "stderr", "pod is pending"),
        ("03", "4-worker-0", "stdout", "b]c[MFLOG|"),
        ("03", "4-worker-0", "stdout", "torn \ufffd line"),
        ("04", "4", "stdout", f"[rank 0] {long}"),
        ("05", "4", "stdout", "[rank 0] 🙂*"),
    ]


def test_a_log_that_grows_is_read_on_in_whole_lines(stored, root):
    begin(root, "train", "4")
    logs, whole = logs_of(stored), logged((1, "first"), (2, "second"), (3, "third"))
    write(root, "train/4/0.task_stdout.log", whole[:70])
    logs = logs_of(stored)
    assert [line.text for line in logs.lines(is_growing=True)] == ["first"]
    write(root, "train/4/0.task_stdout.log", whole[:-1])
    assert [line.text for line in logs.lines(is_growing=True)] == ["second"]
    assert [line.text for line in logs.lines()] == ["third"]


def test_lines_that_a_killed_pod_has_not_stored_come_from_the_control_nodes_log(stored, root):
    begin(root, "train", "4", "4-worker-0")
    own = [(1, "Setting up task environment."), *((at, f"[rank 1] word {at}") for at in range(10, 20))]
    copies = [(at + 1, f"[rank 1] word {at}") for at in range(10, 24)]
    write(root, "train/4/0.torchrun_events.json", json.dumps({"num_nodes": 2, "nproc_per_node": 1}))
    write(root, "train/4/0.task_stdout.log", logged((0, "Setting up task environment."), *copies))
    write(root, "train/4-worker-0/0.task_stdout.log", logged(*own))
    words = [line for line in logs_of(stored).lines() if line.rank == 1]
    assert [line.text for line in words] == [f"[rank 1] word {at}" for at in range(10, 24)]
    assert [line.task for line in words] == ["4-worker-0"] * 10 + ["4"] * 4


def test_following_ends_some_seconds_after_the_attempt_when_nothing_new_comes(stored, root):
    begin(root, "train", "4")
    write(root, "train/4/0.task_stdout.log", logged((1, "first")))
    now = [0.0]

    def time_passes(seconds):
        now[0] += seconds
        if now[0] == 3:
            begin(root, "train", "4_node_1")
            write(root, "train/4_node_1/0.task_stdout.log", logged((3, "of a node that has come")))
            write(root, "train/4/0.DONE.lock")
        if now[0] == 6:  # as it is stored after the end
            write(root, "train/4/0.task_stdout.log", logged((1, "first"), (2, "last")))

    told = [(now[0], line.text) for line in logs_of(stored).follow(lambda: now[0], time_passes)]
    assert told == [(0, "first"), (3, "of a node that has come"), (6, "last")]
    assert now[0] == 11


@pytest.mark.parametrize(("kind", "option"), [("local", ""), ("s3", "--datastore s3 ")])
def test_a_hint_names_the_datastore_where_it_is_not_the_default(stored, root, monkeypatch, kind, option):
    begin(root, "train", "4")
    monkeypatch.setattr(stored_gangs, "DEFAULT_DATASTORE", "local")
    monkeypatch.setattr(LocalStorage, "TYPE", kind)
    (gang,) = stored.gangs(RUN, "train")
    hint = commands._page(stored, gang, 0, "100/train")[-1]
    assert hint.startswith("Logs of all nodes: python ")
    assert hint.endswith(f" {option}torchrun logs 100/train")


def test_a_pattern_that_is_none_is_said():
    assert commands._pattern(None) is None
    with pytest.raises(CommandException, match="is no regular expression"):
        commands._pattern("(")
