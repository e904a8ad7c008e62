"""Runs the commands of ``run(before_run=...)`` on one node, one after the other, up to the first that fails.

A guardian runs it in the place of an agent: it ends it, and all that the commands have started. Its only argument is
a folder. ``commands.json`` there has the commands, each with its argv and how it is shown. Of each command that has
ended, ``ended.jsonl`` gets a line: its number from 0, its exit code (negative for a signal), why it could not be started,
and its seconds. Its output goes to a file where torchrun would put that of a worker.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

_HAS_LOCK = (
    "TORCHRUN_BEFORE_RUN"  # for a command that starts a gang of its own: this process has the lock of that folder
)
_STOPPED = 128 + signal.SIGTERM


class Runner:
    """The commands of one node."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._has_begun = False
        self._is_stopped = False

    def stop(self, *_: Any) -> None:
        """Handle SIGTERM, which comes from the kernel if the guardian is killed: end the command, then this process."""
        self._is_stopped = True
        if not self._has_begun:
            os._exit(_STOPPED)  # no command yet: it waits for the lock
        if self._process is not None:  # else it is just being started
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
            if self._is_stopped:  # it did not fail by itself
                return _STOPPED
            record = {"number": number, "status": status, "error": error, "seconds": time.monotonic() - begun}
            with open(os.path.join(self._folder, "ended.jsonl"), "a", encoding="ascii") as file:
                file.write(json.dumps(record) + "\n")
            if status != 0:
                return 1
        return 0

    def _run_one(self, number: int, command: dict[str, Any]) -> tuple[int | None, str | None]:
        """Run one command; return its exit code, or why it could not be started."""
        place = os.path.join(self._folder, "before_run", "attempt_0", str(number))
        os.makedirs(place)
        begun = time.monotonic()
        with open(os.path.join(place, "stdout.log"), "ab", buffering=0) as output:
            output.write(f"$ {command['shown']}\n".encode(errors="backslashreplace"))
            try:
                # A group of its own gets its SIGTERM. Both streams go to one file, so that their order stays.
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
                begin = b"" if _ends_a_line(output.name) else b"\n"
                output.write(begin + b"ended well after %.1f s\n" % (time.monotonic() - begun))
            return status, None


def _ends_a_line(path: str) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def lock_folder() -> None:
    """Wait until no other node of this machine runs its commands in the working directory, and keep others out.

    They would install into the same place at the same time, or make the same files. The lock ends with this process.
    """
    if (
        os.environ.get(_HAS_LOCK) == os.getcwd()
    ):  # a command that holds the lock has started this gang, and waits for it
        return
    os.environ[_HAS_LOCK] = os.getcwd()
    with suppress(OSError):  # a file system may have no such locks, as some of NFS
        folder = os.open(".", os.O_RDONLY)  # open until the end; what is started does not inherit it
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.stderr.write(f"waiting: before_run of another node runs in the same folder, {os.getcwd()}\n")
            fcntl.flock(folder, fcntl.LOCK_EX)


if __name__ == "__main__":
    runner = Runner(sys.argv[1])
    signal.signal(signal.SIGTERM, runner.stop)
    lock_folder()
    sys.exit(runner.run())
