"""Ends a task of a local run when a process that started it has ended; Metaflow (2.19) does not check that."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping
from typing import Literal

from ..machine.processes import Other, began

# Names the processes that a task must not outlive: ``run=PID``, and for a node also ``control=PID``.
STARTED_BY = "METAFLOW_TORCHRUN_STARTED_BY"


def name_as_starter(env: MutableMapping[str, str], role: Literal["run", "control"]) -> None:
    """Add this process to `env`, so that tasks started with it end when this process is gone."""
    env[STARTED_BY] = f"{env.get(STARTED_BY, '')} {role}={os.getpid()}".strip()


def starters(env: Mapping[str, str]) -> dict[str, int]:
    """Return role -> pid of the processes that this one must not outlive.

    There is no ``run`` where somebody has started the control task by hand, with the command ``step``;
    they may want it to outlive the shell.
    """
    named = [word.partition("=") for word in env.get(STARTED_BY, "").split()]
    return {role: int(pid) for role, _, pid in named if pid.isdigit()}


def end_after(pid: int, on_gone: Callable[[int], float]) -> None:
    """End this process when process `pid`, an ancestor, is gone, whatever it is doing then; returns at once.

    A daemon thread then calls `on_gone`, which must be safe in any thread. It returns the seconds that this process has
    to end by itself.
    """

    def follow() -> None:
        Other(pid, began(pid)).wait()
        try:
            time.sleep(on_gone(pid))
        finally:
            os._exit(1)  # the main thread may be in a call that nothing interrupts

    threading.Thread(target=follow, name="torchrun-starter", daemon=True).start()
