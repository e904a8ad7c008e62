"""One node's commands before it is ready: real processes, with a gang that the test plays, and without any."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from fake_node import ERROR, FakeNode
from limits import limit_s
from unit_helpers import HANG_S, eventually, is_running, write

from metaflow_extensions.torchrun.plugins.torchrun.gang.messages import Failed, Ready, Report
from metaflow_extensions.torchrun.plugins.torchrun.launch.command import COMMAND_RUNNER
from metaflow_extensions.torchrun.plugins.torchrun.machine import processes
from metaflow_extensions.torchrun.plugins.torchrun.node.agent import AgentProcess
from metaflow_extensions.torchrun.plugins.torchrun.node.agent_events import AgentEnded, End


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

    def make(*commands, number=1, real=True, env=(), **plan):
        argvs = [("sh", "-ec", each) if isinstance(each, str) else tuple(each) for each in commands]
        spec = {"cwd": str(tmp_path / "cwd"), "env": env}
        node = FakeNode(tmp_path, number, spec={"python": sys.executable, **spec}, commands=argvs, **plan)
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


def failure_of(node):
    (failure,) = messages(node)[-1].failures
    return failure.cause


def test_each_command_is_told_and_shown_and_has_what_the_workers_will_have(node_with, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "7")
    node = node_with(
        "env > seen", ["sh", "-c", "printf 'a\\rb'"], env=(("NAME", "größe"), ("PATH", os.environ["PATH"]))
    )
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


@pytest.mark.parametrize("home", [None, sys.base_prefix])
def test_the_runner_starts_where_python_needs_pythonhome_and_heeds_no_module_of_the_users(
    home, node_with, tmp_path, monkeypatch
):
    if home is not None:
        monkeypatch.setenv("PYTHONHOME", home)
    write(tmp_path / "mine" / "json.py", "raise SystemExit('a stranger')")
    env = (("PYTHONPATH", str(tmp_path / "mine")), ("PYTHONWARNINGS", "error"))
    node = node_with("tr '\\0' '\\n' < /proc/$PPID/cmdline > line", env=env)
    assert ended_well(node)
    words = (tmp_path / "cwd" / "line").read_text().splitlines()
    assert ("-I" in words) is (home is None), "-I ignores PYTHONHOME"


def test_a_path_of_the_users_need_not_lead_to_a_shell(node_with, tmp_path):
    node = node_with("echo $PATH > seen", env=(("PATH", "/no where"),))
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


def test_what_a_command_leaves_running_ends_with_the_last_command(node_with, tmp_path):
    node = node_with("sleep 300 & echo $! > child", "kill -0 $(cat child)", grace_s=0.3)
    assert ended_well(node)
    assert not is_running(int((tmp_path / "cwd" / "child").read_text()))
    (left,) = node.texts("left_behind")
    assert "the commands had left running: " in left


def test_a_runner_that_is_killed_is_named(node_with, tmp_path):
    node = node_with("echo $PPID > runner.part; mv runner.part runner; sleep 300", grace_s=0.3)
    node.prepare()
    eventually((tmp_path / "cwd" / "runner").exists)
    os.kill(int((tmp_path / "cwd" / "runner").read_text()), signal.SIGKILL)
    cause = failure_of(node)
    assert (cause.category, cause.exit_code) == ("killed", -9)
    assert cause.exception.startswith("its command runner was killed by SIGKILL")
    assert node.texts("worker_failed")[0].startswith("its command runner was killed by SIGKILL")
    node.verdict(ERROR)


def test_a_commands_end_that_only_its_agent_tells(node_with):
    """A runner that leaves no record, as on a full disk, has failed all the same."""
    node = node_with("true", real=False)
    agent = node.prepare()
    folder = Path(agent.options.stderr).parent
    write(folder / "ended.jsonl", '{"number": 0, "status": 0, "error": null, "seconds": 0.1}\n{"number": 1, "sta')
    agent.say(AgentEnded(1, 0.0))
    agent.say(End(1))
    told = messages(node)
    assert [type(each) for each in told] == [Report, Failed]
    assert told[-1].failures[0].cause.exception == "its command runner exited with code 1"
    node.verdict(ERROR)


# --- the runner alone -------------------------------------------------------------------------------

SH = ["sh", "-ec"]


class Run:
    """A runner of commands."""

    def __init__(self, folder, *commands, cwd=None):
        self.folder = folder
        folder.mkdir()
        (folder / "cwd").mkdir()
        self.cwd = cwd or folder / "cwd"
        described = [{"argv": argv, "shown": " ".join(argv)} for argv in commands]
        (folder / "commands.json").write_text(json.dumps(described))
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", COMMAND_RUNNER, str(folder)],
            cwd=self.cwd,
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def wait(self):
        self.process.communicate(b"for nobody")
        return self.process.returncode

    @property
    def ended(self):
        path = self.folder / "ended.jsonl"
        return list(map(json.loads, path.read_text().splitlines())) if path.exists() else []

    def output(self, number):
        """Return a command's output, and what the runner says of its end."""
        return [(self.folder / f"{number}.{stream}").read_bytes() for stream in ("stdout", "stderr")]


@pytest.fixture
def run(tmp_path):
    """Return a function that starts a runner."""
    started = []

    def start(*commands, **options):
        started.append(Run(tmp_path / f"run-{len(started)}", *commands, **options))
        return started[-1]

    yield start
    for each in started:
        children = []
        with suppress(psutil.NoSuchProcess):
            children = psutil.Process(each.process.pid).children(recursive=True)
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        each.process.kill()
        each.process.communicate()
        psutil.wait_procs(children, limit_s(HANG_S))


def test_commands_run_one_after_the_other_with_both_streams_in_order(run):
    runner = run(
        [*SH, "echo one; echo two >&2; printf 'three'; cat; touch made; sleep 0.2"],
        [sys.executable, "-c", "import os; os.write(1, b'\\xff\\x00' + str(os.listdir()).encode())"],
    )
    assert runner.wait() == 0
    assert [(each["number"], each["status"], each["error"]) for each in runner.ended] == [(0, 0, None), (1, 0, None)]
    assert 0.2 <= runner.ended[0]["seconds"] < 20
    output, end = runner.output(0)
    begin, *lines = output.split(b"\n")
    assert (begin[:2], lines) == (b"$ ", [b"one", b"two", b"three"])  # `cat` has read the end of its stdin
    assert end.startswith(b"ended well after ")
    assert runner.output(1)[0].endswith(b"\n\xff\x00['made']")


def test_at_sigterm_the_command_ends_with_its_group(run):
    """The kernel sends it if the supervisor is killed."""
    runner = run([*SH, "sleep 300 & echo $! > child; wait"], ["touch", "never"])
    child = int(eventually(lambda: (runner.cwd / "child").exists() and (runner.cwd / "child").read_text()))
    runner.process.send_signal(signal.SIGTERM)
    assert runner.wait() == 128 + signal.SIGTERM
    assert runner.ended == []  # it did not fail by itself
    eventually(lambda: not is_running(child))
    assert os.listdir(runner.cwd) == ["child"]


def test_those_of_one_folder_run_one_after_the_other(run):
    """Two installations into one place at once would hurt each other."""
    first = run([*SH, "touch begun; while [ ! -e go ]; do sleep 0.02; done; rm begun"])
    eventually((first.cwd / "begun").exists)
    second = run([*SH, "! [ -e begun ]"], cwd=first.cwd)
    third = run(["true"])
    assert third.wait() == 0  # in another folder
    stderr = second.process.stderr
    os.set_blocking(stderr.fileno(), False)
    said = eventually(stderr.read)
    assert said.decode() == f"waiting: the commands of another node run in the same folder, {first.cwd}\n"
    assert not second.ended
    (first.cwd / "go").touch()
    assert (first.wait(), second.wait()) == (0, 0)


def test_who_waits_for_the_folder_ends_at_sigterm(run):
    first = run(["sleep", "300"])
    eventually((first.folder / "0.stdout").exists)
    second = run(["touch", "never"], cwd=first.cwd)
    eventually(lambda: os.read(second.process.stderr.fileno(), 1000))
    second.process.send_signal(signal.SIGTERM)
    assert second.wait() == 128 + signal.SIGTERM
    assert second.ended == []


def test_a_command_that_starts_a_gang_of_its_own_there_does_not_wait_for_itself(run, tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "commands.json").write_text('[{"argv": ["true"], "shown": "true"}]')
    assert run([sys.executable, "-I", COMMAND_RUNNER, str(tmp_path / "inner")]).wait() == 0
    assert (tmp_path / "inner" / "ended.jsonl").exists()
