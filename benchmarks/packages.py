"""Environments for benchmarks: with all packages of this one but for Metaflow's extensions, and with other launchers."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

from report import Report

# What others have published for the same purpose, as their users install it.
OTHERS = ("metaflow-torchrun", "torchrunx")


def link_packages(folder: Path) -> None:
    """Fill a new folder with links to the packages of this environment, but for Metaflow's extensions."""
    import metaflow

    folder.mkdir(parents=True)
    for entry in Path(metaflow.__file__).parents[1].iterdir():
        if not entry.name.startswith(("metaflow_", "__editable__", "__pycache__")):
            (folder / entry.name).symlink_to(entry)


def with_others(folder: Path, report: Report) -> Path | None:
    """Return the Python of an environment with other launchers, beside this one's torch and Metaflow.

    It is made once in `folder`. None if the package index can't be reached.
    """
    folder = folder.absolute()
    python, done = folder / "venv" / "bin" / "python", folder / "done"
    if done.exists():
        return python
    link_packages(folder / "packages")
    venv.create(folder / "venv", symlinks=True)
    (own,) = (folder / "venv").glob("lib/python*/site-packages")
    (own / "packages.pth").write_text(f"{folder / 'packages'}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", *OTHERS]
    if subprocess.run(command, stdin=subprocess.DEVNULL).returncode:
        report.note(f"{', '.join(OTHERS)} of PyPI: skipped, they could not be installed")
        return None
    done.touch()
    return python
