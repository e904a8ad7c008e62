"""Makes SIGTERM and SIGHUP do what Ctrl-C does, in the processes that submit a run.

By default both end ``flow.py run`` at once, without cleanup, and its tasks and remote jobs go on (Metaflow 2.19). Ctrl-C
reaches the whole process group of a terminal: the runtime stops its tasks, and the process that
looks after a remote job, ``flow.py kubernetes step`` or ``batch step``, ends that job when it exits.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

from ..machine import processes

_REMOTE_JOBS = (["kubernetes", "step"], ["batch", "step"])


def heed_signals_to_run() -> None:
    """Have SIGTERM and SIGHUP interrupt this run and its tasks; a handler that is there stays, and so does nohup's."""
    _handle(signal.SIGTERM, signal.SIGHUP)


def heed_signals_to_job(arguments: Sequence[str] = sys.argv) -> None:
    """Have SIGTERM and SIGHUP end the remote job, if this process is the one that looks after it.

    SIGINT, too, is taken once only: a second signal, as `timeout` and systemd send it to the whole group,
    would end the process in the midst of its clean-up.
    """
    if remote_job(arguments):
        _handle(signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


def remote_job(arguments: Sequence[str] = sys.argv) -> str | None:
    """Return the step of the remote job that a process looks after, by its command line; None if it is no such process."""
    for at in range(len(arguments) - 2):
        if list(arguments[at : at + 2]) in _REMOTE_JOBS:
            return arguments[at + 2]
    return None


def _handle(*signals: signal.Signals) -> None:
    """Have a signal raise KeyboardInterrupt, once: the clean-up that follows is not disturbed again."""
    defaults, own = (signal.SIG_DFL, signal.default_int_handler), os.getpid()
    heeded = [number for number in signals if signal.getsignal(number) in defaults]

    def have(handler: Any) -> None:
        for each in heeded:
            signal.signal(each, handler)

    def on_signal(number: int, frame: FrameType | None) -> None:
        if os.getpid() != own:  # a fork ends as usual
            have(signal.SIG_DFL)
            signal.raise_signal(number)
        have(lambda *_: None)
        with suppress(OSError):  # macOS has no /proc: there Ctrl-C and the end of a terminal reach the children, too
            _interrupt_children()
        with suppress(OSError):  # SIGHUP: the terminal is gone
            os.write(2, f"[torchrun] {signal.Signals(number).name}: the run is interrupted, as by Ctrl-C\n".encode())
        raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        have(on_signal)


def _interrupt_children() -> None:
    """Signal this process's children, as a terminal does: those in its process group."""
    # Where SIGINT is ignored, as in the background of a script, the children ignore it, too.
    number = signal.SIGTERM if signal.getsignal(signal.SIGINT) == signal.SIG_IGN else signal.SIGINT
    for pid in processes.children():
        with suppress(OSError):  # it has just ended
            if os.getpgid(pid) == os.getpgrp():
                os.kill(pid, number)
