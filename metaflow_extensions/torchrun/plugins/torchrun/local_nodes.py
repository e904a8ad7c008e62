"""The other nodes of a gang whose tasks all run on this machine, as the control task sees them.

On a local run Metaflow's control task starts the other nodes' tasks as its children
(``_local_multinode_control_task_step_func`` in ``metaflow.plugins.parallel_decorator``, 2.19): with
whatever ``python`` is first on the PATH, without looking at them while its own step runs, and without
stopping them when that fails. This module mends the three.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from .failure import describe_exit
from .guardian import await_or_kill, children_with_environment

_INDEX = "MF_PARALLEL_NODE_INDEX"
_POLL_S = 0.25
# Enough to start Python and Metaflow and read one record; less than the 5 s that Metaflow's runtime
# leaves an interrupted task (`_killall` in runtime.py, 2.19).
_LATECOMER_S = 3.0


class SameInterpreter:
    """A Metaflow environment that starts local tasks with the interpreter of this one.

    Parameters
    ----------
    environment : metaflow.metaflow_environment.MetaflowEnvironment
        The real one; it is asked first, since @conda and @pypi name interpreters of their own.
    """

    def __init__(self, environment: Any) -> None:
        # Metaflow asks the base environment here, as the runtime does for every task.
        self._environment = getattr(environment, "base_env", environment)

    def executable(self, step_name: str, default: str | None = None) -> str:
        """Return the interpreter for a step."""
        asked: str = self._environment.executable(step_name, default)
        return sys.executable if asked in ("python", "python3") else asked


def local_nodes() -> dict[int, int]:
    """Return node index -> pid of the nodes that this control task has started and that live."""
    found = children_with_environment(_INDEX)
    return {int(value): pid for pid, value in found.items() if value.isdigit() and int(value) > 0}


def watch_local_nodes(num_nodes: int, on_gone: Callable[[int, str], None]) -> None:
    """Call `on_gone` with index and reason for every local node whose task ends; returns at once.

    Parameters
    ----------
    num_nodes : int
        The gang's size.
    on_gone : callable
        Called in a daemon thread; hears of normal ends, too.
    """
    running = local_nodes()
    threading.Thread(target=_watch, args=(num_nodes, running, on_gone), name="torchrun-nodes", daemon=True).start()


def _watch(num_nodes: int, running: dict[int, int], on_gone: Callable[[int, str], None]) -> None:
    pause = threading.Event()
    for node in range(1, num_nodes):
        if node not in running:
            on_gone(node, "its task ended at once, before it joined")
    while running:
        for node, pid in list(running.items()):
            how = _end_of(pid)
            if how is not None:
                del running[node]
                on_gone(node, f"its task {how}")
        pause.wait(_POLL_S)


def _end_of(pid: int) -> str | None:
    """Say how a child ended, or None while it runs; its status is left for whoever waits for it."""
    with suppress(ChildProcessError):
        end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if end is None:
            return None
        return describe_exit(end.si_status if end.si_code == os.CLD_EXITED else -end.si_status)
    return "ended"  # Metaflow has waited for it already


def await_local_nodes(wait_s: float, absent: Sequence[int]) -> None:
    """Wait until the local nodes' tasks have ended; after `wait_s` seconds kill them.

    Those of `absent` nodes have not joined the gang. One that is just starting finds the word that the
    control node left and ends by itself; one that hangs gets SIGTERM after a moment.
    """
    nodes = local_nodes()
    deadline = time.monotonic() + min(wait_s, _LATECOMER_S)
    while set(absent) & set(nodes) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        nodes = local_nodes()
    for node in set(absent) & set(nodes):
        with suppress(ProcessLookupError):
            os.kill(nodes[node], signal.SIGTERM)
    await_or_kill(set(nodes.values()), wait_s)
