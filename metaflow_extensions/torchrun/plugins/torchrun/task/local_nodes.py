"""Ends the other nodes' tasks on a local run, where all tasks of a gang run on this machine.

Metaflow's control task starts them as its children (`compat.steps.tasks_of_local_nodes`). It does not look at them while
its own step runs, and it does not stop them when that fails (2.19).
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from subprocess import Popen

from ..gang.view import Presence
from ..machine.processes import living_descendants, send_signal
from ..machine.streams import is_pipe, unread_bytes

_POLL_S = 0.25
# Enough to start Python and Metaflow and read one record; less than the 5 s that Metaflow's runtime
# leaves an interrupted task (`_killall` in runtime.py, 2.19).
_LATECOMER_S = 3.0
_SLOW_LATECOMER_S = 10.0  # the same on a busy machine, where nobody has ordered this task to end
# How long who reads a node's lines is waited for: minutes where its step goes on although the gang has failed. In this
# order: who waits for a lost node's turn has all its time when that node is gone.
_UNREAD_S = {Presence.OUT: 0.0, Presence.ABSENT: 0.0, Presence.HERE: 600.0, Presence.GONE: float("inf")}


def stop(
    tasks: Sequence[Popen[bytes]], wait_s: float, states: Mapping[int, Presence], is_ordered: bool = False
) -> None:
    """Wait until the tasks of the nodes from 1 on have ended; after `wait_s` seconds kill them.

    Where their output waits for its reader, the time does not count: not at all for a node that has left the gang and
    so only writes what is left, and for minutes for one of which that is not known. One that has not joined the gang has
    a moment: if it is just starting, it finds how the gang has ended, and ends by itself. If this task was ordered to end
    (`is_ordered`), no reader is waited for.
    """
    of: dict[Presence, list[Popen[bytes]]] = {state: [] for state in _UNREAD_S}
    for node, task in enumerate(tasks, 1):
        of[states.get(node, Presence.HERE)].append(task)
    latecomer_s = min(wait_s, _LATECOMER_S if is_ordered else _SLOW_LATECOMER_S)
    for state, unread_s in _UNREAD_S.items():
        limit_s = latecomer_s if state is Presence.ABSENT else wait_s
        left = _await_ends(of[state], limit_s, 0.0 if is_ordered else unread_s)
        for pid in [pid for task in left for pid in [*living_descendants(task.pid), task.pid]]:
            send_signal(pid, signal.SIGKILL)


def _await_ends(tasks: Sequence[Popen[bytes]], wait_s: float, unread_s: float) -> list[Popen[bytes]]:
    """Wait until `tasks` have ended; return those that run after `wait_s` seconds.

    For `unread_s` seconds, that time begins anew while a reader has something to read.
    """
    begin = deadline = time.monotonic()
    while (left := [task for task in tasks if task.poll() is None]) and time.monotonic() < deadline + wait_s:
        if time.monotonic() < begin + unread_s and any(is_pipe(fd) and unread_bytes(fd) for fd in (1, 2)):
            deadline = time.monotonic()
        time.sleep(_POLL_S)
    return left
