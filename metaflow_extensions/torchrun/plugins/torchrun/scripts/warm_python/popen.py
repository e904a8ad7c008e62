"""How those who ask a warm process for a program hold it: as the `Popen` of a program that they have started."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from . import kernel, messages


class ForkedPopen(subprocess.Popen[bytes]):
    """A program that a warm process has forked, as a child of this process."""

    def __init__(self, pid: int, argv: Sequence[str]) -> None:
        self._forked = pid
        super().__init__(argv)

    def _execute_child(self, *_: Any, **__: Any) -> None:
        self.pid = self._forked
        self._child_created = True


def worker_popen(server: socket.socket, more_env: Mapping[str, str]) -> Any:
    """Return what torchrun is to use for `Popen`; each worker's environment has `more_env`, too.

    What the warm process refuses is started as ever, and the log has a line that says why.
    """
    said: set[str] = set()

    def popen(args: Sequence[str], env: Mapping[str, str], stdout: Any, stderr: Any, **options: Any) -> Any:
        own_env = {**env, **more_env}
        try:
            return ForkedPopen(_fork(server, args, own_env, stdout.fileno(), stderr.fileno()), args)
        except (messages.Refused, OSError, EOFError) as error:
            if str(error) not in said:
                said.add(str(error))
                sys.stderr.write(f"Workers are started as programs, not forked: {error}.\n")
        return subprocess.Popen(args, env=own_env, stdout=stdout, stderr=stderr, **options)

    return popen


def _fork(server: socket.socket, argv: Sequence[str], env: Mapping[str, str], stdout: int, stderr: int) -> int:
    request = {
        "argv": list(argv),
        "env": dict(env),
        "cwd": os.getcwd(),
        "umask": kernel.umask(),
        "dies_with_parent": False,
        "computes": True,
        "forks_workers": False,
    }
    kernel.adopt_orphans(True)
    try:
        messages.ask(server, request, stdout, stderr)
        return messages.read_answer(server)
    finally:
        kernel.adopt_orphans(False)
