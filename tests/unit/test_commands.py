"""Commands of the user's: what is taken for one, how it is shown, and where its program is looked for."""

import os
import sys
from pathlib import Path

import pytest
from unit_helpers import HOSTILE, write

from metaflow_extensions.torchrun.plugins.torchrun.errors import EntrypointError, LaunchTimeout, TorchrunConfigError
from metaflow_extensions.torchrun.plugins.torchrun.launch.before_run import as_before_run, before_spec
from metaflow_extensions.torchrun.plugins.torchrun.launch.commands import (
    argv_of,
    before_commands,
    find_program,
    foreign_python,
    shown,
    source_of,
)
from metaflow_extensions.torchrun.plugins.torchrun.launch.spec import LaunchSpec

SPEC = LaunchSpec("/flow/train.py", ("x",), False, nproc=2, num_nodes=3, node_index=1, python="/usr/bin/python3")


# --- what is a command ---------------------------------------------------------------------------


def test_a_list_is_taken_as_it_is_and_a_text_by_a_shell():
    assert before_commands([["pip", "install", *HOSTILE], (Path("/a b"), "c"), "make data && echo $HOME"]) == (
        ("pip", "install", *HOSTILE),
        ("/a b", "c"),
        ("sh", "-ec", "make data && echo $HOME"),
    )
    assert before_commands(None) is None
    assert before_commands([]) == ()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("make data", ["before_run", "list of commands", "but is a str", "'make data'"]),
        ({"a": 1}, ["list of commands", "dict"]),
        ([["pip", 3]], ["before_run[0]", "list of texts and paths"]),
        ([3], ["before_run[0] is 3"]),
        ([b"make"], ["before_run[0] is b'make'"]),
        (["make", []], ["before_run[1]", "names no program"]),
        ([[""]], ["names no program"]),
        (["  "], ["before_run[0] is an empty command"]),
        (["pip", "install", "-r"], ["before_run[2] is '-r'", "a list of their own", "['pip', 'install'"]),
        ([["--max-restarts=3"]], ["begins with '--max-restarts=3'", "torchrun_args"]),
        ([["a", "b\0"]], ["NUL"]),
        (["a\0b"], ["NUL"]),
    ],
)
def test_what_is_none_is_refused_with_the_reason(given, words):
    with pytest.raises(TorchrunConfigError) as caught:
        before_commands(given)
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


# --- its program ---------------------------------------------------------------------------------


@pytest.fixture
def places(tmp_path):
    """Return a working directory, the folder of a flow, and a folder of programs."""
    for name in ("cwd", "flow", "bin"):
        (tmp_path / name).mkdir()
    return tmp_path / "cwd", tmp_path / "flow", tmp_path / "bin"


def program(path):
    write(path, "#!/bin/sh\n").chmod(0o755)
    return str(path)


def test_a_bare_name_is_looked_for_in_the_path_that_the_workers_have(places):
    cwd, flow, folder = places
    program(folder / "mytool")
    assert find_program("mytool", str(cwd), str(flow), {"PATH": str(folder)}) == "mytool"
    program(cwd / "mytool")
    with pytest.raises(EntrypointError) as caught:
        find_program("mytool", str(cwd), str(flow), {"PATH": "/nowhere"})
    assert "PATH of this node (/nowhere)" in str(caught.value)
    assert "write './mytool'" in str(caught.value)
    assert find_program("mytool", str(cwd), str(flow), {"PATH": "/nowhere"}, may_come=True) == "mytool"
    assert find_program("sh", None, None, {}) == "sh"


def test_a_path_is_looked_for_in_the_working_directory_and_then_beside_the_flow(places):
    cwd, flow, _ = places
    beside = program(flow / "run me.sh")
    for may_come in (False, True):
        assert find_program("./run me.sh", str(cwd), str(flow), {}, may_come) == beside
    program(cwd / "run me.sh")
    assert find_program("./run me.sh", str(cwd), str(flow), {}) == "./run me.sh"  # as a shell there would run it
    assert find_program(beside, str(cwd), str(flow), {}) == beside


def test_a_path_that_leads_nowhere_names_every_place_looked_at(places):
    cwd, flow, _ = places
    with pytest.raises(EntrypointError) as caught:
        find_program("./run.sh", str(cwd), str(flow), {})
    assert str(cwd / "run.sh") in str(caught.value)
    assert str(flow / "run.sh") in str(caught.value)
    assert find_program("./run.sh", str(cwd), str(flow), {}, may_come=True) == "./run.sh"
    write(cwd / "run.sh", "")
    with pytest.raises(EntrypointError, match="chmod"):
        find_program("./run.sh", str(cwd), None, {})
    with pytest.raises(EntrypointError, match="does not exist"):
        find_program("..//", str(cwd), None, {})


@pytest.mark.parametrize(
    ("words", "source"),
    [
        (["python", "-O", "x.py"], "x.py"),
        (["python", "-m", "x"], None),
        (["./run.sh", "x.py"], "run.sh"),
        (["./absent.sh", "x.py"], None),
        (["torchrun-like", "--config", "config.yaml", "x.py"], "config.yaml"),
    ],
)
def test_the_file_that_must_be_the_same_on_all_nodes(words, source, tmp_path):
    for name in ("x.py", "run.sh", "config.yaml"):
        write(tmp_path / name, "")
    assert source_of(words[0], words, str(tmp_path)) == (source and str(tmp_path / source))


def test_a_python_of_another_installation_is_told(places):
    _, _, folder = places
    for name in ("python3.11", "pip"):
        program(folder / name)
    elsewhere, here = {"PATH": str(folder)}, {"PATH": os.path.dirname(sys.executable)}
    assert f"pip is {folder}/pip, but this step runs under {sys.executable}" in foreign_python(["pip", "x"], elsewhere)
    assert "'-m', 'pip'" in foreign_python(["sh", "-ec", "pip install x"], elsewhere)
    assert "write [sys.executable, ...]" in foreign_python(["python3.11", "x.py"], elsewhere)
    for words in (["make"], ["sh", "-ec", "pipe"], ["pip9"], ["/usr/bin/python3"], [], ["sh", "-ec", " "]):
        assert foreign_python(words, elsewhere) is None
    assert foreign_python(["python"], here) is None


# --- before the workers --------------------------------------------------------------------------


def test_the_launch_of_commands_has_folder_and_variables_of_the_workers_and_nothing_else(places):
    cwd, flow, _ = places
    beside = program(flow / "get.sh")
    given = {"env": (("A", "1"),), "cwd": str(cwd), "max_restarts": 3, "min_nodes": 1, "options": (("role", "x"),)}
    whole = LaunchSpec(**{**vars(SPEC), **given})
    spec = before_spec(whole, (("./get.sh", "./x"), ("./absent",), ("make",)), str(flow))
    assert spec.commands == ((beside, "./x"), ("./absent",), ("make",))
    assert (spec.env, spec.cwd, spec.nproc) == (whole.env, whole.cwd, 2)
    assert (spec.args, spec.options, spec.max_restarts, spec.min_nodes) == ((), (), 0, None)
    assert os.path.isfile(spec.entrypoint)
    other = before_spec(LaunchSpec(**{**vars(SPEC), "command": ("python", "x.py")}), (), None)
    assert spec.digest() == other.digest()  # nodes may have commands of their own


def test_its_failure_says_what_it_was():
    error = LaunchTimeout("it ran too long", {"kind": "timeout"})
    error.events = [{"kind": "timeout"}]
    told = as_before_run(error)
    assert (type(told), told.cause, told.events) == (LaunchTimeout, error.cause, error.events)
    assert str(told).startswith("before_run failed")
    assert str(told).endswith("\nit ran too long")


def test_a_command_takes_texts_and_paths():
    assert argv_of([Path("/bin/sh"), "-c"], "x") == ("/bin/sh", "-c")
