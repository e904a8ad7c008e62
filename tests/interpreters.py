"""Which versions of Python this machine has."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

MINORS = (10, 11, 12, 13, 14)  # of Python 3, as setup.py has them
RARE = frozenset({14})  # which few distributions have yet, nor all machines of CI


UNFIT: dict[str, str] = {}
"""Interpreter -> why it is not among `interpreters`."""

# A virtual environment is made with it, and a flow runs in that.
_ASK = "import sys, ctypes, venv, ensurepip, ssl; print(*sys.version_info[:2], sys.executable)"
_ANSWER_S = 120  # on a machine with ten times the work that it can do, too


@cache
def interpreters() -> dict[int, str]:
    """Return minor version -> interpreter, of those on the PATH, of pyenv's, and of those that ``PYTHONS`` names."""
    found: dict[int, str] = {}
    for candidate in candidates():
        try:
            said = subprocess.run([candidate, "-I", "-c", _ASK], capture_output=True, text=True, timeout=_ANSWER_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            UNFIT[candidate] = str(error)
            continue
        major, minor, path = said.stdout.strip().split(" ", 2) if said.returncode == 0 else ("0", "0", "")
        if said.returncode:
            UNFIT[candidate] = said.stderr.strip().rpartition("\n")[2]
        if major == "3":
            found.setdefault(int(minor), path)
    return found


def candidates() -> Iterator[str]:
    """Yield interpreters to ask which version they are; each of pyenv's, also where its command is not on the PATH."""
    yield from os.environ.get("PYTHONS", "").split()
    # Not the virtual environment's own: what is installed there must not be seen.
    yield os.path.realpath(sys.executable)
    # One of pyenv's shims stands for a version that may not be chosen, and then it fails.
    folders = [each for each in os.environ.get("PATH", os.defpath).split(os.pathsep) if Path(each).name != "shims"]
    yield from filter(None, (shutil.which(f"python3.{minor}", path=os.pathsep.join(folders)) for minor in MINORS))
    own = Path(os.path.realpath(sys.executable)).parents  # ROOT/versions/3.11.7/bin/python3.11
    for root in (os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), own[min(3, len(own) - 1)]):
        yield from map(str, sorted(Path(root).glob("versions/3.*/bin/python3")))
