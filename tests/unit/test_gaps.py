"""Which tests may be left out, where, and that CI hears of it; and where interpreters are looked for."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from interpreters import candidates

TESTS = Path(__file__).parents[1]
# File -> why tests of it may be left out in CI, too. In all others a test that can't run calls `gap`.
BY_NATURE = {
    "gpu/test_gpus.py": "there is no GPU, or one where two are needed",
    "hosts.py": "network namespaces need root; NETWORKS_REQUIRED tells that this machine has them",
    "chromium.py": "a browser is a gigabyte; BROWSER_REQUIRED tells that this machine has one",
    "integration/test_mpi.py": "the PyTorch of PyPI and that of Debian 12 have no MPI, that of Debian 13 has",
    "integration/test_release.py": "a source distribution can't tell which files it lacks",
    "integration/test_shipping.py": "Python 3.14 is in few distributions",
    "remote/test_argo.py": "the cluster has what the test would start itself",
    "unit/test_network.py": "a kernel without IPv6",
}


def skips() -> Iterator[tuple[str, str]]:
    """Yield the file and the source of every call that leaves tests out."""
    for path in sorted(TESTS.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Attribute) and node.attr in ("skip", "skipif", "importorskip", "xfail"):
                yield str(path.relative_to(TESTS)), ast.get_source_segment(source, node) or ""


def test_only_what_is_by_nature_so_leaves_tests_out_in_ci():
    found = {name for name, call in skips() if call.startswith("pytest.")}
    assert found == {*BY_NATURE, "gaps.py"}


@pytest.mark.parametrize(("ci", "outcome"), [("true", "1 failed"), ("0", "1 skipped")])
def test_a_gap_fails_in_ci_and_skips_elsewhere(ci, outcome, tmp_path):
    test = tmp_path / "test_gap.py"
    test.write_text("from gaps import gap\ndef test(): gap('No Python 3.12 on this machine.', 'Install it.')\n")
    env = {**os.environ, "CI": ci, "PYTHONPATH": str(TESTS)}
    command = [sys.executable, "-m", "pytest", "-ra", "-p", "no:cacheprovider", "--rootdir", tmp_path, test]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert outcome in done.stdout
    assert re.search(r"No Python 3\.12 on this machine\. .*Install it\.", done.stdout)


def test_ci_says_that_it_is_ci():
    assert "export CI=true" in (TESTS.parent / ".ci" / "run").read_text(encoding="utf-8")


@pytest.mark.parametrize("how", ["root", "home", "command"])
def test_versions_of_pyenv_are_found_without_its_shims(how, tmp_path):
    """As in a shell that has read no profile: its command may not be on the PATH, or its shims alone are."""
    root = tmp_path / "a folder" / ".pyenv"
    programs = [root / "versions" / version / "bin" / "python3" for version in ("3.12.1", "3.9.18")]
    for program in (*programs, root / "shims" / "python3.12", root / "bin" / "pyenv"):
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text("#!/bin/sh\nexit 127\n")
        program.chmod(0o755)
    environ = {
        "root": {"PYENV_ROOT": str(root), "PATH": str(root / "shims")},
        "home": {"HOME": str(root.parent), "PATH": ""},
        "command": {"PATH": f"{root / 'shims'}:{root / 'bin'}"},
    }[how]
    found = [each for each in candidates(environ) if each.startswith(str(tmp_path))]
    assert found == [str(programs[0])]


def test_an_interpreter_that_is_named_comes_first():
    assert next(candidates({"PYTHONS": "/a/python3.14 /b/python3.14", "PATH": ""})) == "/a/python3.14"
