"""Commands of the user's: where the program of one is looked for."""

import os
import sys
from pathlib import Path

import pytest
from unit_helpers import write

from metaflow_extensions.torchrun.plugins.torchrun.errors import EntrypointError
from metaflow_extensions.torchrun.plugins.torchrun.parsing import parse_argv
from metaflow_extensions.torchrun.plugins.torchrun.task.commands import (
    find_program,
    foreign_python,
    source_of,
)


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
    assert find_program("sh", None, None, {}) == "sh"


def test_a_path_is_looked_for_in_the_working_directory_and_then_beside_the_flow(places):
    cwd, flow, _ = places
    beside = program(flow / "run me.sh")
    assert find_program("./run me.sh", str(cwd), str(flow), {}) == beside
    program(cwd / "run me.sh")
    assert find_program("./run me.sh", str(cwd), str(flow), {}) == "./run me.sh"  # as a shell there would run it
    assert find_program(beside, str(cwd), str(flow), {}) == beside


def test_a_path_that_leads_nowhere_names_every_place_looked_at(places):
    cwd, flow, _ = places
    with pytest.raises(EntrypointError) as caught:
        find_program("./run.sh", str(cwd), str(flow), {})
    assert str(cwd / "run.sh") in str(caught.value)
    assert str(flow / "run.sh") in str(caught.value)
    write(cwd / "run.sh", "")
    with pytest.raises(EntrypointError, match="chmod"):
        find_program("./run.sh", str(cwd), None, {})
    with pytest.raises(EntrypointError, match="is a folder"):
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


def test_a_command_takes_texts_and_paths():
    assert parse_argv([Path("/bin/sh"), "-c"], "x") == ("/bin/sh", "-c")
