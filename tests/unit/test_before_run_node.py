"""One node's commands before the workers: real processes, with a gang that the test plays."""

import os
import signal
import sys
import tempfile
from dataclasses import replace

import psutil
import pytest
from fake_node import ERROR, FakeNode
from unit_helpers import eventually, is_running, write

from metaflow_extensions.torchrun.plugins.torchrun.features.before_run.feature import BeforeRun
from metaflow_extensions.torchrun.plugins.torchrun.features.before_run.program import SCRIPT, Commands
from metaflow_extensions.torchrun.plugins.torchrun.gang.protocol import Ended, Failed, Told, Wrote
from metaflow_extensions.torchrun.plugins.torchrun.guardian.agent_events import End
from metaflow_extensions.torchrun.plugins.torchrun.launch.spec import LaunchSpec
from metaflow_extensions.torchrun.plugins.torchrun.node.agent import AgentProcess
from metaflow_extensions.torchrun.plugins.torchrun.node.preludes import own_launch
from metaflow_extensions.torchrun.plugins.torchrun.result import TorchrunResult

SPEC = LaunchSpec("x.py", (), False, nproc=2, num_nodes=2, node_index=1, python=sys.executable)
# A child that ignores SIGTERM and is in a session of its own, beside a command that ignores it, too.
STUBBORN = """
trap '' TERM
setsid sh -c "trap '' TERM; echo \\$\\$ > child; while :; do sleep 1; done" &
while [ ! -s child ]; do sleep 0.02; done
echo $$ > self.part && mv self.part self
while :; do sleep 1; done
"""


@pytest.fixture
def node_with(tmp_path, monkeypatch):
    """Return a function that makes a node which runs commands of the shell, or others."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "cwd").mkdir()

    def make(*commands, number=1, real=True, env=(), **plan):
        whole = replace(SPEC, node_index=number)
        argvs = [("sh", "-ec", each) if isinstance(each, str) else tuple(each) for each in commands]
        spec = vars(own_launch(whole, SCRIPT))
        own = {name: spec[name] for name in ("nproc", "num_nodes", "node_index", "python")}
        own |= {"cwd": str(tmp_path / "cwd"), "env": env, "log_dir": None}
        program = Commands(argvs, sys.executable)
        node = FakeNode(tmp_path, number, spec=own, program=program, features=(BeforeRun(),), **plan)
        vars(node.plan.spec)["entrypoint"] = spec["entrypoint"]
        if real:
            node.new_agent = AgentProcess
        return node

    return make


def begun(node):
    ready = node.launch()
    assert ready.runs == "before_run"
    node.say_go()


def messages(node):
    """Return what the node sends up to `Ended`, without news of output, and of commands that ended one by one."""
    found = []
    while not found or not isinstance(found[-1], Ended):
        message = node.next_message()
        if isinstance(message, Told):
            assert (message.launch, message.generation, message.feature) == (0, 0, "before_run")
            found += message.data["commands"]
        else:
            found += [] if isinstance(message, Wrote) else [message]
    return found


def pids(cwd):
    eventually((cwd / "self").exists)
    return [int((cwd / name).read_text()) for name in ("self", "child")]


def test_each_command_is_told_and_shown_and_has_what_the_workers_will_have(node_with, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "7")
    node = node_with(
        "env > seen", ["sh", "-c", "printf 'a\\rb'"], env=(("NAME", "größe"), ("PATH", os.environ["PATH"]))
    )
    begun(node)
    first, second, ended = messages(node)
    text = "before_run 1/2 (env > seen) exited with code 0"
    assert first == {"text": text, "seconds": first["seconds"], "exit_code": 0}
    assert second["text"].startswith("before_run 2/2 (sh -c 'printf")
    assert (ended.ok, ended.failures, ended.exit_codes) == (True, (), {})
    assert isinstance(node.verdict(), TorchrunResult)
    shown = "".join(node.output).splitlines()
    assert shown[0] == "[node 1 before_run 1/2] $ env > seen"
    assert shown[1].startswith("[node 1 before_run 1/2] ended well after ")
    assert "[node 1 before_run 2/2] b" in shown
    seen = dict(line.split("=", 1) for line in (tmp_path / "cwd" / "seen").read_text().splitlines() if "=" in line)
    assert seen["NAME"] == "größe"
    assert seen["OMP_NUM_THREADS"]
    assert not {"RANK", "TORCHRUN_AGENT_PID"} & set(seen)
    assert "worker_hooks" not in seen.get("PYTHONPATH", "")
    assert [kind for kind, _ in node.said if kind in ("command", "facts")] == []  # its lines say it
    assert sorted(os.listdir(tmp_path)) == ["cwd"]


def test_a_path_of_the_users_need_not_lead_to_a_shell(node_with, tmp_path):
    node = node_with("echo $PATH > seen", env=(("PATH", "/no where"),))
    begun(node)
    assert messages(node)[-1].ok
    assert (tmp_path / "cwd" / "seen").read_text() == "/no where\n"
    node.verdict()


@pytest.mark.parametrize(
    ("command", "code", "how"),
    [
        (r"printf '50%%\r100%%\r\n'; echo E: no such thing; exit 3", 3, "exited with code 3"),
        (
            r"printf '50%%\r100%%\r\n'; echo E: no such thing; kill -9 $$",
            -9,
            "was killed by SIGKILL: often the out-of-memory killer",
        ),
        (["nowhere"], None, "could not be started: [Errno 2] No such file or directory: 'nowhere'"),
    ],
)
def test_a_command_that_fails_is_the_cause_with_its_last_lines(command, code, how, node_with):
    node = node_with("true", command, "echo never")
    begun(node)
    *told, ended = messages(node)
    (failed,) = [each for each in told if isinstance(each, Failed)]
    assert [each["exit_code"] for each in told if isinstance(each, dict)] == [0, code]
    (failure,) = ended.failures
    assert failed.failures[0].cause == failure.cause
    cause = failure.cause
    assert (cause.kind, cause.category, cause.node, cause.rank) == ("command", "before_run", 1, None)
    assert cause.exit_code == code
    assert cause.exception.startswith("before_run 2/3 (")
    assert how in cause.exception
    assert cause.detail.splitlines()[1:] == ([] if code is None else ["100%", "E: no such thing"])
    assert not ended.ok
    (said,) = node.texts("worker_failed")
    assert how in said
    assert node.verdict(ERROR) is ERROR
    assert "never" not in "".join(node.output).replace("echo never", "")
    assert "Last lines of its output:" in cause.describe()


def test_when_the_gang_stops_a_command_ends_with_all_that_it_has_started(node_with, tmp_path):
    node = node_with(STUBBORN, "echo never", grace_s=0.3)
    begun(node)
    running = pids(tmp_path / "cwd")
    node.stop(signal=int(signal.SIGUSR1))
    *told, ended = messages(node)
    assert not any(map(is_running, running))
    assert (ended.ok, ended.failures, told) == (False, (), [])  # it obeyed
    node.verdict(ERROR)


def test_what_a_command_leaves_running_ends_with_the_last_command(node_with, tmp_path):
    node = node_with("sleep 300 & echo $! > child", "kill -0 $(cat child)", grace_s=0.3)
    begun(node)
    assert messages(node)[-1].ok
    assert not is_running(int((tmp_path / "cwd" / "child").read_text()))
    (left,) = node.texts("left_behind")
    assert left.startswith("stopped processes that the commands had left running: ")
    node.verdict()


def test_a_runner_that_is_killed_is_named(node_with, tmp_path):
    node = node_with("echo $PPID > runner.part; mv runner.part runner; sleep 300", grace_s=0.3)
    begun(node)
    eventually((tmp_path / "cwd" / "runner").exists)
    os.kill(int((tmp_path / "cwd" / "runner").read_text()), signal.SIGKILL)
    cause = messages(node)[-1].failures[0].cause
    assert (cause.category, cause.exit_code) == ("killed", -9)
    assert cause.exception.startswith("its command runner was killed by SIGKILL")
    assert node.texts("worker_failed")[0].startswith("the command runner was killed by SIGKILL")
    node.verdict(ERROR)


def test_a_runner_that_can_not_start_is_named(node_with):
    node = node_with("true", real=False)
    node.launch()
    agent = node.go()
    assert agent.options.workers == 0
    assert "-I" in agent.command
    ended = node.ends(agent, None, "could not be started: no more processes")
    assert ended.failures[0].cause.exception == "its command runner could not be started: no more processes"


@pytest.mark.parametrize(("number", "logs", "is_shown"), [(0, "rank0", True), (1, "rank0", False), (1, "all", True)])
def test_where_rank_0_alone_is_shown_so_are_the_commands_of_its_node(number, logs, is_shown, node_with, tmp_path):
    node = node_with("echo hello", number=number, logs=logs)
    vars(node.plan.spec)["log_dir"] = str(tmp_path / "logs")
    begun(node)
    assert messages(node)[-1].ok
    node.verdict()
    (kept,) = (tmp_path / "logs").glob("*/before_run/attempt_0/0/stdout.log")
    assert "\nhello\n" in kept.read_text()
    assert bool(node.output) is is_shown
    assert node.plan.shows_failures is is_shown


def test_when_its_guardian_is_killed_a_command_ends_all_the_same(node_with, tmp_path):
    node = node_with(STUBBORN, grace_s=0.3)
    begun(node)
    running = pids(tmp_path / "cwd")
    runner = psutil.Process(running[0]).parent()
    os.kill(runner.ppid(), signal.SIGKILL)
    cause = messages(node)[-1].failures[0].cause
    assert cause.exception.startswith("its guardian process ended unexpectedly, as by SIGKILL")
    assert not any(map(is_running, running))
    node.verdict(ERROR)


def test_a_commands_end_that_only_its_agent_tells(node_with, tmp_path):
    """A runner that leaves no record, as on a full disk, has failed all the same."""
    node = node_with("true", real=False)
    node.launch()
    agent = node.go()
    folder = node.agent_folder(agent)
    write(folder / "ended.jsonl", '{"number": 0, "status": 0, "error": null, "seconds": 0.1}\n{"number": 1, "sta')
    agent.say(End(1))
    told = messages(node)
    assert [type(each) for each in told] == [dict, Ended]
    assert told[-1].failures[0].cause.exception == "its command runner exited with code 1"
    node.verdict(ERROR)
