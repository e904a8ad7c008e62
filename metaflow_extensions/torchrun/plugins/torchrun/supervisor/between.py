"""The process between a task and its supervisor: the supervisor's parent, which ends what a killed one leaves behind.

All that descends from a supervisor that was killed comes to this process, a child subreaper. The agent gets SIGTERM from
the kernel by itself, and stops its workers. It is no child of the task, whose code may wait for all its children: a helper
starts it and ends, and the system's first process, or a subreaper, adopts it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from types import FrameType

from ..compat import linux
from ..machine.processes import began, living_descendants, send_signal

_KILL_WAIT_S = 10.0  # after SIGKILL only a process in uninterruptible sleep stays
_LOOK_S = 0.02
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


def start_between(link: int, grace_s: float) -> None:
    """Start this process beside this task, and a supervisor whose connection to the task is `link`. Raises OSError.

    What users have installed, and their ``PYTHON*`` variables, do not reach it (-I). Without site-packages (-S) it starts
    fast.
    """
    import subprocess

    task = os.getpid()
    argv = [sys.executable, "-I", "-S", "-c", OURS, _PACKAGE, str(task), began(task), str(grace_s)]
    code = subprocess.run(argv, stdin=link, start_new_session=True, check=False).returncode
    if code:
        why = os.strerror(code) if code > 1 else f"{sys.executable} has ended with exit code {code}"
        raise OSError(code, f"no process could be detached: {why}")


def main() -> int:
    """Fork, and return an error's number if that fails. There start a supervisor as a child, wait for its end, and end what
    is left then within ``grace_s``.
    """
    try:
        if os.fork():
            return 0
    except OSError as error:
        return error.errno or 1
    grace_s = float(sys.argv.pop())
    linux.adopt_orphans()
    have_default_signals()
    between, supervisor = os.getpid(), os.fork()
    if supervisor == 0:
        from .process import main as supervise

        return supervise(between)
    _close_files()
    os.waitpid(supervisor, 0)
    for pid in living_descendants():
        send_signal(pid, signal.SIGTERM)
    kill_at = time.monotonic() + grace_s
    while (left := living_descendants()) and time.monotonic() < kill_at + _KILL_WAIT_S:
        for pid in left if time.monotonic() >= kill_at else ():
            send_signal(pid, signal.SIGKILL)
        time.sleep(_LOOK_S)
    return 0


def _nothing(number: int, frame: FrameType | None) -> None:
    # Ctrl-C is the task's, and so is an order to all processes of a container. SIG_IGN would be inherited by workers.
    pass


def have_default_signals() -> None:
    """Reset all signals to their defaults, whatever the step's code has set; heed neither Ctrl-C nor SIGTERM."""
    # Ignored signals survive exec, so those of the step's code would reach the workers. With SIGCHLD ignored, the
    # kernel would reap our children and their exit codes would be lost.
    # Python ignores two for itself; a Popen sets them back in its child.
    for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:
        with suppress(OSError):  # SIGKILL and SIGSTOP
            signal.signal(number, _nothing if number in (signal.SIGINT, signal.SIGTERM) else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # last, since a blocked signal may be pending and arrives now


def _close_files() -> None:
    """Close all files: whoever reads the task's output, or its connection, waits for the end of all copies."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    os.closerange(3, max(map(int, os.listdir("/proc/self/fd"))) + 1)
