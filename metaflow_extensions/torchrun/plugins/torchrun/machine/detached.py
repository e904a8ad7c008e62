"""Starts processes of ours beside a task, which are no children of it: the step's own code may wait for all its children.

A helper starts ours and ends, and the system's first process, or a subreaper, adopts it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from . import processes

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# A module of this package runs without the package's `__init__`, which imports Metaflow, and without site-packages. To
# take the interpreter down in order would keep a task waiting for 16 ms more, and nothing is left to be done then.
OURS = """
import os, sys, types
package = sys.modules['torchrun'] = types.ModuleType('torchrun')
package.__path__ = [sys.argv.pop(1)]
from torchrun.{module} import main
os._exit(main())
"""
_HOME = "PYTHONHOME"
# Without -I the working folder and PYTHONPATH stand first. Python's own library is the last three entries, since -S adds
# none after it.
_OWN_PATH = "import sys\nsys.path[:] = sys.path[-3:]"


def isolated(python: str, env: Mapping[str, str]) -> list[str]:
    """Return Python with the options that keep it from what users have installed, and from their ``PYTHON*`` variables.

    A Python that needs PYTHONHOME to find its library does not start with -I, which ignores all of them. Then the program
    has to leave out what PYTHONPATH adds to its path. Without site-packages (-S) it starts fast.
    """
    return [python, "-s" if env.get(_HOME) else "-I", "-S"]


def beside_task(module: str, words: Sequence[str], env: Mapping[str, str], stdin: int, **more: Any) -> None:
    """Start `main` of a module of ours in a process beside this one; its arguments begin with this one's pid and begin.

    That `main` forks, and returns an error's number in the process that has started it. Raises OSError.
    """
    task = os.getpid()
    source = (_OWN_PATH if env.get(_HOME) else "") + OURS.format(module=module)
    argv = [*isolated(sys.executable, env), "-c", source, _PACKAGE, str(task), processes.began(task), *words]
    code = subprocess.run(argv, env=dict(env), stdin=stdin, start_new_session=True, check=False, **more).returncode
    if code:
        why = os.strerror(code) if code > 1 else f"{sys.executable} has ended with exit code {code}"
        raise OSError(code, f"no process could be detached: {why}")
