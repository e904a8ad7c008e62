"""Runs some tests with many versions of Python, PyTorch and Metaflow, each in a fresh environment with our wheel.

``make test-matrix`` calls it. tests/WHERE.md has what it said.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
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
# 2.8.0 may deadlock where a process group ends: tests/WHERE.md says what was tried.
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


def main() -> int:
    """Run the rows that are asked for; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wheel", type=Path, required=True, help="what is tested, as `make dist` builds it")
    parser.add_argument("--folder", type=Path, default=REPOSITORY / ".matrix", help="where environments are made")
    parser.add_argument("--only", nargs="+", default=[], help="rows by a part of their name, such as 3.12 or /2.8.0/")
    options = parser.parse_args()
    rows = [row for row in ROWS if not options.only or any(part in row.name for part in options.only)]
    if not rows:
        parser.error(f"no row has {options.only} in its name: {', '.join(row.name for row in ROWS)}")
    lines = ["| Python | PyTorch | Metaflow | installed in | tests | took | |", "| --- " * 7 + "|"]
    for row in rows:
        print(f"== {row.name}", flush=True)
        lines.append(f"| {' | '.join(run_row(row, options.wheel.absolute(), options.folder.absolute()))} |")
        print(lines[-1], flush=True)
    print("\n".join(lines))
    return 0 if all(line.endswith("| passed |") for line in lines[2:]) else 1


def run_row(row: Row, wheel: Path, folder: Path) -> list[str]:
    """Make the environment of a row, run the tests in it, and remove it; return the cells of its line."""
    place, begin = folder / row.name.replace("/", "-"), time.monotonic()
    try:
        python = make_environment(row, place, wheel)
        install_s = time.monotonic() - begin
        asked = "import importlib.metadata as m; print(m.version('torch'), m.version('metaflow'))"
        said = subprocess.run([python, "-I", "-c", asked], check=True, capture_output=True, text=True).stdout
        passed, fault = run_tests(python, place)
        tests_s = time.monotonic() - begin - install_s
        return [row.python, *said.split(), f"{install_s:.0f} s", str(passed), f"{tests_s:.0f} s", fault or "passed"]
    except (KeyError, subprocess.CalledProcessError) as error:
        why = f"no Python {row.python}: name it in PYTHONS" if isinstance(error, KeyError) else str(error)
        return [row.python, row.torch, row.metaflow, "-", "-", "-", why]
    finally:
        shutil.rmtree(place, ignore_errors=True)


def make_environment(row: Row, place: Path, wheel: Path) -> Path:
    """Install a row's versions; return their interpreter."""
    python = place / "venv" / "bin" / "python"
    metaflow = "metaflow" if row.metaflow == NEWEST else f"metaflow=={row.metaflow}"
    shutil.rmtree(place, ignore_errors=True)
    subprocess.run([interpreters()[int(row.python.split(".")[1])], "-m", "venv", place / "venv"], check=True)
    pip = [python, "-m", "pip", "install", "--quiet", "--no-cache-dir"]
    subprocess.run([*pip, "--no-compile", f"torch=={row.torch}", metaflow, *TOOLS], check=True)
    subprocess.run([*pip, f"metaflow-torchrun[functions] @ {wheel.as_uri()}"], check=True)
    # The first import compiles thousands of modules. No test is to wait for that.
    subprocess.run([python, "-I", "-c", "import torch.distributed.run, metaflow"], cwd=place, check=False)
    return python


def run_tests(python: Path, place: Path) -> tuple[int, str]:
    """Run the marked tests where the only code of ours is what is installed; return how many passed, and what failed."""
    tree, report = place / "project", place / "report.xml"
    for name in ("tests", "examples"):
        shutil.copytree(REPOSITORY / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "pyproject.toml", tree)
    # Others would import what only an environment for all tests has.
    marked = [file for file in sorted(tree.glob("tests/integration/test_*.py")) if MARKER in file.read_text()]
    options = ["-n", "2", "--dist", "loadgroup", "-m", "matrix", f"--junitxml={report}"]
    # Without what would lead to another installation.
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run([python, "-m", "pytest", *options, *marked], cwd=tree, env=env, check=False)
    counts = ElementTree.parse(report).getroot().find("testsuite") if report.exists() else None
    names = ("tests", "failures", "errors", "skipped")
    tests, *others = [0] * 4 if counts is None else [int(counts.get(name, 0)) for name in names]
    if not done.returncode and tests and not any(others):
        return tests, ""
    told = ", ".join(f"{number} {name}" for name, number in zip(names[1:], others, strict=True) if number)
    return tests - sum(others), f"pytest ended with {done.returncode}: {told}"


if __name__ == "__main__":
    sys.exit(main())
