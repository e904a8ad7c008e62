"""One node's commands before it is ready: real processes, with a gang that the test plays."""

import ctypes
import fcntl
import os
import sys
import tempfile
import time

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

    def make(*commands, number=1, **plan):
        argvs = [("sh", "-ec", each) if isinstance(each, str) else tuple(each) for each in commands]
        spec = {"cwd": str(tmp_path / "cwd"), "env": {}}
        node = FakeNode(tmp_path, number, before_run=argvs, python=sys.executable, **spec, **plan)
        node.new_agent = AgentProcess
        return node

    return make


def messages(node):
    """Return what the node sends, up to its *ready* or its failure."""
    found = [node.next_message()]
    while not isinstance(found[-1], (Ready, Failed)):
        found.append(node.next_message())
    return found


def ended_well(node):
    node.prepare()
    is_well = isinstance(messages(node)[-1], Ready)
    node.verdict(ERROR)
    return is_well


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
    assert (failed.given_up, cause.category, cause.node, cause.rank) == (False, "before_run", 1, None)
    assert cause.exit_code == code
    assert cause.exception.startswith("before_run 2/3 (")
    assert how in cause.exception
    assert cause.detail.splitlines()[1:] == ([] if code is None else ["100%", "E: no such thing"])
    (said,) = node.texts("worker_failed")
    assert how in said
    assert node.verdict(ERROR) is ERROR
    assert not [line for line in "".join(node.output).splitlines() if line.endswith("] never") or "3/3" in line]


def test_when_another_node_fails_a_command_ends_with_all_that_it_has_started(node_with, tmp_path):
    node = node_with(STUBBORN, "echo never", grace_s=0.3)
    node.prepare()
    eventually((tmp_path / "cwd" / "self").exists)
    running = [int((tmp_path / "cwd" / name).read_text()) for name in ("self", "child")]
    assert node.verdict(ERROR) is ERROR
    assert not any(map(is_running, running))
    assert not node.texts("worker_failed")


def test_what_a_command_leaves_running_ends_with_it(node_with, tmp_path):
    node = node_with("sleep 300 & echo $! > child", "! kill -0 $(cat child)", grace_s=0.3)
    assert ended_well(node)
    (left,) = node.texts("left_behind")
    assert "the commands had left running: " in left


def test_all_that_a_command_has_written_is_shown_and_its_stdin_is_empty(node_with):
    written = []
    # Who reads is behind, so that much is left to be read at the end: more than is read at once.
    node = node_with("cat; seq -w 1 30000; printf 'last\\377'", write=lambda _, lines: written.append(lines.decode()))
    assert ended_well(node)
    *shown, last = [line.partition("] ")[2] for line in "".join(written).splitlines()]
    assert (shown[1:], last) == ([f"{number:05}" for number in range(1, 30_001)], "last\ufffd")


def test_nodes_that_share_a_folder_take_turns_there(node_with, tmp_path):
    """Two installations into one place at once would hurt each other."""
    node = node_with("touch made")
    other = os.open(tmp_path / "cwd", os.O_RDONLY)
    try:
        fcntl.flock(other, fcntl.LOCK_SH)  # beside which no other may have the turn
        node.prepare()
        (said,) = eventually(lambda: node.texts("note"))
        assert said == f"waiting: the commands of another node run in the same folder, {tmp_path / 'cwd'}"
        time.sleep(0.5)  # who did not wait would have begun by then
        assert not (tmp_path / "cwd" / "made").exists()
    finally:
        os.close(other)
    assert isinstance(messages(node)[-1], Ready)
    node.verdict(ERROR)
