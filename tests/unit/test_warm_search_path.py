"""Whose modules a program would import that begins in a process which has imported some already."""

import os
import sys

import pytest
from unit_helpers import write

from metaflow_extensions.torchrun.plugins.torchrun.features.warm.imports import Imports, StartCold, first_entry


def refuse(folder):
    """Return why a program in `folder` may not run in this process; None if it may."""
    try:
        Imports([], sys.path[0], computes=False).check([sys.executable, "-u", "-m", "program"], os.environ, folder)
    except StartCold as reason:
        return str(reason)


@pytest.fixture(autouse=True)
def path(tmp_path, monkeypatch):
    """The path of a process whose own folder is ``own``."""
    (tmp_path / "own").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path / "own"), *sys.path[1:]])
    return tmp_path


def test_the_first_entry_is_the_folder_of_the_script_itself_or_the_working_directory(tmp_path):
    write(tmp_path / "real" / "script.py", "")
    os.symlink("real/script.py", tmp_path / "link.py")
    assert first_entry(["python", "-u", str(tmp_path / "link.py"), "a"], "/") == str(tmp_path / "real")
    assert first_entry(["python", "-u", "link.py"], str(tmp_path)) == str(tmp_path / "real")
    assert first_entry(["python", "-u", "-m", "link"], str(tmp_path)) == str(tmp_path)


@pytest.mark.parametrize("name", ["fractions.py", "fractions/__init__.py"])
def test_a_module_beside_the_program_comes_before_one_that_is_installed(tmp_path, name):
    import fractions

    write(tmp_path / "other" / name, "")
    assert (
        refuse(str(tmp_path / "other")) == f"{tmp_path}/other/{name} would be imported instead of {fractions.__file__}"
    )


@pytest.mark.parametrize(
    "name", ["fractions/notes.txt", "fractions.txt", "new.py", "__main__.py", "sys.py", "test.py/a"]
)
def test_what_nobody_would_import_does_no_harm(tmp_path, name):
    write(tmp_path / "other" / name, "")
    assert refuse(str(tmp_path / "other")) is None
    assert refuse(str(tmp_path / "no such folder")) is None


@pytest.mark.parametrize("name", ["of_own_folder.py", "of_own_folder/__init__.py"])
def test_what_was_imported_from_the_own_folder_is_for_programs_there_alone(tmp_path, monkeypatch, name):
    write(tmp_path / "own" / name, "")
    (tmp_path / "other").mkdir()
    monkeypatch.delitem(sys.modules, "of_own_folder", raising=False)
    __import__("of_own_folder")
    assert refuse(str(tmp_path / "own")) is None
    told = f"of_own_folder was imported from {tmp_path}/own, which is not on the program's path"
    assert refuse(str(tmp_path / "other")) == told
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "own")])
    assert refuse(str(tmp_path / "other")) is None
