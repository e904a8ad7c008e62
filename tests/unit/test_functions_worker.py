"""Functions in real workers, without torch and torchrun: what they find there and what comes back.

Each program in ``programs`` is a task of its own; its cases are the tests here. A program runs once for all.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"
NO_METAFLOW = {"NO_METAFLOW_IN_WORKERS": "1"}


def cases(program):
    return re.findall(r"^def (case_\w+)", (PROGRAMS / program).read_text(encoding="utf-8"), re.MULTILINE)


def start(folder, words, stdin=None, **env):
    """Run one program to its end."""
    own = {"METAFLOW_USER": "tester", "TMPDIR": str(folder)}  # a case looks at what it leaves there
    paths = {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])} if stdin else {}
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, **own, **paths, **env},
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with the programs and what they import."""
    place = tmp_path_factory.mktemp("programs") / "it's a größe $HOME"
    shutil.copytree(PROGRAMS, place)
    return place


def failures(done):
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def failed_calls(folder):
    """Run the cases of a program whose file has no suffix; return which have failed, and how."""
    (folder / "calls.py").rename(folder / "my program")
    return failures(start(folder, ["my program"], **NO_METAFLOW))


@pytest.mark.parametrize("name", cases("calls.py"))
def test_a_call(name, failed_calls):
    assert name not in failed_calls, failed_calls[name]


@pytest.fixture(scope="module")
def failed_cells(folder):
    """Run the cases of a program without a file, as a notebook or a shell is."""
    return failures(start(folder, ["-"], stdin=(PROGRAMS / "shell.py").read_text(encoding="utf-8"), **NO_METAFLOW))


@pytest.mark.parametrize("name", cases("shell.py"))
def test_a_call_without_a_file(name, failed_cells):
    assert name not in failed_cells, failed_cells[name]


def test_a_flow_file_that_runs_its_flow_at_once_and_the_flows_own_methods(folder, tmp_path):
    home = {"METAFLOW_DATASTORE_SYSROOT_LOCAL": str(tmp_path), "METAFLOW_DEFAULT_METADATA": "local"}
    done = start(folder, ["flows.py", "--no-pylint", "run"], **home)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all cases passed" in done.stdout
    assert len(list(tmp_path.glob("**/CarelessFlow/[0-9]*"))) == 1, "a worker has started a run"


def test_a_program_that_is_a_module_of_a_package(folder):
    package = folder / "pkg"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "sibling.py").write_text("NAME = 'a sibling'\n")
    program = (
        "from . import sibling\n"
        "def name(): return sibling.NAME\n"
        "if __name__ == '__main__':\n"
        "    import task\n"
        "    assert task.value_of(name) == 'a sibling'\n"
    )
    (package / "program.py").write_text(program)
    done = start(folder, ["-m", "pkg.program"], **NO_METAFLOW)
    assert done.returncode == 0, done.stderr
