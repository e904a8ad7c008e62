"""A guardian that starts before its launch and holds a spare agent.

When the task requests the agent, this process becomes the agent's guardian; see ``guardian/guardian.py``. If the spare
can't be used, the same guardian starts a cold agent. So a task has at most one waiting guardian.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from ...compat import linux
from ...guardian.agent_events import CONFIRMED, Refused, as_line
from ...guardian.guardian import Guardian, Options, have_default_signals, start_program
from ...machine.frozen import WATCH_S
from ...machine.processes import Other, await_or_kill, living_descendants
from .imports import StartCold, in_words
from .spare_process import ANSWER_S, Spare


def main() -> int:
    """Serve one task until its agent has ended, or until the task can't request one any more."""
    pid, began, told = sys.argv[1:]
    task = Other(int(pid), began)
    with task.end() as task_end:
        waiting = Waiting(task, task_end, json.loads(told))
        have_default_signals(waiting.note_sigterm)
        return waiting.run()


class Waiting:
    """Waits until the task requests an agent, then guards it.

    There is one thread. The handler of SIGTERM may run between any two of its lines, so it only sets flags.
    """

    def __init__(self, task: Other, task_end: int | None, options: Mapping[str, Any]) -> None:
        self._task, self._task_end = task, task_end
        self._options = options
        self._spare: Spare | None = None
        self._fault = ""  # why there is no spare
        self._guardian: Guardian | None = None
        self._got_sigterm = False

    def note_sigterm(self) -> None:
        """Record that this process must end; the loop acts on it."""
        self._got_sigterm = True
        if self._guardian is not None:
            self._guardian.note_sigterm()

    def run(self) -> int:
        """Start the spare, wait for the request, then guard the agent until its end."""
        linux.adopt_orphans()
        try:
            more = {"stdin": subprocess.DEVNULL, "preexec_fn": linux.die_with_parent}
            self._spare = Spare("agent", self._options, os.environ, **more)
        except Exception as error:
            self._fault = in_words(error)
        request = self._next()
        if request is None:
            self._end_spares()
            return 0
        if (umask := request["agent"]["umask"]) is not None:
            os.umask(umask)
        options = Options(**request["options"])
        self._guardian = Guardian(self._task, self._task_end, options, self._starter(request["agent"], options))
        if self._got_sigterm:  # SIGTERM came before `self._guardian` was set
            self._guardian.note_sigterm()
        with suppress(OSError):  # the task is gone; the guardian sees that, too
            os.write(sys.stdin.fileno(), CONFIRMED)
        return self._guardian.run(request["command"])

    def _next(self) -> dict[str, Any] | None:
        """Wait for a request from `WarmNode.start` and return it; None if this process must end."""
        # The pipe may stay open after the task's end, because a process that the step has forked may hold its other end.
        commands = sys.stdin.fileno()
        files = [commands] if self._task_end is None else [commands, self._task_end]
        data = b""
        while not (self._task.has_ended or self._got_sigterm):
            if commands in select.select(files, [], [], WATCH_S)[0]:
                # A request starts with its length. The bytes after it are commands, which `Guardian` reads.
                size = int.from_bytes(os.read(commands, 8), "big")
                while len(data) < size and (part := os.read(commands, size - len(data))):
                    data += part
                request: dict[str, Any] | None = json.loads(data) if size and len(data) == size else None
                return request
        return None

    def _starter(self, agent: Mapping[str, Any], options: Options) -> Any:
        """Return a function that starts the agent from the spare or, if anything fails, cold."""

        def start(command: Sequence[str], stdout: int, stderr: int) -> subprocess.Popen[bytes]:
            try:
                if self._spare is None:
                    raise StartCold(self._fault)
                return self._spare.become(agent, stdout, stderr, time.monotonic() + ANSWER_S, self._is_wanted)
            except Exception as error:
                self._end_spares()
                if self._is_wanted():
                    with suppress(OSError):  # the task is gone
                        os.write(sys.stdout.fileno(), as_line(Refused(in_words(error))))
            return start_program(command, stdout, stderr, options, agent["env"])

        return start

    def _end_spares(self) -> None:
        """End the spare agent and its workers. Workers become children of this process when their agent ends."""
        for _ in range(2):  # what a spare has forked while it was killed is a child of this process by now
            await_or_kill(living_descendants(os.getpid()), 0.0)

    def _is_wanted(self) -> bool:
        """Return whether the task still waits for an agent. Any command now is a request to stop."""
        told = select.select([sys.stdin], [], [], 0)[0]
        return not (self._task.has_ended or self._got_sigterm or told)
