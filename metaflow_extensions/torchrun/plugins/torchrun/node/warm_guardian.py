"""The guardian of a warm process, and of the agents that are forked from it, one after the other.

It lives from the step's begin to its end. See `guardian.py` for what it does while an agent runs, and
``scripts/warm_python`` for the warm process.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ..machine import libc
from ..machine.inherited import difference, inherited
from ..machine.processes import Other, living_descendants, send_signal
from ..scripts.warm_python import messages
from ..scripts.warm_python.popen import ForkedPopen
from .agent_events import Refused, as_line
from .guardian import Guardian, Options, have_default_signals
from .workers import WATCH_S

# What a warm process may take to answer, most of it for imports that a start would have to make, too.
_ANSWER_S = 60.0
# How often another warm process is started because a launch was not like the one before.
_MAX_RENEWALS = 3
_HOOK = "TORCHRUN_WARM"  # ``scripts/worker_hooks`` reads it


def main() -> int:
    """Serve one task to its end, or until it says so."""
    pid, began, modules = sys.argv[1:]
    task = Other(int(pid), began)
    with task.end() as task_end:
        guardian = WarmGuardian(task, task_end, json.loads(modules))
        have_default_signals(guardian.note_sigterm)
        return guardian.run()


class WarmGuardian:
    """Runs the agents of one node; `task_end` is the file that tells the end of `task`, if one does."""

    # There is one thread. The handler of SIGTERM only notes that it came.

    def __init__(self, task: Other, task_end: int | None, modules: Sequence[str]) -> None:
        self._task, self._task_end = task, task_end
        self._modules = modules
        self._commands = socket.socket(fileno=os.dup(sys.stdin.fileno()))
        self._inherited = inherited()
        self._warm: WarmProcess
        self._renewals = 0
        self._guardian: Guardian | None = None  # of the agent that runs
        self._got_sigterm = False
        self._task_is_frozen = False  # then nobody needs this process; a task that goes on starts another

    def note_sigterm(self) -> None:
        """Somebody wants this process to end; the loop sees to it."""
        self._got_sigterm = True
        if self._guardian is not None:
            self._guardian.note_sigterm()

    def run(self) -> int:
        """Import, and run one agent after the other."""
        libc.adopt_orphans()
        try:
            self._warm = WarmProcess(self._modules, os.environ)
        except Exception as error:
            self._refuse(error)
            return 1
        while not self._task_is_frozen and (request := self._next_or_refuse()) is not None:
            self._run(request)
        self._warm.end()
        return 0

    def _refuse(self, reason: Exception) -> None:
        with suppress(OSError):  # the task is gone
            os.write(sys.stdout.fileno(), as_line(Refused(messages.in_words(reason))))

    def _next_or_refuse(self) -> dict[str, Any] | None:
        try:
            return self._next()
        except Exception as error:
            self._refuse(error)
            return None

    def _next(self) -> dict[str, Any] | None:
        """Wait for the task to ask for an agent; None if this process is to end."""
        # Its pipe alone does not tell: a process that the step has forked may hold the other end.
        commands = self._commands.fileno()
        files = [commands] if self._task_end is None else [commands, self._task_end]
        while not self._task.has_ended and not self._got_sigterm:
            ready, _, _ = select.select(files, [], [], WATCH_S)
            if commands not in ready:
                continue
            data, sent, _, _ = socket.recv_fds(self._commands, 4096, 1)
            if not data:
                return None
            if sent:
                return messages.read_request(sent[0])
            # Else it wants an agent to stop that has ended meanwhile.
        return None

    def _run(self, request: dict[str, Any]) -> None:
        program = request["program"]
        options = Options(**request["options"])

        def start(command: Sequence[str], stdout: int, stderr: int) -> subprocess.Popen[bytes]:
            try:
                changed = difference(self._inherited, request["inherited"])
                if changed is not None:
                    raise messages.Refused(changed)
                return self._warm.start(program, stdout, stderr, self._is_wanted)
            except Exception as error:
                raise messages.Refused(messages.in_words(error)) from error

        self._guardian = Guardian(self._task, self._task_end, options, start, self._warm)
        try:
            self._guardian.run(program["argv"])
        except messages.Refused as reason:
            self._kill_forks()
            self._refuse(reason)
            self._renew(program["env"])
        finally:
            self._task_is_frozen = self._guardian.task_is_frozen
            self._guardian = None

    def _kill_forks(self) -> None:
        """End what may have been forked after all: it would be a second agent."""
        for pid in living_descendants(os.getpid()):
            if pid != self._warm.pid:
                send_signal(pid, signal.SIGKILL)

    def _is_wanted(self) -> bool:
        """Tell whether the task still waits for an agent."""
        told, _, _ = select.select([self._commands], [], [], 0)
        return not (self._task.has_ended or self._got_sigterm or told)

    def _renew(self, env: Mapping[str, str]) -> None:
        """Make ready for another launch like the one that has to start cold."""
        if self._renewals < _MAX_RENEWALS:
            self._renewals += 1
            self._warm.end()
            self._warm = WarmProcess(self._modules, env)


class WarmProcess:
    """A warm process, from its guardian."""

    def __init__(self, modules: Sequence[str], env: Mapping[str, str]) -> None:
        self._server, theirs = socket.socketpair()
        self.news, tell_news = os.pipe()  # of workers that it has forked
        # What the imports write goes to files, as that of workers does.
        with tempfile.TemporaryFile() as out, theirs:
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `end`
            told = {"client": theirs.fileno(), "news": tell_news, "modules": list(modules)}
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-m", "torchrun_warm"],
                env={**env, _HOOK: json.dumps(told)},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=self._errors,
                pass_fds=(theirs.fileno(), tell_news),
                start_new_session=True,
                preexec_fn=libc.be_killed_with_parent,
            )
        os.close(tell_news)

    @property
    def pid(self) -> int:
        """Its pid."""
        return self._process.pid

    def start(
        self, program: dict[str, Any], stdout: int, stderr: int, is_wanted: Callable[[], bool]
    ) -> subprocess.Popen[bytes]:
        """Have it fork a program; raises `Refused`."""
        deadline = time.monotonic() + _ANSWER_S
        try:
            messages.ask(self._server, program, stdout, stderr)
            while not select.select([self._server], [], [], WATCH_S / 5)[0]:
                wanted = is_wanted()
                if time.monotonic() > deadline or not wanted:
                    self.end()
                    why = f"within {_ANSWER_S:g} s" if wanted else "before the launch was stopped"
                    raise messages.Refused(f"torch was not imported {why}")
            return ForkedPopen(messages.read_answer(self._server), program["argv"])
        except (OSError, EOFError):
            raise messages.Refused(f"the warm process has ended{self._last_words()}") from None

    def _last_words(self) -> str:
        """Return the last line of what it has written, if that can still be read."""
        if self._errors.closed:
            return ""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        return "".join(f": {line}" for line in [line for line in lines if line.strip()][-1:])

    def end(self) -> None:
        """End it; safe to call more than once."""
        with suppress(OSError):
            self._process.kill()
            self._process.wait()
        if self._server.fileno() != -1:
            self._server.close()
            self._errors.close()
            os.close(self.news)
