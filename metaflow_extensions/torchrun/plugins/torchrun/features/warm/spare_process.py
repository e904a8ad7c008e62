"""The parent's side of a spare process. A supervisor is the parent of a spare agent, which is that of its spare workers.

A request is three open files, sent over a socket: one for the program's stdout, one for its stderr, and one with the
program, its environment and its folder as JSON. The spare answers with an empty line if it accepts. Any other line is
the reason for a refusal, and the spare ends.
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
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from .imports import StartCold

# The variable with the kind of a spare, for ``worker_hooks/sitecustomize.py``.
KIND = "TORCHRUN_SPARE"
ANSWER_S = 60.0  # for all spares of a launch; a cold start would need most of it for the same imports
_PROGRAM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "spare.py")
_LOOK_S = 0.1


class Spare:
    """A spare process, for its parent."""

    def __init__(self, kind: str, options: Mapping[str, Any], env: Mapping[str, str], **more: Any):
        self._modules = options["modules"]
        self._deadline = float("inf")
        self._answer = b""
        self._server, theirs = socket.socketpair()
        # The output of the imports is shown when the program starts, as in a cold start.
        with tempfile.TemporaryFile() as out, theirs:
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `let_go`
            told = {**options, "kind": kind, "client": theirs.fileno()}
            self.process = subprocess.Popen(
                [sys.executable, "-u", _PROGRAM, json.dumps(told)],
                env={**env, KIND: kind},
                stdout=out,
                stderr=self._errors,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                **more,
            )

    def become(self, request: Mapping[str, Any], stdout: int, stderr: int, deadline: float) -> subprocess.Popen[bytes]:
        """Let the spare run the program of `request`; return its process. Any failure ends the spare.

        `deadline` is a time of the monotonic clock.
        """
        try:
            self.ask(request, stdout, stderr, deadline)
            while not self.poll(_LOOK_S):
                pass
        except BaseException:
            self.end()
            raise
        return self.process

    def ask(self, request: Mapping[str, Any], stdout: int, stderr: int, deadline: float) -> None:
        """Send a request; raises OSError or `StartCold`. `poll` returns the answer, which comes after the spare's imports."""
        self._deadline = deadline
        self.process.args = request["argv"]
        with tempfile.TemporaryFile() as told:
            told.write(json.dumps(request).encode())
            told.seek(0)
            try:
                socket.send_fds(self._server, [b"?"], [stdout, stderr, told.fileno()])
            except ConnectionError as error:
                raise self._has_ended() from error

    def fileno(self) -> int:
        """Return the file that is ready when it has answered."""
        return self._server.fileno()

    def poll(self, wait_s: float = 0.0) -> bool:
        """Wait for the answer, or so long; return whether the spare has become the program. Raises if it can't."""
        ready = select.poll()  # not `select`, which takes no number above 1023
        ready.register(self._server, select.POLLIN)
        if ready.poll(1000 * wait_s):
            try:
                part = self._server.recv(65536)
            except ConnectionError as error:
                raise self._has_ended() from error
            if not part:
                raise self._has_ended()
            self._answer += part
            if self._answer.endswith(b"\n"):
                if refusal := self._answer.decode(errors="replace").strip():
                    raise StartCold(refusal)
                self.let_go()
                return True
        elif self.process.poll() is not None:  # the socket may stay open: a fork of the spare may hold it
            raise self._has_ended()
        elif time.monotonic() > self._deadline:
            what = ", ".join(self._modules)
            raise StartCold(f"within {ANSWER_S:g} s it did not answer; it imports {what}")
        return False

    def _has_ended(self) -> StartCold:
        return StartCold(f"the spare process has ended{self._last_words()}")

    def _last_words(self) -> str:
        """Return the last line of its stderr."""
        self._errors.seek(0)
        lines = [line for line in self._errors.read().decode(errors="replace").split("\n") if line.strip()]
        return f": {lines[-1]}" if lines else ""

    def let_go(self) -> None:
        """Close what is between this process and the spare."""
        self._server.close()
        self._errors.close()

    def end(self) -> None:
        """End the spare, and what its imports have started. Call this only before it has become a program."""
        self.kill()
        self.process.wait()

    def kill(self) -> None:
        """Do the same, but wait for nothing: the kernel may keep a process that waits for a disk."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.let_go()
