"""One agent and its whole process tree, seen from the task: start, follow, stop, account for.

The work is done by `guardian.py`, a process of its own; see there why.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from . import guardian

_GUARDIAN = os.path.abspath(guardian.__file__)
# The guardian waits 10 s at most after SIGKILL; then it reports what it has.
_END_WAIT_S = 15.0
_LOOK_S = 0.5  # between looks whether a silent guardian still lives

Event = dict[str, Any]


class AgentProcess:
    """The agent of one generation.

    Parameters
    ----------
    command : sequence of str
        Its argv.
    env : mapping
        Its whole environment.
    logs : dict
        ``"stdout"`` and ``"stderr"`` -> file for the agent's own output.
    grace_s : float
        Seconds that workers have after SIGTERM if the task dies.
    on_event : callable
        Called in a thread of its own with every event of the guardian; the last one is ``end``,
        whatever happens to the guardian. If that was killed itself, ``guardian`` is its exit code; where this
        process lets nobody know that, it is 0 and ``error`` says so.
    workers : int
        How many workers the agent will start.
    silence_s : float
        Seconds that a worker, the agent or the task may be stopped by a signal before that counts as a
        failure.
    restarts : bool, default False
        Whether the agent may start its workers again by itself.
    cwd : str, optional
        Working directory; default is the task's.
    scratch : sequence of str, optional
        Folders to remove if the task dies; while it lives, that is its own duty.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        logs: dict[str, str],
        grace_s: float,
        on_event: Callable[[Event], None],
        workers: int,
        silence_s: float,
        restarts: bool = False,
        cwd: str | None = None,
        scratch: Sequence[str] = (),
    ) -> None:
        options = ["--stdout", logs["stdout"], "--stderr", logs["stderr"], "--grace", str(grace_s)]
        options += ["--task", str(os.getpid()), "--workers", str(workers), "--silence", str(silence_s)]
        options += ["--restarts"] if restarts else []
        options += ["--cwd", cwd] if cwd else []
        options += [word for folder in scratch for word in ("--scratch", folder)]
        self._argv = [sys.executable, "-I", "-S", _GUARDIAN, *options, "--", *command]
        self._env = dict(env)
        self._grace_s = grace_s
        self._on_event = on_event
        self._guardian: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._tree: dict[int, str] = {}  # pid -> when it began

    def start(self) -> None:
        """Start the agent; what becomes of it arrives as events."""
        self._guardian = subprocess.Popen(
            self._argv, env=self._env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        self._reader = threading.Thread(target=self._read, name="torchrun-agent", daemon=True)
        self._reader.start()

    def stop(self, grace_s: float) -> None:
        """Ask for the end of the whole tree: SIGTERM, `grace_s` seconds, SIGKILL.

        Returns at once; the ``end`` event tells when it is done. Safe to call more than once.
        """
        self._command(f"stop {grace_s}")

    def preempt(self, grace_s: float, number: int) -> None:
        """As `stop`, but first the workers alone get signal `number` and up to `grace_s` seconds to save."""
        self._command(f"preempt {grace_s} {number}")

    def _command(self, line: str) -> None:
        guardian = self._guardian
        if guardian is not None and guardian.stdin is not None and guardian.poll() is None:
            with suppress(OSError, ValueError):  # it has ended meanwhile
                guardian.stdin.write(f"{line}\n".encode())
                guardian.stdin.flush()

    def close(self, grace_s: float) -> None:
        """Stop whatever still runs and wait for its end, at most the grace and 15 s."""
        if self._guardian is None:
            return
        self.stop(grace_s)
        try:
            self._guardian.wait(grace_s + _END_WAIT_S)
        except subprocess.TimeoutExpired:
            self._guardian.kill()
            self._guardian.wait()
        finally:
            if self._guardian.stdin is not None:
                with suppress(OSError):
                    self._guardian.stdin.close()
            if self._reader is not None and self._reader is not threading.current_thread():
                self._reader.join(_END_WAIT_S)

    def _read(self) -> None:
        ended = False
        for line in self._lines():
            with suppress(ValueError):
                event = json.loads(line)
                ended = ended or event["event"] == "end"
                if "began" in event:
                    self._tree[event["pid"]] = event["began"]
                self._on_event(event)
        if not ended:
            self._guardian_was_killed()

    def _lines(self) -> Iterator[bytes]:
        """Yield what the guardian says, to its end.

        That is seen by its process as well: one that the step's code has forked meanwhile can hold the pipe open.
        """
        assert self._guardian is not None
        assert self._guardian.stdout is not None
        with self._guardian.stdout as events:
            poll, rest = select.poll(), b""
            poll.register(events, select.POLLIN)
            while True:
                gone = self._guardian.poll() is not None  # asked first: what it has said is in the pipe by then
                if poll.poll(0 if gone else _LOOK_S * 1000):
                    data = os.read(events.fileno(), 65536)
                    *lines, rest = (rest + data).split(b"\n")
                    yield from lines
                    gone = not data
                if gone:
                    return

    def _guardian_was_killed(self) -> None:
        """Stop in the guardian's place what it had told of, then report the end."""
        assert self._guardian is not None
        code, error = self._guardian.wait(), None
        if code == 0:  # so it is for Popen where the kernel, or the step's code, has reaped it
            error = (
                "ended, and how is not known: the step's code ignores SIGCHLD, or waits for all children of its process"
            )
        # The agent's parent-death signal makes it stop its workers; what does not obey is killed.
        same = {pid for pid, began in self._tree.items() if guardian.began(pid) == began}
        guardian.await_or_kill(same, self._grace_s)
        end = {"event": "end", "t": time.monotonic(), "status": None, "error": error, "left": []}
        self._on_event({**end, "guardian": code})
