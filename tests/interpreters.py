"""Which versions of Python this machine has."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

MINORS = (10, 11, 12, 13, 14)  # of Python 3, as setup.py has them
RARE = frozenset({14})  # which few distributions have yet, nor all machines of CI
# A virtual environment is made with it, and a flow runs in that.
_ASK = "import sys, ctypes, venv, ensurepip, ssl; print(sys.version_info[1], sys.executable)"


@cache
def interpreters() -> dict[int, str]:
    """Return minor version -> interpreter, of those that ``PYTHONS`` names, of those on the PATH, and of pyenv's."""
    # Not the virtual environment's own: what is installed there must not be seen.
    own = Path(os.path.realpath(sys.executable))
    candidates = [*os.environ.get("PYTHONS", "").split(), str(own)]
    # One of pyenv's shims stands for a version that may not be chosen, and then it fails.
    path = os.pathsep.join(each for each in os.environ.get("PATH", os.defpath).split(os.pathsep) if "shims" not in each)
    candidates += filter(None, (shutil.which(f"python3.{minor}", path=path) for minor in MINORS))
    for root in (Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")), Path(*own.parts[:-4])):
        candidates += map(str, sorted(root.glob("versions/3.1*/bin/python3")))
    found: dict[int, str] = {}
    for candidate in candidates:
        said = subprocess.run([candidate, "-I", "-c", _ASK], capture_output=True, text=True, check=False)
        if said.returncode == 0:
            minor, where = said.stdout.strip().split(" ", 1)
            found.setdefault(int(minor), where)
    return found
