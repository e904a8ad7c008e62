"""What `run(before_run=...)` makes of a call: a launch before the user's own."""

from unittest.mock import Mock

import pytest
from recorded_calls import recorded_calls

from metaflow_extensions.torchrun.plugins.torchrun import gang_of_one
from metaflow_extensions.torchrun.plugins.torchrun.errors import (
    EntrypointError,
    LaunchFailed,
    TorchrunConfigError,
    TorchrunPreempted,
)
from metaflow_extensions.torchrun.plugins.torchrun.features.before_run.feature import BeforeRun
from metaflow_extensions.torchrun.plugins.torchrun.gang.cause import Cause
from metaflow_extensions.torchrun.plugins.torchrun.gang.policy import LaunchPolicy
from metaflow_extensions.torchrun.plugins.torchrun.single_node import TorchrunSingleNodeMultiGPU


@pytest.fixture
def launch_of(monkeypatch, tmp_path):
    return recorded_calls(monkeypatch, tmp_path, (BeforeRun(),))


def test_what_runs_before_is_a_launch_of_its_own(launch_of, tmp_path):
    env = {"A": "1"}
    spec, _, said = launch_of(before_run=["make", ["true"]], env=env, timeout_s=60, max_restarts=2)
    before, then = launch_of.plans
    assert before.program.commands == (("sh", "-ec", "make"), ("true",))
    assert (before.is_ours, before.warm, before.facts) == (True, "off", {})
    assert before.policy == LaunchPolicy()  # the step's @timeout alone bounds it
    assert before.spec.env == then.spec.env == (("A", "1"),)
    assert (then.spec, then.program, then.is_ours) == (spec, None, False)
    assert "before_run: 2 commands on 2 nodes, 1.5 s" in said


def test_the_entrypoint_is_looked_for_after_it(launch_of, monkeypatch):
    with pytest.raises(EntrypointError, match=r"made\.py"):
        launch_of(positional=("made.py",), before_run=["true"])
    assert len(launch_of.plans) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"before_run": "make"},
        {"before_run": [[]]},
        {"before_run": [], "cwd": "not there"},
        {"before_run": [], "timeout_s": "long"},
        {"before_run": [], "torchrun_args": {"nnodes": 7}},
    ],
)
def test_bad_input_is_refused_before_anything_runs(wrong, launch_of):
    with pytest.raises(TorchrunConfigError):
        launch_of(**wrong)
    assert launch_of.plans == []


def test_its_failure_is_told_as_its_own_and_nothing_is_launched(launch_of):
    launch_of.outcomes += [LaunchFailed("no", Cause("command", 1, "host", exit_code=1).as_dict())]
    with pytest.raises(LaunchFailed, match="before_run failed, so no worker was started") as caught:
        launch_of(before_run=["false"])
    assert caught.value.cause["category"] == "before_run"
    assert isinstance(caught.value.__cause__, LaunchFailed)  # by which the gang knows it
    launch_of.outcomes += [TorchrunPreempted("it must end")]
    with pytest.raises(TorchrunPreempted, match=r"^it must end"):
        launch_of(before_run=["false"])
    assert len(launch_of.plans) == 2


@pytest.mark.parametrize(
    ("warm", "commands", "renewed"), [("workers", ["true"], 1), ("workers", [], 0), ("agent", ["true"], 0)]
)
def test_no_worker_becomes_of_a_spare_that_has_imported_before(warm, commands, renewed, launch_of):
    class Node:
        renewals = 0

        def renew(self):
            Node.renewals += 1

        def prepare(self):
            pass

    launch_of(before_run=commands, warm=warm, warm_node=Node())
    assert Node.renewals == renewed


def test_a_python_of_another_installation_is_told(launch_of, tmp_path):
    (tmp_path / "pip").touch(mode=0o755)
    said = launch_of(before_run=["pip install x"], env={"PATH": str(tmp_path)})[2]
    assert [line for line in said if line.startswith(f"pip is {tmp_path}/pip, but this step runs under")]


def test_a_single_node_runs_it_too(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(gang_of_one, "print_errors_ourselves", lambda **_: None)
    monkeypatch.setattr(gang_of_one, "LiveCard", lambda *_, **__: Mock())
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LaunchFailed, match=r"Node 0 .* failed: before_run 2/2 \(false\) exited with code 1"):
        TorchrunSingleNodeMultiGPU().run(entrypoint=["sh", "x.sh"], before_run=["echo one > made", ["false"]])
    assert (tmp_path / "made").read_text() == "one\n"
    assert "[node 0 before_run 1/2] ended well after " in capfd.readouterr().out
