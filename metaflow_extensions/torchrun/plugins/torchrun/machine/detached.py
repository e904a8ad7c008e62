"""Starts the process between a task and its supervisor, no child of the task: the step's code may wait for all its children.

A helper starts it and ends, and the system's first process, or a subreaper, adopts it.
"""

from __future__ import annotations

import os
import subprocess
import sys

from . import processes

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# A module of this package runs without the package's `__init__`, which imports Metaflow, and without site-packages. To
# take the interpreter down in order would keep a task waiting for 16 ms more, and nothing is left to be done then.
OURS = """
import os, sys, types
package = sys.modules['torchrun'] = types.ModuleType('torchrun')
package.__path__ = [sys.argv.pop(1)]
from torchrun.supervisor.between import main
os._exit(main())
"""


def start_between(stdin: int, grace_s: float) -> None:
    """Start the process between this task and its supervisor, whose link to the task is `stdin`. Raises OSError.

    Its `main` forks, and returns an error's number in the process that has started it. What users have installed, and
    their ``PYTHON*`` variables, do not reach it (-I); without site-packages (-S) it starts fast.
    """
    task = os.getpid()
    argv = [sys.executable, "-I", "-S", "-c", OURS, _PACKAGE, str(task), processes.began(task), str(grace_s)]
    code = subprocess.run(argv, stdin=stdin, start_new_session=True, check=False).returncode
    if code:
        why = os.strerror(code) if code > 1 else f"{sys.executable} has ended with exit code {code}"
        raise OSError(code, f"no process could be detached: {why}")
