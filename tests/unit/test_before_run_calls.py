"""Which commands `run(before_run=...)` takes, and how they are shown."""

import os
from pathlib import Path

import pytest
from unit_helpers import HOSTILE, settings_of_run

from metaflow_extensions.torchrun.plugins.torchrun.errors import TorchrunConfigError
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.commands import shown


def commands(given):
    return settings_of_run(before_run=given).before_run


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
