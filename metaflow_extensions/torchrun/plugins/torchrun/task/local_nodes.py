"""Watches and ends the other nodes' tasks on a local run, where all tasks of a gang run on this machine.

On a local run Metaflow's control task starts them as its children (``_local_multinode_control_task_step_func`` in
``metaflow.plugins.parallel_decorator``, 2.19). They get the first ``python`` on the PATH. It does not look at
them while its own step runs, and it does not stop them when that fails. `compat.steps.with_this_interpreter` corrects
the first, this module the others.
A child is recognised as a node's task by its command line, not by its environment: processes that make cards may have
a node's environment. Pid and start time together identify it, since the kernel reuses pids.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise

from ..gang.view import Presence
from ..machine.processes import Other, children, command_line, find, kill
from ..machine.streams import has_unread

_POLL_S = 0.25
# Enough to start Python and Metaflow and read one record; less than the 5 s that Metaflow's runtime
# leaves an interrupted task (`_killall` in runtime.py, 2.19).
_LATECOMER_S = 3.0
_SLOW_LATECOMER_S = 10.0  # the same on a busy machine, where nobody has ordered this task to end
# How long who reads a node's lines is waited for: minutes where its step goes on although the gang has failed. In this
# order: who waits for a lost node's turn has all its time when that node is gone.
_UNREAD_S = {Presence.OUT: 0.0, Presence.ABSENT: 0.0, Presence.HERE: 600.0, Presence.GONE: float("inf")}


class LocalNodes:
    """The tasks of the other nodes, as their control task sees them."""

    def __init__(self, run_id: str, control_task_id: str, num_nodes: int) -> None:
        self._run = ("--run-id", run_id)
        self._options = {("--task-id", f"{control_task_id}_node_{node}"): node for node in range(1, num_nodes)}
        self._tasks: dict[int, Other] = {}

    def ended(self) -> dict[int, str]:
        """Return the nodes whose tasks have ended at once, each with the reason."""
        if len(self.tasks()) < len(self._options):
            time.sleep(_POLL_S)  # during its exec a process has no command line
        running = dict(self.tasks())
        if not running and not self._has_ended_children():
            return {}  # a Metaflow with other command lines than 2.19's: the heartbeats remain
        return dict.fromkeys(set(self._options.values()) - set(running), "its task ended at once, before it joined")

    def tasks(self) -> dict[int, Other]:
        """Return node index -> task of all that have been seen, ended ones included."""
        for pid in children() if len(self._tasks) < len(self._options) else ():
            task, node = find(pid), self._node_of(pid)
            if task is not None and node is not None:
                self._tasks.setdefault(node, Other(pid, task.began))
        return self._tasks

    @staticmethod
    def _has_ended_children() -> bool:
        """Return whether children have ended: a process that has ended shows no command line any more."""
        found = [find(pid) for pid in children()]
        return not found or any(child is None or not child.is_alive for child in found)

    def _node_of(self, pid: int) -> int | None:
        options = set(pairwise(command_line(pid)))
        if self._run not in options:
            return None
        return next((node for option, node in self._options.items() if option in options), None)

    def stop(self, wait_s: float, states: Mapping[int, Presence], is_ordered: bool = False) -> None:
        """Wait until all tasks have ended; after `wait_s` seconds kill them.

        Where their output waits for its reader, the time does not count: not at all for a node that has left the gang and
        so only writes what is left, and for minutes for one of which that is not known. Of those that have not joined the
        gang, one that is just starting finds the word that the control node left and ends by itself; one that hangs gets
        SIGTERM after a moment. If this task was ordered to end (`is_ordered`), no reader is waited for.
        """
        of: dict[Presence, list[Other]] = {state: [] for state in _UNREAD_S}
        for node, task in self.tasks().items():
            of[states.get(node, Presence.HERE)].append(task)
        for task in _await_ends(
            of[Presence.ABSENT], min(wait_s, _LATECOMER_S if is_ordered else _SLOW_LATECOMER_S), 0.0
        ):
            task.send_signal(signal.SIGTERM)
        for state, unread_s in _UNREAD_S.items():
            left = _await_ends(of[state], wait_s, 0.0 if is_ordered else unread_s)
            kill(task.pid for task in left)


def _await_ends(tasks: Sequence[Other], wait_s: float, unread_s: float) -> list[Other]:
    """Wait until `tasks` have ended; return those that run after `wait_s` seconds.

    For `unread_s` seconds, that time begins anew while a reader has something to read.
    """
    begin = deadline = time.monotonic()
    while (left := [task for task in tasks if not task.has_ended]) and time.monotonic() < deadline + wait_s:
        if time.monotonic() < begin + unread_s and has_unread():
            deadline = time.monotonic()
        time.sleep(_POLL_S)
    return left
