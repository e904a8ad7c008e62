"""The guardian: the parent of a supervisor. It waits until that ends, and then ends all that is left of it.

A supervisor that is killed by SIGKILL can't clean up, and workers outlive an agent that is killed. All that descends from
a supervisor comes to its guardian then, a child subreaper. After a supervisor's own end nothing is left to do.
A supervisor that somebody has stopped is continued: else the gang, or a task that is gone, would leave it to its workers.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import time
from collections.abc import Iterable
from contextlib import suppress

from ..compat import linux
from ..machine.estate import Estate
from ..machine.processes import children, continue_stopped, living_descendants, send_signal

_KILL_WAIT_S = 10.0  # after SIGKILL only a process in uninterruptible sleep stays
_CONTINUE_S = 1.0  # between two looks at the supervisor
_LOOK_S = 0.02


def main() -> int:
    """Start a supervisor as a child, and guard it."""
    linux.adopt_orphans()
    have_default_signals()
    told, tell = os.pipe()
    supervisor = os.fork()
    if supervisor == 0:
        os.close(told)
        os.set_blocking(tell, False)  # nobody waits for a guardian that somebody has stopped
        from .process import main as supervise

        return supervise(tell)
    _keep_only(told)
    guard(supervisor, told)
    return 0


def have_default_signals() -> None:
    """Reset all signals to their defaults, whatever the step's code has set; heed neither Ctrl-C nor SIGTERM."""
    # Ignored signals survive exec, so those of the step's code would reach the workers. With SIGCHLD ignored, the
    # kernel would reap our children and their exit codes would be lost.
    # Python ignores two for itself; a Popen sets them back in its child.
    for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:
        with suppress(OSError):  # SIGKILL and SIGSTOP
            signal.signal(number, signal.SIG_DFL)
    # Ctrl-C is the task's, and so is an order to all processes of a container. Handlers, not SIG_IGN, which workers
    # would inherit.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # last, since a blocked signal may be pending and arrives now


def _keep_only(*files: int) -> None:
    """Close all other files: whoever reads the task's output, or its connection, waits for the end of all copies."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd not in files:
            with suppress(OSError):  # that of the listing itself
                os.close(fd)


def guard(supervisor: int, told: int) -> None:
    """Read what the supervisor tells until its end, and then end what it has left."""
    estate, rest = Estate(), b""
    pipes: list[int] = []
    while data := _read(supervisor, told):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            estate = Estate(*json.loads(line))
            _close(pipes)
            # Held so that no worker that saves dies of its next line when the supervisor, which reads them, is gone.
            pipes = [] if estate.pipes is None else list(_open_pipes(estate.pipes))
    os.waitpid(supervisor, 0)
    _end_all(estate, pipes)
    for folder in estate.folders:
        shutil.rmtree(folder, ignore_errors=True)


def _read(supervisor: int, told: int) -> bytes:
    """Wait for what the supervisor tells, and continue it meanwhile."""
    poll = select.poll()
    poll.register(told, select.POLLIN)
    while not poll.poll(1000 * _CONTINUE_S):
        continue_stopped(supervisor)
    return os.read(told, 65536)


def _open_pipes(folder: str) -> Iterable[int]:
    with suppress(OSError):
        for each in os.scandir(folder):
            with suppress(OSError):
                yield os.open(each.path, os.O_RDWR | os.O_NONBLOCK)


def _close(files: Iterable[int]) -> None:
    for file in files:
        os.close(file)


def _end_all(estate: Estate, pipes: list[int]) -> None:
    own, now = os.getpid(), time.monotonic()
    for pid in children(own):
        if pid != estate.agent:
            send_signal(pid, signal.SIGTERM)
            send_signal(pid, signal.SIGCONT)
    while (left := living_descendants(own)) and time.monotonic() < now + estate.grace_s + _KILL_WAIT_S:
        if time.monotonic() >= now + estate.grace_s:
            for pid in left:
                send_signal(pid, signal.SIGKILL)
        for pipe in pipes:
            with suppress(BlockingIOError):
                os.read(pipe, 65536)
        time.sleep(_LOOK_S)
