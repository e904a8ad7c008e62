"""A type checker sees what a function's launch returns, and wrong arguments; also where Metaflow's stubs are installed."""

import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

SAMPLES = Path(__file__).parent / "typed"
CONFIG = Path(__file__).parents[2] / "pyproject.toml"
# What `metaflow develop stubs install` (2.19) does, but for building a wheel of it, for which pip asks its index.
MAKE_STUBS = (
    "import sys; from metaflow.cmd.develop.stub_generator import StubGenerator as G; G(sys.argv[1]).write_out()"
)


@pytest.fixture
def python_with_stubs(tmp_path):
    """Return the Python of an environment in which Metaflow's stubs are installed, and nothing else."""
    venv.create(tmp_path / "venv", symlinks=True)
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    done = subprocess.run(
        [sys.executable, "-c", MAKE_STUBS, packages / "metaflow-stubs"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return tmp_path / "venv" / "bin" / "python"


def check(sample, *options):
    """Run mypy over a sample; return what it says of which line."""
    command = [sys.executable, "-m", "mypy", "--no-error-summary", *options, SAMPLES / sample]
    done = subprocess.run(command, capture_output=True, text=True, cwd=CONFIG.parent, check=False)
    revealed, wrong = {}, set()
    for line, kind, text in re.findall(rf"{sample}:(\d+): (error|note): (.*)", done.stdout):
        shown = re.match(r'Revealed type is "(.*)"$', text)
        if shown:
            revealed[int(line)] = re.sub(r"\b(\w+\.)+(?=\w)", "", shown[1])
        elif kind == "error":
            wrong.add(int(line))
    lines = dict(enumerate((SAMPLES / sample).read_text(encoding="utf-8").splitlines(), 1))
    expected = {number: line.partition("# is ")[2] for number, line in lines.items() if "# is " in line}
    assert revealed == expected, done.stdout + done.stderr
    assert wrong == {number for number, line in lines.items() if line.endswith("# wrong")}, done.stdout
    return len(expected), len(wrong)


def test_mypy_sees_types_and_mistakes():
    # With the cache of `make lint`: what mypy knows of the package already takes seconds to find out.
    assert check("functions.py", "--config-file", CONFIG) == (13, 8)


def test_mypy_sees_them_through_metaflows_stubs(python_with_stubs, tmp_path):
    # As docs/install.md says: without the first option mypy looks into no step without types.
    own = ["--check-untyped-defs", "--config-file=", "--cache-dir", tmp_path / "cache"]
    own += ["--python-executable", python_with_stubs]
    assert check("stubbed.py", *own) == (5, 7)
