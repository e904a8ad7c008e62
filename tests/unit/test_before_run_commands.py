"""The commands of `before_run`: what is taken for one, how it is shown, and the launch that they are."""

import os
from pathlib import Path

import pytest
from unit_helpers import HOSTILE, write

from metaflow_extensions.torchrun.plugins.torchrun.errors import TorchrunConfigError
from metaflow_extensions.torchrun.plugins.torchrun.features.before_run.feature import BeforeRun, CommandRecords
from metaflow_extensions.torchrun.plugins.torchrun.features.before_run.program import shown
from metaflow_extensions.torchrun.plugins.torchrun.gang.keepers import Happened
from metaflow_extensions.torchrun.plugins.torchrun.gang.protocol import Told
from metaflow_extensions.torchrun.plugins.torchrun.launch.spec import LaunchSpec
from metaflow_extensions.torchrun.plugins.torchrun.node.preludes import Asked, own_launch
from metaflow_extensions.torchrun.plugins.torchrun.settings import argument, parse_settings

SPEC = LaunchSpec("/flow/train.py", ("x",), False, nproc=2, num_nodes=3, node_index=1, python="/usr/bin/python3")


def commands(given):
    return argument("before_run", {"before_run": given})


# --- what is a command ---------------------------------------------------------------------------


def test_a_list_is_taken_as_it_is_and_a_text_by_a_shell():
    assert commands([["pip", "install", *HOSTILE], (Path("/a b"), "c"), "make data && echo $HOME"]) == (
        ("pip", "install", *HOSTILE),
        ("/a b", "c"),
        ("sh", "-ec", "make data && echo $HOME"),
    )
    assert commands(None) is None
    assert commands([]) == ()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("make data", ["run(before_run)", "list of commands", "'make data'"]),
        ({"a": 1}, ["list of commands", "{'a': 1}"]),
        ([["pip", 3]], ["run(before_run), command 1", "list of texts and paths"]),
        ([3], ["run(before_run), command 1 is 3"]),
        (["make", []], ["run(before_run), command 2", "names no program"]),
        ([[""]], ["names no program"]),
        (["  "], ["run(before_run), command 1 is empty"]),
        (["pip", "install", "-r"], ["run(before_run), command 3 is '-r'", "a list of their own", "['pip', 'install'"]),
        ([["a", "b\0"]], ["NUL"]),
    ],
)
def test_what_is_none_is_refused_with_the_reason(given, words):
    with pytest.raises(TorchrunConfigError) as caught:
        commands(given)
    assert all(word in str(caught.value) for word in words)


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
    shown(words).encode()


# --- the launch -----------------------------------------------------------------------------------


def test_the_launch_of_commands_has_folder_and_variables_of_the_workers_and_nothing_else(tmp_path):
    for name in ("cwd", "flow"):
        (tmp_path / name).mkdir()
    write(tmp_path / "flow" / "get.sh", "#!/bin/sh\n")
    given = {"env": (("A", "1"),), "cwd": str(tmp_path / "cwd"), "max_restarts": 3, "min_nodes": 1}
    whole = LaunchSpec(**{**vars(SPEC), **given, "options": (("role", "x"),)})
    arguments = {"before_run": [["./get.sh", "./x"], ["./absent"], ["make"]]}
    asked = Asked(arguments, parse_settings({}, "train"), str(tmp_path / "flow"), 3, True, False, print, print)
    prelude = BeforeRun().prelude(asked)
    spec = prelude.spec(whole)
    assert prelude.program.commands == ((str(tmp_path / "flow" / "get.sh"), "./x"), ("./absent",), ("make",))
    assert (spec.env, spec.cwd, spec.nproc) == (whole.env, whole.cwd, 2)
    assert (spec.args, spec.options, spec.max_restarts, spec.min_nodes) == ((), (), 0, None)
    assert os.path.isfile(spec.entrypoint)
    other = own_launch(LaunchSpec(**{**vars(SPEC), "command": ("python", "x.py")}), spec.entrypoint)
    assert spec.digest() == other.digest()  # nodes may have commands of their own


def test_each_command_that_has_ended_becomes_a_record():
    data = {"commands": [{"text": "größe 🙂", "seconds": 0.25, "exit_code": None}] * 2}
    remarks = CommandRecords().handle(3, Told(0, 0, "before_run", data), 7.0)
    assert remarks.happened == (Happened("command", 3, "größe 🙂", None, None, 0.25),) * 2
