"""Which versions of Python this machine has."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
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
    for candidate in candidates(os.environ):
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


def candidates(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield interpreters to ask which version they are; each of pyenv's, also where its command is not on the PATH."""
    yield from environ.get("PYTHONS", "").split()
    # Not the virtual environment's own: what is installed there must not be seen.
    yield os.path.realpath(sys.executable)
    path = environ.get("PATH", os.defpath)
    # One of pyenv's shims stands for a version that may not be chosen, and then it fails.
    folders = [folder for folder in path.split(os.pathsep) if Path(folder).name != "shims"]
    yield from filter(None, (shutil.which(f"python3.{minor}", path=os.pathsep.join(folders)) for minor in MINORS))
    for root in _pyenv_roots(environ):
        for minor in MINORS:
            yield from map(str, sorted(root.glob(f"versions/3.{minor}.*/bin/python3")))


def _pyenv_roots(environ: Mapping[str, str]) -> dict[Path, None]:
    """Return where pyenv may have its versions, each once: a shell that is not interactive often knows nothing of it."""
    command = shutil.which("pyenv", path=environ.get("PATH", os.defpath))
    own = Path(os.path.realpath(sys.executable)).parents  # ROOT/versions/3.11.7/bin/python3.11
    named = [environ.get("PYENV_ROOT"), command and Path(os.path.realpath(command)).parents[1]]
    homes = [Path(home, ".pyenv") for home in (environ.get("HOME"), pwd.getpwuid(os.getuid()).pw_dir) if home]
    roots = [*map(Path, filter(None, named)), *homes, *(own[2:3] if own[1].parent.name == "versions" else ())]
    return dict.fromkeys(root for root in roots if (root / "versions").is_dir())
