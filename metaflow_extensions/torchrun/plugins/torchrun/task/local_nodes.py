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
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from ..gang.view import Presence
from ..logs.console import has_unread
from ..machine.processes import (
    Process,
    await_or_kill,
    children,
    children_of_main_thread,
    command_line,
    find,
    is_alive,
    send_signal,
)

_POLL_S = 0.25
# Enough to start Python and Metaflow and read one record; less than the 5 s that Metaflow's runtime
# leaves an interrupted task (`_killall` in runtime.py, 2.19).
_LATECOMER_S = 3.0
_SLOW_LATECOMER_S = 10.0  # the same on a busy machine, where nobody has ordered this task to end
_UNREAD_S = 600.0  # for what a node prints whose step goes on although the gang has failed
_NEVER = float("inf")


class LocalNodes:
    """The tasks of the other nodes, as their control task sees them."""

    def __init__(self, run_id: str, control_task_id: str, num_nodes: int) -> None:
        self._run = ("--run-id", run_id)
        self._options = {("--task-id", f"{control_task_id}_node_{node}"): node for node in range(1, num_nodes)}
        self._tasks: dict[int, Process] = {}

    def ended(self) -> dict[int, str]:
        """Return the nodes whose tasks have ended at once, each with the reason."""
        if len(self.tasks()) < len(self._options):
            time.sleep(_POLL_S)  # during its exec a process has no command line
        running = dict(self.tasks())
        if not running and not self._has_ended_children():
            return {}  # a Metaflow with other command lines than 2.19's: the heartbeats remain
        return dict.fromkeys(set(self._options.values()) - set(running), "its task ended at once, before it joined")

    def tasks(self) -> dict[int, Process]:
        """Return node index -> task of all that have been seen, ended ones included."""
        for pid in children() if len(self._tasks) < len(self._options) else ():
            task, node = find(pid), self._node_of(pid)
            if task is not None and node is not None:
                self._tasks.setdefault(node, task)
        return self._tasks

    def exit_codes(self, codes: Mapping[int, int | None]) -> dict[int, int | None]:
        """Return node index -> exit code of all tasks, None for one that runs; `codes` are those of Metaflow's, by pid."""
        return {node: codes.get(task.pid) for node, task in self.tasks().items()}

    @staticmethod
    def _has_ended_children() -> bool:
        """Return whether children have ended: a process that has ended shows no command line any more."""
        found = [find(pid) for pid in children_of_main_thread()]
        return not found or any(child is None or not child.is_alive for child in found)

    def _node_of(self, pid: int) -> int | None:
        options = set(pairwise(command_line(pid)))
        if self._run not in options:
            return None
        return next((node for option, node in self._options.items() if option in options), None)

    def stop(self, wait_s: float, state: Callable[[int], Presence | None], is_ordered: bool = False) -> None:
        """Wait until all tasks have ended; after `wait_s` seconds kill them.

        Where their output waits for its reader, the time does not count: not at all for a node that has left the gang and
        so only writes what is left, and for minutes for one of which that is not known. Of those that have not joined the
        gang, one that is just starting finds the word that the control node left and ends by itself; one that hangs gets
        SIGTERM after a moment. If this task was ordered to end (`is_ordered`), no reader is waited for.
        """
        late = [task for node, task in self.tasks().items() if state(node) is Presence.ABSENT]
        for task in _await_ends(late, min(wait_s, _LATECOMER_S if is_ordered else _SLOW_LATECOMER_S), 0.0):
            send_signal(task.pid, signal.SIGTERM)
        tasks = dict(self.tasks())
        # In this order: who waits for a lost node's turn has all its time when that node is gone.
        for states, unread_s in (
            ((Presence.OUT, Presence.ABSENT, None), 0.0),
            ((Presence.HERE,), _UNREAD_S),
            ((Presence.GONE,), _NEVER),
        ):
            of_these = [task for node, task in tasks.items() if state(node) in states]
            left = _await_ends(of_these, wait_s, 0.0 if is_ordered else unread_s)
            await_or_kill([task.pid for task in left], 0.0)


def _await_ends(tasks: Sequence[Process], wait_s: float, unread_s: float) -> list[Process]:
    """Wait until `tasks` have ended; return those that run after `wait_s` seconds.

    For `unread_s` seconds, that time begins anew while a reader has something to read.
    """
    begin = time.monotonic()
    deadline, unread_until = begin + wait_s, begin + unread_s
    while (left := [task for task in tasks if is_alive(task.pid, task.began)]) and (now := time.monotonic()) < deadline:
        if now < unread_until and has_unread():
            deadline = now + wait_s
        time.sleep(_POLL_S)
    return left
