"""The parent's side of a spare process. A guardian is the parent of a spare agent, which is that of its spare workers.

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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from .imports import StartCold

# The variable with the kind of a spare, for ``worker_hooks/sitecustomize.py``.
KIND = "TORCHRUN_SPARE"
ANSWER_S = 60.0  # for all spares of a launch; a cold start would need most of it for the same imports
_PROGRAM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "spare.py")
_LOOK_S = 0.1


class Spare:
    """A spare process, for its parent; only one thread uses it."""

    def __init__(self, kind: str, options: Mapping[str, Any], env: Mapping[str, str], **more: Any):
        self._modules = options["modules"]
        self._server, theirs = socket.socketpair()
        # The output of the imports is shown when the program starts, as in a cold start.
        with tempfile.TemporaryFile() as out, theirs:
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `_let_go`
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

    def become(
        self,
        request: Mapping[str, Any],
        stdout: int,
        stderr: int,
        deadline: float,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> subprocess.Popen[bytes]:
        """Let the spare run the program of `request`; return its process. Any failure ends the spare.

        `deadline` is a time of the monotonic clock.
        """
        try:
            with tempfile.TemporaryFile() as told:
                told.write(json.dumps(request).encode())
                told.seek(0)
                refusal = self._ask([stdout, stderr, told.fileno()], deadline, is_wanted)
            if refusal:
                raise StartCold(refusal)
        except ConnectionError as error:
            last_words = self._last_words()
            self.end()
            raise StartCold(f"the spare process has ended{last_words}") from error
        except BaseException:
            self.end()
            raise
        self._let_go()
        self.process.args = request["argv"]
        return self.process

    def _ask(self, files: Sequence[int], deadline: float, is_wanted: Callable[[], bool]) -> str:
        """Send a request and return the answer, which comes after the spare's imports."""
        socket.send_fds(self._server, [b"?"], files)
        answer = b""
        while not answer.endswith(b"\n"):
            if select.select([self._server], [], [], _LOOK_S)[0]:
                if not (part := self._server.recv(65536)):
                    raise ConnectionError
                answer += part
            elif self.process.poll() is not None:  # the socket may stay open: a fork of the spare may hold it
                raise ConnectionError
            elif not is_wanted():
                raise StartCold("the launch was stopped")
            elif time.monotonic() > deadline:
                what = ", ".join(self._modules)
                why = f"it imports {what}, or it was stopped"
                raise StartCold(f"within {ANSWER_S:g} s it did not answer; {why}")
        return answer.decode(errors="replace").strip()

    def _last_words(self) -> str:
        """Return the last line of its stderr."""
        self._errors.seek(0)
        lines = [line for line in self._errors.read().decode(errors="replace").split("\n") if line.strip()]
        return f": {lines[-1]}" if lines else ""

    def _let_go(self) -> None:
        self._server.close()
        self._errors.close()

    def end(self) -> None:
        """End the spare, and what its imports have started. Call this only before it has become a program."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._let_go()
