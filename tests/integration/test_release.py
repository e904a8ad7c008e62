"""What `make dist` builds: a wheel with all that runs, and a source distribution with all that is tracked."""

from __future__ import annotations

import email
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from pathlib import Path

import pytest
from metaflow.metaflow_environment import MetaflowEnvironment

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


@pytest.fixture(scope="module")
def wheel(built: Path) -> zipfile.ZipFile:
    """Return the wheel, which was built out of the source distribution."""
    (file,) = built.glob("*.whl")
    return zipfile.ZipFile(file)


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    """Return what an index shows, and what pip reads."""
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return email.message_from_bytes(wheel.read(name))


def required(metadata: Message, extra: str | None = None) -> list[str]:
    """Return what is required by an extra, or without any."""
    entries = [entry.partition("; ") for entry in metadata.get_all("Requires-Dist", [])]
    return [name for name, _, when in entries if when == (f'extra == "{extra}"' if extra else "")]


def test_the_wheel_has_all_that_runs_and_nothing_else(wheel, project):
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    ours = {name for name in names if name.startswith("metaflow_extensions/")}
    assert ours == {name for name in files_of(project) if name.startswith("metaflow_extensions/")}
    assert names - ours == {"metaflow_torchrun/__init__.py", "metaflow_torchrun/py.typed"}, "what scripts import"
    assert "metaflow_extensions/torchrun/py.typed" in names
    (license_,) = (name for name in wheel.namelist() if name.endswith("/LICENSE"))
    assert wheel.read(license_) == (REPOSITORY / "LICENSE").read_bytes()


def test_an_index_is_told_what_it_is_and_what_it_needs(metadata):
    assert metadata["License-Expression"] == "Apache-2.0"
    assert required(metadata) == ["metaflow>=2.13"]
    assert required(metadata, "kubernetes") == ["kubernetes", "python-dateutil<3"]
    assert required(metadata, "functions") == ["cloudpickle"]
    for extra, datastore in [("aws", "s3"), ("azure", "azure"), ("gcp", "gs")]:
        command = MetaflowEnvironment(None)._get_install_dependencies_cmd(datastore)
        installed = set(command.partition("--disable-pip-version-check ")[2].partition(";")[0].split())
        assert set(required(metadata, extra)) == installed - {"requests"}, "what it installs in a task"


def test_the_page_for_an_index_has_no_links_to_files(metadata):
    assert metadata["Description-Content-Type"] == "text/markdown"
    page = metadata.get_payload(decode=True).decode()
    assert not re.findall(r"\]\((?!https?:)[^)]*\)|<picture>", page)
    assert "](https://metaflow.org)" in page
    assert "Install" in page
