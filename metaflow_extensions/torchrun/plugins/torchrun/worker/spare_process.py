"""The parent's side of a spare process. A supervisor is the parent of a spare agent, which is that of its spare workers.

A request is one packet over a socket: the program, its environment and its folder as JSON, with two open files for its
stdout and stderr. The spare's answer is `ACCEPTED`, or why it can't run the program.
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

# The variable with the kind of a spare, for ``worker_hooks/sitecustomize.py``.
KIND = "TORCHRUN_SPARE"
ACCEPTED = b"accepted"
ANSWER_S = 60.0  # a cold start would need most of it for the same imports
# What Python and torch read at their start (2.13, CPU build), and what GPUs add to that, by the beginnings of names.
READ_AT_START = (
    *("PY", "LD_", "GLIBC_", "MALLOC_", "LC_", "LANG", "TZ", "HOME", "TMP", "TEMP", "XDG_", "USE_", "COV", "LOGLEVEL"),
    *("TORCH", "FX_", "COMPILE_", "C10_", "ATEN_", "KINETO_", "GLOG_", "NPY_", "NUM", "GFORTRAN_", "INTEL_", "ACC_"),
    *("OMP_", "GOMP_", "KMP_", "MKL", "OPEN", "GOTO_", "BLIS_", "DNNL_", "ONEDNN_", "I_MPI_", "MPI_", "OMPI_", "SSL_"),
    *("CU", "NVIDIA_", "HIP_", "ROCR_", "HSA_", "XLA_", "NEURON_", "HABANA_"),
)
_PROGRAM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "spare.py")


class StartCold(Exception):
    """The spare can't run this program, so it starts cold; the text is the reason."""


def in_words(error: BaseException) -> str:
    """Return the reason why a spare could not be used, in one line."""
    text = str(error) if isinstance(error, StartCold) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())


class Spare:
    """A spare process, for its parent."""

    def __init__(self, kind: str, options: Mapping[str, Any], env: Mapping[str, str], cwd: str | None = None) -> None:
        self._deadline = float("inf")
        self._server, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # The output of the imports is shown when the program starts, as in a cold start.
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-u", _PROGRAM, json.dumps({**options, "client": theirs.fileno()})],
                env={**env, KIND: kind},
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def ask(self, request: Mapping[str, Any], stdout: int, stderr: int) -> None:
        """Send a request; `poll` returns the answer, which comes after the spare's imports."""
        self._deadline = time.monotonic() + ANSWER_S
        self.process.args = request["argv"]
        with suppress(ConnectionError):  # it has ended; `poll` tells why
            socket.send_fds(self._server, [json.dumps(request).encode()], [stdout, stderr])

    def poll(self, wait_s: float = 0.0) -> bool:
        """Wait for the answer, or so long; return whether the spare has become the program. Raises if it can't."""
        ready = select.poll()  # not `select`, which takes no number above 1023
        ready.register(self._server, select.POLLIN)
        if ready.poll(1000 * wait_s):
            try:
                answer = self._server.recv(65536)
            except ConnectionError:  # it has ended without reading the request; what it has told is still there
                answer = self._server.recv(65536)
            if answer != ACCEPTED:
                raise StartCold(answer.decode() or "the spare process has ended")
            self._server.close()
            return True
        if time.monotonic() > self._deadline:
            raise StartCold(f"the spare did not answer within {ANSWER_S:g} s")
        return False

    def kill(self) -> None:
        """End the spare, unless it has become a program; wait for nothing: the kernel may keep what waits for a disk."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self._server.close()
