"""Makes SIGTERM and SIGHUP do what Ctrl-C does, in the processes that submit a run.

By default both end ``flow.py run`` at once, without cleanup, and its tasks and remote jobs go on (Metaflow 2.19). Ctrl-C
reaches the whole process group of a terminal: the runtime stops its tasks, and the process that
looks after a remote job, ``flow.py kubernetes step`` or ``batch step``, ends that job when it exits.
"""

from __future__ import annotations

import _thread
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType

from ..machine import processes

# Metaflow kills its tasks 5 s after SIGINT (2.19). Who has got it, has mostly ended by then.
_PATIENCE_S = 2.0
_REMOTE_JOBS = (["kubernetes", "step"], ["batch", "step"])


def heed_signals_to_run() -> None:
    """Have SIGTERM and SIGHUP interrupt this run and its tasks; a handler that is there stays, and so does nohup's.

    So does SIGINT that no terminal sends, but for example an editor's stop button: it may have reached this process alone.
    """
    _handle((signal.SIGTERM, signal.SIGHUP, signal.SIGINT), pass_on=True)


def heed_signals_to_job(arguments: Sequence[str] = sys.argv) -> None:
    """Have SIGTERM and SIGHUP end the remote job, if this process is the one that looks after it.

    SIGINT, too, is taken once only: a second signal, as `timeout` and systemd send it to the whole group,
    would end the process in the midst of its clean-up.
    """
    if remote_job(arguments) is not None:
        _handle((signal.SIGTERM, signal.SIGHUP, signal.SIGINT), pass_on=False)


def remote_job(arguments: Sequence[str] = sys.argv) -> str | None:
    """Return the step of the remote job that a process looks after, by its command line; None if it is no such process."""
    for at in range(len(arguments) - 2):
        if list(arguments[at : at + 2]) in _REMOTE_JOBS:
            return arguments[at + 2]
    return None


def _handle(signals: Sequence[signal.Signals], pass_on: bool) -> None:
    """Have a signal raise KeyboardInterrupt, once: the clean-up that follows is not disturbed again."""
    if threading.current_thread() is not threading.main_thread():
        return
    owner, is_interrupted = os.getpid(), False

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal is_interrupted
        is_front = number == signal.SIGINT and pass_on and _is_in_front()
        if is_front or (os.getpid() != owner and number == signal.SIGINT):
            raise KeyboardInterrupt  # as usual: the terminal sends Ctrl-C to the tasks as well
        if os.getpid() != owner:  # a forked child has inherited this handler
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif not is_interrupted:
            is_interrupted = True
            if number == signal.SIGINT and pass_on:
                with suppress(RuntimeError):  # no thread can start
                    _thread.start_new_thread(_interrupt_the_rest, ())
            elif pass_on:
                _interrupt_children()
            name = signal.Signals(number).name
            with suppress(OSError):  # SIGHUP: the terminal is gone
                os.write(2, f"[torchrun] {name}: the run is interrupted, as by Ctrl-C\n".encode())
            raise KeyboardInterrupt

    for number in signals:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, on_signal)


def _is_in_front() -> bool:
    """Return whether a terminal sends Ctrl-C to this process's group."""
    with suppress(OSError):  # there is no terminal
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            return os.tcgetpgrp(terminal) == os.getpgrp()
        finally:
            os.close(terminal)
    return False


def _interrupt_the_rest() -> None:
    """Signal the children that SIGINT has not reached: who sends it may send it to all, and a second one disturbs them."""
    time.sleep(_PATIENCE_S)
    _interrupt_children()


def _interrupt_children() -> None:
    """Signal the runtime's children, as a terminal does: those in our process group."""
    # Where SIGINT is ignored, as in the background of a script, the children ignore it, too.
    number = signal.SIGTERM if signal.getsignal(signal.SIGINT) == signal.SIG_IGN else signal.SIGINT
    with suppress(OSError):  # without a process table
        for pid in _children():
            with suppress(OSError):  # it has just ended
                if os.getpgid(pid) == os.getpgrp():
                    os.kill(pid, number)


def _children() -> list[int]:
    """Return the pids of this process's children. Runs are submitted from macOS, too, which has no /proc."""
    if platform.system() == "Linux":
        return processes.children(os.getpid())
    listed = subprocess.run(["pgrep", "-P", str(os.getpid())], capture_output=True, check=False).stdout
    return [int(pid) for pid in listed.split()]
