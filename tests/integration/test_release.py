"""What `make dist` builds: a wheel with all that runs, and a source distribution with all that is tracked."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("release")

REPOSITORY = Path(__file__).parents[2]
# By examples, when somebody runs them.
LEFT_BEHIND = ("examples/min-gpt/trained", "examples/min-gpt/.metaflow/MinGPTFlow", "examples/frameworks/checkpoints")


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def known_to_git() -> set[str]:
    """Return the files of the project as git knows them; those that are new and not ignored, too."""
    if not (REPOSITORY / ".git").exists():
        pytest.skip("Not in a clone: a source distribution can't tell which files it lacks.")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return {name for name in listed.stdout.split("\0") if name and (REPOSITORY / name).exists()}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the project, so that nothing is left in it, and what was built before lends it nothing."""
    ignored = [line.strip("/") for line in (REPOSITORY / ".gitignore").read_text().splitlines() if "*/" not in line]
    copy = tmp_path_factory.mktemp("release") / "project"
    shutil.copytree(REPOSITORY, copy, ignore=shutil.ignore_patterns(".git", *ignored))
    for folder in LEFT_BEHIND:
        (copy / folder).mkdir(parents=True, exist_ok=True)
        (copy / folder / "model.pt").write_bytes(b"")
    return copy


@pytest.fixture(scope="module")
def built(project: Path) -> Path:
    """Build both as `make dist` does, the source distribution and out of it the wheel; return their folder."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", project.parent / "dist", project]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "is deprecated" not in done.stdout + done.stderr
    return project.parent / "dist"


def test_the_source_distribution_has_all_that_belongs_to_the_project(built):
    belongs = known_to_git()
    (file,) = built.glob("*.tar.gz")
    with tarfile.open(file) as archive:
        names = {name.partition("/")[2] for name in archive.getnames() if not archive.getmember(name).isdir()}
    assert belongs <= names
    extra = {name for name in names - belongs if ".egg-info/" not in name}
    assert extra == {"PKG-INFO", "setup.cfg"}


def test_the_wheel_has_all_that_runs_and_nothing_else_and_a_page_for_an_index(built, project):
    """It was built out of the source distribution. Its page has no links to files."""
    (file,) = built.glob("*.whl")
    wheel = zipfile.ZipFile(file)
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    ours = {name for name in names if name.startswith("metaflow_extensions/")}
    assert ours == {name for name in files_of(project) if name.startswith("metaflow_extensions/")}
    assert names - ours == {"metaflow_torchrun/__init__.py", "metaflow_torchrun/py.typed"}, "what scripts import"
    assert "metaflow_extensions/torchrun/py.typed" in names
    about = {name.rpartition("/")[2]: wheel.read(name) for name in wheel.namelist() if ".dist-info/" in name}
    assert about["LICENSE"] == (REPOSITORY / "LICENSE").read_bytes()
    page = about["METADATA"].decode()
    assert "Description-Content-Type: text/markdown\n" in page
    assert not re.findall(r"\]\((?!https?:)[^)]*\)|<picture>", page)
    assert "](https://metaflow.org)" in page
