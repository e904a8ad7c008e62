"""What `run(before_run=...)` makes of a call: which commands it takes, and a launch before the user's own."""

import os
from pathlib import Path
from unittest.mock import Mock

import pytest
from recorded_calls import recorded_calls
from unit_helpers import HOSTILE, write

from metaflow_extensions.torchrun.plugins.torchrun import gang_of_one
from metaflow_extensions.torchrun.plugins.torchrun.errors import (
    EntrypointError,
    LaunchFailed,
    TorchrunConfigError,
    TorchrunPreempted,
)
from metaflow_extensions.torchrun.plugins.torchrun.features.before_run.feature import BeforeRun, CommandRecords
from metaflow_extensions.torchrun.plugins.torchrun.features.before_run.program import shown
from metaflow_extensions.torchrun.plugins.torchrun.gang.cause import Cause
from metaflow_extensions.torchrun.plugins.torchrun.gang.keepers import Happened
from metaflow_extensions.torchrun.plugins.torchrun.gang.policy import LaunchPolicy
from metaflow_extensions.torchrun.plugins.torchrun.gang.protocol import Told
from metaflow_extensions.torchrun.plugins.torchrun.launch.spec import LaunchSpec
from metaflow_extensions.torchrun.plugins.torchrun.node.preludes import Asked, own_launch
from metaflow_extensions.torchrun.plugins.torchrun.settings import argument, parse_settings
from metaflow_extensions.torchrun.plugins.torchrun.single_node import TorchrunSingleNodeMultiGPU


def commands(given):
    return argument("before_run", {"before_run": given})


# --- what is a command ---------------------------------------------------------------------------


def test_a_list_is_taken_as_it_is_and_a_text_by_a_shell():
    assert commands([["pip", "install", *HOSTILE], (Path("/a b"), "c"), "make data && echo $HOME"]) == (
        ("pip", "install", *HOSTILE),
        ("/a b", "c"),
        ("sh", "-ec", "make data && echo $HOME"),
    )
    assert (commands(None), commands([])) == (None, ())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("make data", ["run(before_run)", "list", "'make data'"]),
        ({"a": 1}, ["list", "{'a': 1}"]),
        ([["pip", 3]], ["run(before_run), command 1"]),
        ([3], ["command 1 is 3"]),
        (["make", []], ["command 2", "no program"]),
        ([[""]], ["no program"]),
        (["  "], ["command 1 is empty"]),
        (["pip", "install", "-r"], ["command 3 is '-r'", "['pip', 'install'"]),
        ([["a", "b\0"]], ["NUL"]),
    ],
)
def test_what_is_none_is_refused_with_the_reason(given, words):
    with pytest.raises(TorchrunConfigError) as caught:
        commands(given)
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["echo", "two words"], "echo 'two words'"),
        (["sh", "-ec", "a &&\n  b"], "a && b"),
        (["sh", "-ec", "a", "b"], "sh -ec a b"),
        (["x", os.fsdecode(b"\xff")], r"x '\udcff'"),
        (["x" * 300], "x" * 200 + "…"),
    ],
)
def test_it_is_shown_in_one_line(words, line):
    assert shown(words) == line


# --- the launch -----------------------------------------------------------------------------------


@pytest.fixture
def launch_of(monkeypatch, tmp_path):
    return recorded_calls(monkeypatch, tmp_path, (BeforeRun(),))


def test_what_runs_before_is_a_launch_of_its_own(launch_of, tmp_path):
    (tmp_path / "pip").touch(mode=0o755)
    env = {"A": "1", "PATH": str(tmp_path)}
    given = {"env": env, "cwd": str(tmp_path), "timeout_s": 60, "max_restarts": 2, "entrypoint_args": ["x"]}
    spec, _, said = launch_of(before_run=["pip install x", ["true"]], torchrun_args={"role": "x"}, **given)
    before, then = launch_of.plans
    assert before.program.commands == (("sh", "-ec", "pip install x"), ("true",))
    assert (before.is_ours, before.warm, before.facts) == (True, "off", {})
    assert before.policy == LaunchPolicy()  # the step's @timeout alone bounds it
    for each in (before, then):
        assert (each.spec.env, each.spec.cwd, each.spec.nproc) == (tuple(env.items()), str(tmp_path), 4)
    assert (before.spec.args, before.spec.options, before.spec.max_restarts) == ((), (), 0)
    assert os.path.isfile(before.spec.entrypoint)
    assert (then.spec, then.program, then.is_ours) == (spec, None, False)
    assert "before_run: 2 commands on 2 nodes, 1.5 s" in said
    assert any(line.startswith(f"pip is {tmp_path}/pip, but this step runs under") for line in said)


def test_a_program_beside_the_flow_is_found_and_nodes_may_have_commands_of_their_own(tmp_path):
    whole = LaunchSpec("/flow/train.py", ("x",), False, 2, 3, 1, "python3", cwd=str(tmp_path), min_nodes=1)
    script = write(tmp_path / "flow" / "get.sh", "#!/bin/sh\n")
    arguments = {"before_run": [["./get.sh", "./x"], ["./absent"], ["make"]]}
    asked = Asked(arguments, parse_settings({}, "train"), str(script.parent), 3, True, False, print, print)
    prelude = BeforeRun().prelude(asked)
    spec = prelude.spec(whole)
    assert prelude.program.commands == ((str(script), "./x"), ("./absent",), ("make",))
    other = own_launch(LaunchSpec(**{**vars(whole), "command": ("python", "x.py")}), spec.entrypoint)
    assert (spec.digest(), spec.min_nodes) == (other.digest(), None)


def test_each_command_that_has_ended_becomes_a_record():
    data = {"commands": [{"text": "größe 🙂", "seconds": 0.25, "exit_code": None}] * 2}
    remarks = CommandRecords().handle(3, Told(0, 0, "before_run", data), 7.0)
    assert remarks.happened == (Happened("command", 3, "größe 🙂", None, None, 0.25),) * 2


def test_the_entrypoint_is_looked_for_after_it(launch_of):
    with pytest.raises(EntrypointError, match=r"made\.py"):
        launch_of(positional=("made.py",), before_run=["true"])
    assert len(launch_of.plans) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"before_run": "make"},
        {"before_run": [], "cwd": "not there"},
        {"before_run": [], "timeout_s": "long"},
        {"before_run": [], "torchrun_args": {"nnodes": 7}},
    ],
    ids=lambda wrong: list(wrong)[-1],
)
def test_bad_input_is_refused_before_anything_runs(wrong, launch_of):
    with pytest.raises(TorchrunConfigError):
        launch_of(**wrong)
    assert launch_of.plans == []


def test_its_failure_is_told_as_its_own_and_nothing_is_launched(launch_of):
    launch_of.outcomes += [LaunchFailed("no", Cause("command", 1, "host", exit_code=1).as_dict())]
    with pytest.raises(LaunchFailed, match=r"^before_run failed") as caught:
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
    spares = Mock()
    launch_of(before_run=commands, warm=warm, warm_node=spares)
    assert spares.renew.call_count == renewed


def test_a_single_node_runs_it_too(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(gang_of_one, "print_errors_ourselves", lambda **_: None)
    monkeypatch.setattr(gang_of_one, "LiveCard", lambda *_, **__: Mock())
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LaunchFailed, match=r"Node 0 .* failed: before_run 2/2 \(false\) exited with code 1"):
        TorchrunSingleNodeMultiGPU().run(entrypoint=["sh", "x.sh"], before_run=["echo one > made", ["false"]])
    assert (tmp_path / "made").read_text() == "one\n"
    assert "[node 0 before_run 1/2] ended well after " in capfd.readouterr().err
