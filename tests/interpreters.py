"""Which versions of Python this machine has."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

MINORS = (10, 11, 12, 13)  # of Python 3, as setup.py has them


UNFIT: dict[str, str] = {}
"""Interpreter -> why it is not among `interpreters`."""


@cache
def interpreters() -> dict[int, str]:
    """Return minor version -> interpreter, of those on the PATH, of pyenv's, and of those that ``PYTHONS`` names."""
    found: dict[int, str] = {}
    for candidate in _candidates():
        code = "import sys, ctypes, venv, ssl; print(*sys.version_info[:2], sys.executable)"
        # One of pyenv's shims may stand for a version that is not chosen, and fail.
        said = subprocess.run([candidate, "-I", "-c", code], capture_output=True, text=True, timeout=30)
        major, minor, path = said.stdout.strip().split(" ", 2) if said.returncode == 0 else ("0", "0", "")
        if said.returncode:
            UNFIT[candidate] = said.stderr.strip().rpartition("\n")[2]
        if major == "3":
            found.setdefault(int(minor), path)
    return found


def _candidates() -> Iterator[str]:
    yield from os.environ.get("PYTHONS", "").split()
    # Not the virtual environment's own: what is installed there must not be seen.
    yield os.path.realpath(sys.executable)
    yield from filter(None, (shutil.which(f"python3.{minor}") for minor in MINORS))
    pyenv = shutil.which("pyenv")
    if pyenv:
        root = subprocess.run([pyenv, "root"], capture_output=True, text=True, timeout=30, check=True).stdout.strip()
        yield from map(str, sorted(Path(root, "versions").glob("3.*/bin/python3")))
