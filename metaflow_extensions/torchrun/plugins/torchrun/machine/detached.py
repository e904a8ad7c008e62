"""Starts processes that are no children of this one.

The step's own code may wait for all its children (``os.wait``), or count them. So a helper process that ends at once
starts ours, and the system's first process, or a subreaper, adopts it. Its end is recognised by its pid and start time.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from . import processes

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# It says which process goes on, or why there is none. Without site-packages (-S) an interpreter starts fast, and
# nothing that a user has installed can keep it from starting. The child goes on when that is said: what it writes itself
# comes after it.
_FORK = """
import os, sys
told, tell = os.pipe()
try:
    child = os.fork()
except OSError as error:
    child = -error.errno
if child:
    os.write(1, b"%d\\n" % child)
    os._exit(0)
os.close(tell)
os.read(told, 1)
os.close(told)
"""
# A module of this package runs without the package's `__init__`, which imports Metaflow, and without site-packages. To
# take the interpreter down in order would keep a task waiting for 16 ms more, and nothing is left to be done then.
OURS = """
import types
package = sys.modules['torchrun'] = types.ModuleType('torchrun')
package.__path__ = [sys.argv.pop(1)]
from torchrun.{module} import main
os._exit(main())
"""
PROGRAM = "os.dup2(os.open(os.devnull, os.O_WRONLY), 1); os.execv(sys.argv[1], sys.argv[1:])"


_HOME = "PYTHONHOME"
# Without -I the working folder and PYTHONPATH stand first. Python's own library is the last three entries, since -S adds
# none after it.
_OWN_PATH = "import sys\nsys.path[:] = sys.path[-3:]"


def isolated(python: str, env: Mapping[str, str]) -> list[str]:
    """Return Python with the options that keep it from what users have installed, and from their ``PYTHON*`` variables.

    A Python that needs PYTHONHOME to find its library does not start with -I, which ignores all of them. Then the program
    has to leave out what PYTHONPATH adds to its path.
    """
    return [python, "-s" if env.get(_HOME) else "-I", "-S"]


class Detached(processes.Other):
    """A process that runs `source`, Python code, with `words` as its arguments; its standard output is a pipe to us.

    With the source `PROGRAM` it becomes another program, whose output is discarded. `more` is what `Popen` takes.
    """

    def __init__(self, source: str, words: Sequence[str], env: Mapping[str, str], **more: Any) -> None:
        argv = [*isolated(sys.executable, env), "-c", (_OWN_PATH if env.get(_HOME) else "") + _FORK + source, *words]
        first = subprocess.Popen(argv, env=dict(env), stdout=subprocess.PIPE, **more)
        assert first.stdout is not None
        self.output = first.stdout
        said = _first_line(self.output.fileno())
        first.wait()
        pid = int(said or 0)
        if pid <= 0:
            self.output.close()
            why = os.strerror(-pid) if said else f"{sys.executable} has ended with exit code {first.returncode}"
            raise OSError(-pid, f"no process could be detached: {why}")
        super().__init__(pid, processes.began(pid))

    def wait(self, timeout_s: float | None = None) -> bool:
        """As `Other.wait`; a process that has adopted it after all, as a subreaper, reaps it."""
        has_ended = super().wait(timeout_s)
        if has_ended:
            with suppress(ChildProcessError):
                os.waitpid(self.pid, os.WNOHANG)
        return has_ended


def beside_task(module: str, words: Sequence[str], env: Mapping[str, str], stdin: int, **more: Any) -> Detached:
    """Start `main` of a module of ours in a process beside this one; its arguments begin with this one's pid and begin."""
    told = [_PACKAGE, str(os.getpid()), processes.began(os.getpid()), *words]
    return Detached(OURS.format(module=module), told, env, stdin=stdin, start_new_session=True, **more)


def beside(tasks: Iterable[processes.Process | processes.Other]) -> list[int]:
    """Return the pids of the processes that `beside_task` has started in these tasks, and that still run."""
    wanted = {(_PACKAGE, str(task.pid), task.began) for task in tasks}
    lines = {pid: processes.command_line(pid) for pid in map(int, filter(str.isdigit, os.listdir("/proc")))}
    return [pid for pid, words in lines.items() if wanted & set(zip(words, words[1:], words[2:], strict=False))]


def _first_line(file: int) -> bytes:
    line = b""
    # What comes after it is for others: nothing may be read ahead.
    while not line.endswith(b"\n") and (byte := os.read(file, 1)):
        line += byte
    return line
