"""What `run(before_run=...)` makes of a call: which commands it takes, and what the launch has of them."""

import os
from pathlib import Path

import pytest
from recorded_calls import recorded_calls
from unit_helpers import HOSTILE, settings_of_run, write

from metaflow_extensions.torchrun.plugins.torchrun.errors import EntrypointError, TorchrunConfigError
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.commands import shown


def commands(given):
    return settings_of_run(before_run=given).before_run


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
        (["pip", "install", "-r"], ["command 3 is '-r'", "['pip', 'install'"]),
        ([["a", "b\0"]], ["NUL"]),
        ([f"echo {'x' * 140_000}"], ["command 1, word 3 has 140005 bytes", "Write it to a file"]),
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


# --- the call -------------------------------------------------------------------------------------


@pytest.fixture
def launch_of(monkeypatch, tmp_path):
    return recorded_calls(monkeypatch, tmp_path)


def test_the_launch_has_its_commands_and_none_of_the_facts_that_they_may_change(launch_of, tmp_path):
    (tmp_path / "pip").touch(mode=0o755)
    (tmp_path / "get.sh").touch()
    call, said = launch_of(
        before_run=["pip install x", ["./get.sh", "./x"]], env={"PATH": str(tmp_path)}, cwd=str(tmp_path)
    )
    assert (call.before_run, call.facts) == ((("sh", "-ec", "pip install x"), (str(tmp_path / "get.sh"), "./x")), {})
    assert any(line.startswith(f"pip is {tmp_path}/pip, but this step runs under") for line in said)


def test_the_entrypoint_is_looked_for_after_it(launch_of, tmp_path):
    launch_of(positional=("made.py",), before_run=["true"])
    with pytest.raises(EntrypointError, match=r"made\.py"):
        launch_of.complete()
    made = write(tmp_path / "made.py", "")
    assert launch_of.complete().entrypoint == str(made)
    with pytest.raises(EntrypointError, match=r"absent\.py"):
        launch_of(positional=("absent.py",), before_run=[])


def test_a_working_directory_that_it_removes_is_named(launch_of, tmp_path):
    (tmp_path / "work").mkdir()
    launch_of(positional=(["true"],), before_run=["true"], cwd="work")
    (tmp_path / "work").rmdir()
    with pytest.raises(TorchrunConfigError, match=r"After before_run, cwd is '.*work', but .* is not a folder"):
        launch_of.complete()
