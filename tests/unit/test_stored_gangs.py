"""What the commands find in a flow's datastore; the datastore is Metaflow's own, on this disk."""

from types import SimpleNamespace

import pytest
from metaflow._vendor.click.testing import CliRunner
from metaflow.datastore import FlowDataStore
from metaflow.exception import CommandException
from metaflow.plugins.datastores.local_storage import LocalStorage

from metaflow_extensions.torchrun.plugins.torchrun.show import commands, finding
from metaflow_extensions.torchrun.plugins.torchrun.show.stored_gangs import StoredGangs, place_of
from metaflow_extensions.torchrun.plugins.torchrun.show.stored_logs import _PIECE, StoredLogs

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
    flow = SimpleNamespace(name="Flow")
    return SimpleNamespace(flow=flow, graph=graph, echo=print, flow_datastore=stored.datastore)


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


def find(obj, named):
    """Return what a command finds that is given this name."""
    return finding.find(obj, finding.or_latest(SimpleNamespace(obj=obj), None, named))


@pytest.mark.parametrize("named", ["100/train", "100/train/", "Flow/100/train", "100/train/4_node_1", "100", ""])
def test_a_gang_is_named_by_run_step_or_any_of_its_tasks_or_is_of_the_last_run(stored, obj, root, named):
    begin(root, "start", "1")
    begin(root, "train", "4", "4_node_1")
    (root.parent / "latest_run").write_text(RUN)
    assert [gang.control_task for gang in find(obj, named)[1]] == ["4"]


@pytest.mark.parametrize("command", ["show", "logs"])
def test_a_command_without_a_run_says_which_it_shows_since_a_refused_one_is_none(stored, obj, root, command):
    begin(root, "train", "4")
    (root.parent / "latest_run").write_text(RUN)
    said = "[torchrun] Showing run 100, the last that `run` started here. To see a resumed run, give its number."
    run = CliRunner(mix_stderr=False).invoke
    assert said in run(commands.torchrun, [command], obj=obj).stderr
    assert "[torchrun]" not in run(commands.torchrun, [command, "100"], obj=obj).stderr


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("", r"No run of Flow was started here. Name one"),
        ("99", r"has no run 99 of Flow\. If"),
        ("1001", r"has no run 1001 of Flow\. Did you mean 100\? If"),
        ("train", r"train is a step. Name its run, too: python .* torchrun show RUN/train\.$"),
        *((wrong, r"write RUN, RUN/STEP or RUN/STEP/TASK") for wrong in ("/", "../Other/100", "100/train/4/2")),
        ("100/tran", r"Run 100 has no tasks of step tran\. Did you mean train\? It has begun: start, train, tune"),
        ("100/train/5", r"has no task 5. Its gangs have the control tasks 4"),
        ("100", r"several gangs. Name the step: 100/train, 100/tune"),
    ],
)
def test_what_is_not_there_is_said_with_what_is(stored, obj, root, named, said):
    begin(root, "start", "1")
    begin(root, "train", "4")
    begin(root, "tune", "5")
    if named:
        (root.parent / "latest_run").write_text(RUN)
    with pytest.raises(CommandException, match=said):
        find(obj, named)


def test_an_attempt_that_is_not_there_is_said(obj, root):
    begin(root, "train", "4")
    assert finding.find(obj, "100")[1][0].attempt == 0
    with pytest.raises(CommandException, match="has only attempt 0, not 1"):
        finding.find(obj, "100", 1)


def logs_of(stored):
    (gang,) = stored.gangs(RUN, "train")
    return StoredLogs(stored, gang)


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
    whole = logged((1, "first"), (2, "second"), (3, "third"))
    write(root, "train/4/0.task_stdout.log", whole[:70])
    logs = logs_of(stored)
    assert [line.text for line in logs.lines(is_growing=True)] == ["first"]
    write(root, "train/4/0.task_stdout.log", whole[:-1])
    assert [line.text for line in logs.lines(is_growing=True)] == ["second"]
    assert [line.text for line in logs.lines()] == ["third"]


def show_logs(obj, capsys, **options):
    """Return the lines that the command prints, without their times, and those on stderr."""
    given = {"rank": None, "node": None, "tail": None, "follow": False, "attempt": None, "as_json": False, **options}
    commands.logs.callback.__wrapped__(obj, "100/train", **given)
    told = capsys.readouterr()
    return [line.partition(" ")[2] for line in told.out.splitlines()], told.err.splitlines()


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ({}, ["[rank 0] a", "[rank 1] b", "[rank 0] c", "[rank 1] d", commands._TRUNCATED]),
        ({"tail": 3}, ["[rank 0] c", "[rank 1] d", commands._TRUNCATED]),
        ({"tail": 1, "rank": 0}, [commands._TRUNCATED]),
        ({"rank": 1}, ["[rank 1] b", "[rank 1] d", commands._TRUNCATED]),
    ],
)
def test_the_last_lines_are_those_of_all_that_is_chosen(stored, obj, root, capsys, options, texts):
    begin(root, "train", "4")
    lines = [(1, "[rank 0] a"), (2, "[rank 1] b"), (3, "[rank 0] c"), (4, "[rank 1] d"), (4, commands._TRUNCATED)]
    write(root, "train/4/0.task_stdout.log", logged(*lines))
    assert show_logs(obj, capsys, **options) == (texts, [])


@pytest.mark.parametrize("options", [{"rank": 3}, {"node": 1}, {}])
def test_that_nothing_is_stored_is_said_with_when_it_will_be(stored, obj, root, capsys, options):
    begin(root, "train", "4")
    assert show_logs(obj, capsys, **options) == ([], [commands._NO_LINE])
    write(root, "train/4/0.DONE.lock")
    assert show_logs(obj, capsys, **options) == ([], ["It has printed nothing that is stored."])


def test_a_flow_without_a_gang_is_told_where_its_single_node_is_seen(obj, root):
    obj.graph[1:] = []
    begin(root, "start", "1")
    with pytest.raises(CommandException, match="Of TorchrunSingleNodeMultiGPU, card and `logs` tell"):
        find(obj, "100")
