"""Runs the commands of ``run(before_run=...)`` on one node, one after the other, up to the first that fails.

A supervisor runs it instead of an agent, and ends it with all processes that the commands have started. Commands of
other nodes in the same working directory are waited for. Its argument is a folder: ``commands.json`` in it lists the
commands, each with its argv and its text for the log.
``ended.jsonl`` gets a line for each ended command: its number from 0, its exit code (negative for a signal), why it could
not be started, and its seconds. Beside it are the pipes for the output of each command, as if it were a worker's.
"""

from __future__ import annotations

import sys

if not sys.flags.isolated:  # see `machine.detached.isolated`; Python's own library is the last three entries
    sys.path[:] = sys.path[-3:]

import fcntl
import json
import os
import signal
import subprocess
import time
from contextlib import suppress
from typing import Any

_HAS_LOCK = "TORCHRUN_BEFORE_RUN"  # a command may start a gang of its own: the folder whose lock this process has
_STOPPED = 128 + signal.SIGTERM


class Runner:
    """The commands of one node."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._has_begun = False
        self._is_stopped = False

    def stop(self, *_: Any) -> None:
        """Handle SIGTERM, which the kernel sends if the supervisor is killed: end the command, then this process."""
        self._is_stopped = True
        if not self._has_begun:
            os._exit(_STOPPED)  # no command has started: this process waits for the lock
        if self._process is not None:  # otherwise `_run_one` is starting it, and stops it then
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGTERM)

    def run(self) -> int:
        """Run all commands up to the first that fails; return this process's exit code."""
        self._has_begun = True
        with open(os.path.join(self._folder, "commands.json"), encoding="ascii") as file:
            commands = json.load(file)
        for number, command in enumerate(commands):
            begun = time.monotonic()
            status, error = self._run_one(number, command)
            if self._is_stopped:  # the command was stopped, and did not fail by itself
                return _STOPPED
            record = {"number": number, "status": status, "error": error, "seconds": time.monotonic() - begun}
            with open(os.path.join(self._folder, "ended.jsonl"), "a", encoding="ascii") as file:
                file.write(json.dumps(record) + "\n")
            if status != 0:
                return 1
        return 0

    def _run_one(self, number: int, command: dict[str, Any]) -> tuple[int | None, str | None]:
        """Run one command; return its exit code, or why it could not be started."""
        begun = time.monotonic()
        own = os.path.join(self._folder, str(number))
        with open(f"{own}.stdout", "wb", buffering=0) as output, open(f"{own}.stderr", "wb", buffering=0) as ours:
            output.write(f"$ {command['shown']}\n".encode(errors="backslashreplace"))
            try:
                # Its own process group gets SIGTERM. Both streams go to one pipe, which keeps their order.
                self._process = subprocess.Popen(
                    command["argv"],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except (OSError, ValueError) as error:
                return None, f"could not be started: {error}"
            if self._is_stopped:
                self.stop()
            status = self._process.wait()
            if status == 0:
                # Not to stdout, where its last line may have no end.
                ours.write(b"ended well after %.1f s\n" % (time.monotonic() - begun))
            return status, None


def lock_folder() -> None:
    """Lock the working directory, after other nodes of this machine have finished their commands there.

    Otherwise they would install into the same place or make the same files at the same time. The lock ends with this
    process.
    """
    if os.environ.get(_HAS_LOCK) == os.getcwd():  # a command that has the lock has started this gang, and waits for it
        return
    os.environ[_HAS_LOCK] = os.getcwd()
    with suppress(OSError):  # some file systems, such as some NFS, have no such locks
        folder = os.open(".", os.O_RDONLY)  # open until the end; commands don't inherit it
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.stderr.write(f"waiting: the commands of another node run in the same folder, {os.getcwd()}\n")
            fcntl.flock(folder, fcntl.LOCK_EX)


if __name__ == "__main__":
    runner = Runner(sys.argv[1])
    signal.signal(signal.SIGTERM, runner.stop)
    with suppress(Exception):  # a Python without ctypes
        import ctypes

        # PR_SET_PDEATHSIG of <linux/prctl.h>: SIGTERM when the supervisor ends, even where its parent is killed, too.
        ctypes.CDLL(None).prctl(1, ctypes.c_ulong(signal.SIGTERM), 0, 0, 0)
    lock_folder()
    sys.exit(runner.run())
