"""One node's commands before it is ready: real processes, with a gang that the test plays."""

import ctypes
import fcntl
import os
import sys
import tempfile

import pytest
from fake_node import ERROR, FakeNode
from unit_helpers import eventually, is_running

from metaflow_extensions.torchrun.plugins.torchrun.gang.messages import Failed, Ready
from metaflow_extensions.torchrun.plugins.torchrun.machine import processes
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.agent import AgentProcess

# A child that ignores SIGTERM and is in a session of its own, beside a command that ignores it, too.
STUBBORN = """
trap '' TERM
setsid sh -c "trap '' TERM; echo \\$\\$ > child; while :; do sleep 1; done" &
while [ ! -s child ]; do sleep 0.02; done
echo $$ > self.part && mv self.part self
while :; do sleep 1; done
"""


@pytest.fixture(autouse=True)
def as_a_supervisor():
    """Adopt orphans meanwhile."""
    prctl = ctypes.CDLL(None).prctl
    prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    yield
    prctl(36, 0, 0, 0, 0)
    list(processes.reap())


@pytest.fixture
def node_with(tmp_path, monkeypatch):
    """Return a function that makes a node which runs commands of the shell, or others."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "cwd").mkdir()

    def make(*commands, number=1, real=True, env=None, **plan):
        argvs = [("sh", "-ec", each) if isinstance(each, str) else tuple(each) for each in commands]
        spec = {"cwd": str(tmp_path / "cwd"), "env": env or {}}
        node = FakeNode(tmp_path, number, before_run=argvs, python=sys.executable, **spec, **plan)
        if real:
            node.new_agent = AgentProcess
        return node

    return make


def messages(node, last=(Ready, Failed)):
    """Return what the node sends, up to its *ready* or its failure."""
    found = [node.next_message()]
    while not isinstance(found[-1], last):
        found.append(node.next_message())
    return found


def ended_well(node):
    node.prepare()
    is_well = isinstance(messages(node)[-1], Ready)
    node.verdict(ERROR)
    return is_well


def pids(cwd):
    eventually((cwd / "self").exists)
    return [int((cwd / name).read_text()) for name in ("self", "child")]


def test_each_command_is_told_and_shown_and_has_what_the_workers_will_have(node_with, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "7")
    node = node_with("env > seen", ["sh", "-c", "printf 'a\\rb'"], env={"NAME": "größe", "PATH": os.environ["PATH"]})
    node.prepare()
    first, second, ready = messages(node)
    assert (first.data["text"], first.data["exit_code"]) == ("before_run 1/2 (env > seen) exited with code 0", 0)
    assert second.data["text"].startswith("before_run 2/2 (sh -c 'printf")
    assert isinstance(ready, Ready)
    shown = "".join(node.output).splitlines()
    assert shown[0] == "[node 1 before_run 1/2] $ env > seen"
    assert shown[1].startswith("[node 1 before_run 1/2] ended well after ")
    assert "[node 1 before_run 2/2] b" in shown
    seen = dict(line.split("=", 1) for line in (tmp_path / "cwd" / "seen").read_text().splitlines() if "=" in line)
    assert (seen["NAME"], "OMP_NUM_THREADS" in seen) == ("größe", True)
    assert not {"RANK", "TORCHRUN_AGENT_PID"} & set(seen)
    assert "worker_hooks" not in seen.get("PYTHONPATH", "")
    assert sorted(os.listdir(tmp_path)) == ["cwd"]
    node.verdict(ERROR)


def test_a_path_of_the_users_need_not_lead_to_a_shell(node_with, tmp_path):
    node = node_with("echo $PATH > seen", env={"PATH": "/no where"})
    assert ended_well(node)
    assert (tmp_path / "cwd" / "seen").read_text() == "/no where\n"


@pytest.mark.parametrize(
    ("command", "code", "how"),
    [
        ("echo E: no such thing; exit 3", 3, "exited with code 3"),
        ("echo E: no such thing; false; echo never", 1, "exited with code 1"),  # -e
        ("echo E: no such thing; kill -9 $$", -9, "was killed by SIGKILL: often the out-of-memory killer"),
        (["nowhere"], None, "could not be started: [Errno 2] No such file or directory: 'nowhere'"),
        (["/etc/passwd"], None, "could not be started: [Errno 13] Permission denied: '/etc/passwd'"),
    ],
    ids=["code", "a part", "signal", "no program", "no right"],
)
def test_a_command_that_fails_is_the_cause_with_its_last_lines_and_the_last_command(command, code, how, node_with):
    if code is not None:
        command = rf"printf '50%%\r100%%\r\n'; {command}"
    node = node_with("true", command, "echo never")
    node.prepare()
    *commands, failed = messages(node)
    assert [each.data["exit_code"] for each in commands] == [0, code]
    assert "out-of-memory" not in commands[1].data["text"], "the error has the hints"
    (failure,) = failed.failures
    cause = failure.cause
    assert (failed.given_up, cause.kind, cause.category, cause.node, cause.rank) == (
        False,
        "command",
        "before_run",
        1,
        None,
    )
    assert (cause.exit_code, cause.exception.startswith("before_run 2/3 ("), how in cause.exception) == (
        code,
        True,
        True,
    )
    assert cause.detail.splitlines()[1:] == ([] if code is None else ["100%", "E: no such thing"])
    (said,) = node.texts("worker_failed")
    assert how in said
    assert node.verdict(ERROR) is ERROR
    assert not [line for line in "".join(node.output).splitlines() if line.endswith("] never") or "3/3" in line]


def test_when_another_node_fails_a_command_ends_with_all_that_it_has_started(node_with, tmp_path):
    node = node_with(STUBBORN, "echo never", grace_s=0.3)
    node.prepare()
    running = pids(tmp_path / "cwd")
    assert node.verdict(ERROR) is ERROR
    assert not any(map(is_running, running))
    assert not node.texts("worker_failed")


def test_what_a_command_leaves_running_ends_with_it(node_with, tmp_path):
    node = node_with("sleep 300 & echo $! > child", "! kill -0 $(cat child)", grace_s=0.3)
    assert ended_well(node)
    (left,) = node.texts("left_behind")
    assert "the commands had left running: " in left


@pytest.mark.parametrize(("number", "logs", "is_shown"), [(0, "rank0", True), (1, "rank0", False), (1, "all", True)])
def test_where_rank_0_alone_is_shown_so_are_the_commands_of_its_node(number, logs, is_shown, node_with):
    node = node_with("echo hello", number=number, logs=logs)
    assert ended_well(node)
    assert bool(node.output) is is_shown


def test_both_streams_of_a_command_stay_in_order_and_its_stdin_is_empty(node_with):
    node = node_with("echo one; echo two >&2; printf 'three'; cat", "printf '\\377'")
    assert ended_well(node)
    shown = [line.partition("] ")[2] for line in "".join(node.output).splitlines()]
    assert shown[1:4] == ["one", "two", "three"]
    assert "\ufffd" in shown


def test_all_that_a_command_has_written_stands_before_the_line_of_its_end(node_with):
    written = []
    # Who reads is behind, so that much is left to be read at the end: more than is read at once.
    node = node_with("seq -w 1 30000; printf last", write=lambda _, lines: written.append(lines.decode()))
    assert ended_well(node)
    *shown, last, end = [line.partition("] ")[2] for line in "".join(written).splitlines()]
    assert (shown[1:], last) == ([f"{number:05}" for number in range(1, 30_001)], "last")
    assert end.startswith("ended well after ")


def test_a_command_that_heeds_no_sigterm_takes_no_further_step(node_with, tmp_path):
    node = node_with("trap '' TERM; touch begun; sleep 300 || true; touch never", grace_s=0.3)
    node.prepare()
    eventually((tmp_path / "cwd" / "begun").exists)
    assert node.verdict(ERROR) is ERROR
    assert sorted(os.listdir(tmp_path / "cwd")) == ["begun"]


@pytest.fixture
def turn(tmp_path, node_with):
    """Have the turn in the commands' folder, as another node of this machine; yield what ends it."""
    held = os.open(tmp_path / "cwd", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    yield lambda: fcntl.flock(held, fcntl.LOCK_UN)
    os.close(held)


def test_nodes_that_share_a_folder_take_turns_there(node_with, turn, tmp_path):
    """Two installations into one place at once would hurt each other."""
    node = node_with("touch made")
    node.prepare()
    eventually(lambda: node.texts("note"))
    assert node.texts("note") == [f"waiting: the commands of another node run in the same folder, {tmp_path / 'cwd'}"]
    assert not (tmp_path / "cwd" / "made").exists()
    turn()
    assert isinstance(messages(node)[-1], Ready)
    node.verdict(ERROR)


def test_who_waits_for_its_turn_can_be_stopped(node_with, turn, tmp_path):
    node = node_with("touch never")
    node.prepare()
    eventually(lambda: node.texts("note"))
    assert node.verdict(ERROR) is ERROR
    assert not (tmp_path / "cwd" / "never").exists()
