"""Ends the other nodes' tasks on a local run, where all tasks of a gang run on this machine.

Metaflow's control task starts them as its children (`compat.steps.tasks_of_local_nodes`). It does not look at them while
its own step runs, and it does not stop them when that fails (2.19).
"""

from __future__ import annotations

import signal
import time
from collections.abc import Collection, Sequence
from subprocess import Popen

from ..machine.processes import living_descendants, send_signal
from ..machine.streams import is_pipe, unread_bytes

_POLL_S = 0.25
# Enough to start Python and Metaflow and read one record; less than the 5 s that Metaflow's runtime
# leaves an interrupted task (`_killall` in runtime.py, 2.19).
_LATECOMER_S = 3.0
_SLOW_LATECOMER_S = 10.0  # the same on a busy machine, where nobody has ordered this task to end


def stop(tasks: Sequence[Popen[bytes]], wait_s: float, absent: Collection[int], is_ordered: bool = False) -> None:
    """Wait until the tasks of the nodes from 1 on have ended; after `wait_s` seconds kill them.

    Where their output waits for its reader, the time does not count, unless this task was ordered to end (`is_ordered`).
    An `absent` one has not joined the gang, or is lost, and has a moment: if it is just starting, it finds how the gang has
    ended, and ends by itself.
    """
    latecomer_s = min(wait_s, _LATECOMER_S if is_ordered else _SLOW_LATECOMER_S)
    late = [task for node, task in enumerate(tasks, 1) if node in absent]
    # In this order: who waits for a lost node's turn has all its time when that node is gone.
    _end(late, latecomer_s, waits_for_reader=False)
    _end([task for task in tasks if task not in late], wait_s, waits_for_reader=not is_ordered)


def _end(tasks: Sequence[Popen[bytes]], wait_s: float, waits_for_reader: bool) -> None:
    """Wait until `tasks` have ended; kill those that run after `wait_s` seconds, with all that they have started."""
    deadline = time.monotonic() + wait_s
    while (left := [task for task in tasks if task.poll() is None]) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        if waits_for_reader and any(is_pipe(fd) and unread_bytes(fd) for fd in (1, 2)):
            deadline = time.monotonic() + wait_s
    for pid in [pid for task in left for pid in [*living_descendants(task.pid), task.pid]]:
        send_signal(pid, signal.SIGKILL)
