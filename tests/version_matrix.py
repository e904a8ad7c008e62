"""Runs some tests with many versions of Python, PyTorch and Metaflow, each in a fresh environment with our wheel.

``make test-matrix`` calls it. docs/versions.md has what it said, and a test compares the rows.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from interpreters import interpreters

REPOSITORY = Path(__file__).parents[1]
NEWEST = "newest"
MARKER = "@pytest.mark.matrix"


class Row(NamedTuple):
    """What is run together."""

    python: str
    torch: str
    metaflow: str

    @property
    def name(self) -> str:
        return f"{self.python}/{self.torch}/{self.metaflow}"


# As few as there are versions of PyTorch, so that every version stands here once. The tests meet over gloo, which before
# 2.8.0 may deadlock where a process group ends: docs/versions.md says what was tried.
ROWS = (
    Row("3.12", "2.8.0", "2.13"),
    Row("3.13", "2.9.1", NEWEST),
    Row("3.10", "2.11.0", NEWEST),
    Row("3.11", "2.13.0", "2.13"),
    Row("3.12", "2.14.1", NEWEST),
    Row("3.14", "2.15.0", NEWEST),
)
# What the tests that are marked `matrix` import. Of PyTorch's own requirements pip takes care.
TOOLS = ("pytest>=8", "pytest-timeout", "pytest-xdist", "psutil", "numpy")


@dataclass
class Outcome:
    """What has become of a row."""

    row: Row
    metaflow: str = "-"
    torch: str = "-"
    install_s: float = 0.0
    passed: int = 0
    tests_s: float = 0.0
    fault: str = ""


def main() -> int:
    """Run the rows that are asked for; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wheel", type=Path, required=True, help="what is tested, as `make dist` builds it")
    parser.add_argument("--folder", type=Path, default=REPOSITORY / ".matrix", help="where environments are made")
    parser.add_argument("--only", nargs="+", default=[], help="rows by a part of their name, such as 3.12 or /2.8.0/")
    parser.add_argument("--keep", action="store_true", help="leave the environments, 5 GB each, for the next time")
    options = parser.parse_args()
    rows = [row for row in ROWS if not options.only or any(part in row.name for part in options.only)]
    if not rows:
        parser.error(f"no row has {options.only} in its name: {', '.join(row.name for row in ROWS)}")
    outcomes = []
    for row in rows:
        print(f"== {row.name}", flush=True)
        outcomes.append(run_row(row, options.wheel.absolute(), options.folder.absolute(), options.keep))
        print(table([outcomes[-1]]), flush=True)
    print(table(outcomes))
    failed = sum(bool(outcome.fault) for outcome in outcomes)
    print(f"{len(outcomes) - failed} passed, {failed} failed")
    return 1 if failed else 0


def run_row(row: Row, wheel: Path, folder: Path, keep: bool) -> Outcome:
    """Make the environment of a row, run the tests in it, and remove it."""
    outcome, place = Outcome(row), folder / row.name.replace("/", "-")
    begin = time.monotonic()
    try:
        python = make_environment(row, place)
        run_pip(python, "install", f"metaflow-torchrun[functions] @ {wheel.as_uri()}")
        outcome.install_s = time.monotonic() - begin
        outcome.metaflow, outcome.torch = versions(python)
        run_tests(outcome, python, place)
    except CannotInstall as error:
        outcome.fault = str(error)
    finally:
        if not keep:
            shutil.rmtree(place, ignore_errors=True)
    return outcome


class CannotInstall(Exception):
    """What could not be installed, and why."""


def make_environment(row: Row, place: Path) -> Path:
    """Install a row's versions, unless they are there from the last time; return their interpreter.

    Raises
    ------
    CannotInstall
        If there is no such Python, or pip has failed.
    """
    python, installed = place / "venv" / "bin" / "python", place / "installed"
    metaflow = "metaflow" if row.metaflow == NEWEST else f"metaflow=={row.metaflow}"
    wanted = [f"torch=={row.torch}", metaflow, *TOOLS]
    if installed.exists() and installed.read_text() == repr(wanted):
        run_pip(python, "uninstall", "--yes", "metaflow-torchrun")
        return python
    base = interpreters().get(int(row.python.split(".")[1]))
    if base is None:
        raise CannotInstall(f"no Python {row.python} was found: put it on the PATH, or name it in PYTHONS")
    shutil.rmtree(place, ignore_errors=True)
    subprocess.run([base, "-m", "venv", place / "venv"], check=True)
    run_pip(python, "install", "--no-compile", "--no-cache-dir", *wanted)
    # The first import compiles thousands of modules. No test is to wait for that.
    subprocess.run([python, "-I", "-c", "import torch.distributed.run, metaflow"], cwd=place, check=False)
    installed.write_text(repr(wanted))
    return python


def run_pip(python: Path, *words: str) -> None:
    """Run pip of an environment, or raise CannotInstall."""
    if (done := subprocess.run([python, "-m", "pip", words[0], "--quiet", *words[1:]], check=False)).returncode:
        raise CannotInstall(f"pip {words[0]} ended with {done.returncode}")


def versions(python: Path) -> tuple[str, str]:
    """Return the versions of Metaflow and PyTorch that an environment has."""
    asked = "import importlib.metadata as m; print(m.version('metaflow'), m.version('torch'))"
    said = subprocess.run([python, "-I", "-c", asked], check=True, capture_output=True, text=True)
    metaflow, torch = said.stdout.split()
    return metaflow, torch


def run_tests(outcome: Outcome, python: Path, place: Path) -> None:
    """Run the marked tests where the only code of ours is what is installed."""
    tree = place / "project"
    shutil.rmtree(tree, ignore_errors=True)
    for name in ("tests", "examples"):
        shutil.copytree(REPOSITORY / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "pyproject.toml", tree)
    # Others would import what only an environment for all tests has.
    marked = [file for file in sorted(tree.glob("tests/integration/test_*.py")) if MARKER in file.read_text()]
    report, begin = place / "report.xml", time.monotonic()
    tests = [python, "-m", "pytest", "-n", "2", "--dist", "loadgroup", "-m", "matrix", f"--junitxml={report}"]
    done = subprocess.run([*tests, *marked], cwd=tree, env=environment(), check=False)
    outcome.tests_s = time.monotonic() - begin
    counts = ElementTree.parse(report).getroot().find("testsuite") if report.exists() else None
    names = ("tests", "failures", "errors", "skipped")
    tests, *others = [0] * 4 if counts is None else [int(counts.get(name, 0)) for name in names]
    outcome.passed = tests - sum(others)
    if done.returncode or not tests or outcome.passed != tests:
        told = ", ".join(f"{number} {name}" for name, number in zip(names[1:], others, strict=True) if number)
        outcome.fault = f"pytest ended with {done.returncode}" + (f": {told}" if told else "")


def environment() -> dict[str, str]:
    """Return this process's environment without what would lead to another installation."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}


def table(outcomes: Sequence[Outcome]) -> str:
    """Return a table in Markdown."""
    lines = ["| Python | PyTorch | Metaflow | installed in | tests | took | |", "| --- " * 7 + "|"]
    for outcome in outcomes:
        words = (outcome.row.python, outcome.torch, outcome.metaflow, f"{outcome.install_s:.0f} s", outcome.passed)
        lines.append(
            "| " + " | ".join(map(str, (*words, f"{outcome.tests_s:.0f} s", outcome.fault or "passed"))) + " |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
