"""What the workers of one node are doing: the Python stacks of their main threads.

Our hook in each worker (`worker_hooks`) has Python's `faulthandler` write the stack at a signal. That works while the
worker waits in C code, without any package, and without the right to trace it. A `Question` sends the signal.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress

from . import processes
from .frames import Found, read, sources, without_stack
from .source_lines import SourceLines

# A real-time signal: SIGUSR1 and SIGUSR2 belong to scripts, schedulers and torch itself (FatalSignalHandler in
# c10/util/signal_handler.h, torch 2.13). Who needs any real-time signal counts up from SIGRTMIN, and Valgrind
# takes SIGRTMAX, so this one is far from both. Counted from the top since C libraries differ in SIGRTMIN.
_SIGNAL = int(getattr(signal, "SIGRTMAX", 64)) - 8  # macOS has none, and commands import this there
_FILE = "torchrun-stacks"  # the beginning of the file's name, also in `worker_hooks`
_SETTLED_S = 0.3  # a file that has not grown for so long is complete


def hook_environment() -> dict[str, str]:
    """Return the variables that let workers be asked."""
    return {"TORCHRUN_STACKS_FOLDER": tempfile.gettempdir(), "TORCHRUN_STACKS_SIGNAL": str(_SIGNAL)}


class Question:
    """Asks all workers of a node at once what they do. Never raises for what a worker does or is.

    A worker without our hook is never signalled: the signal would kill it.
    """

    def __init__(self, workers: Mapping[int, int], within_s: float) -> None:
        """Ask; `workers` has a pid for each global rank."""
        self._deadline = time.monotonic() + within_s
        self._open = {rank: _Worker(pid) for rank, pid in workers.items()}
        self._answers: dict[int, str | Found] = {}  # a stack, or why there is none
        self._lines: SourceLines | None = None

    def poll(self) -> dict[int, Found] | None:
        """Return the answers by rank when all workers have answered or the time is up; None before."""
        is_late = time.monotonic() >= self._deadline
        for rank, worker in list(self._open.items()):
            if (answer := worker.answer(is_late)) is not None:
                self._answers[rank] = answer
                del self._open[rank]
        if self._open:
            return None
        stacks = dict(sorted(self._answers.items()))
        if self._lines is None:
            self._lines = SourceLines(
                line for each in stacks.values() if isinstance(each, str) for line in sources(each)
            )
        lines = self._lines.poll()
        if lines is None:
            return None
        return {rank: read(each, lines) if isinstance(each, str) else each for rank, each in stacks.items()}


class _Worker:
    """A worker that is asked."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._path = self._problem = ""
        self._size, self._since = 0, time.monotonic()
        try:
            self._path = self._ask()
        except (FileNotFoundError, ProcessLookupError):
            self._problem = "the process has ended"
        except (OSError, _CanNotAnswer) as error:
            self._problem = str(error)

    def _ask(self) -> str:
        """Send the signal; return the file to which the worker writes."""
        process = processes.find(self._pid)
        if process is None or not process.is_alive:
            raise _CanNotAnswer("the process has ended")
        if process.state in "Tt":  # it would answer when it goes on, which nobody waits for
            raise _CanNotAnswer(f"it is stopped (state {self._state()}), as by SIGSTOP or a debugger")
        path = self._file()
        # That it has our file open says that our hook ran in this program: exec closes the file.
        if path is None or not self._catches_signal():
            raise _CanNotAnswer(
                "it has no handler of ours (no Python, started with -I, -E or -S, or it has reset the signal)"
            )
        os.truncate(path, 0)  # else it would grow with each question; the worker appends
        os.kill(self._pid, _SIGNAL)
        return path

    def _file(self) -> str | None:
        """Return the path of its file, which has no name any more."""
        folder = f"/proc/{self._pid}/fd"
        for number in os.listdir(folder):
            with suppress(OSError):  # closed meanwhile
                if os.path.basename(os.readlink(f"{folder}/{number}")).startswith(f"{_FILE}-{self._pid} "):
                    return f"{folder}/{number}"
        return None

    def _catches_signal(self) -> bool:
        return bool(int(processes.status(self._pid).get("SigCgt", "0"), 16) >> (_SIGNAL - 1) & 1)

    def _state(self) -> str:
        return processes.status(self._pid).get("State", "unknown")

    def answer(self, is_late: bool) -> str | Found | None:
        """Return its stack, or why there is none; None while it may still write."""
        if self._problem:
            return without_stack(self._problem)
        try:
            if not (self._has_settled() or is_late):
                return None
            with open(self._path, encoding="utf-8", errors="replace") as file:
                stack = file.read().strip()
        except OSError:
            return without_stack("the process has ended")
        if not stack:
            return without_stack(f"it did not answer in time; it is in state {self._state()}")
        return stack

    def _has_settled(self) -> bool:
        now, size = time.monotonic(), os.stat(self._path).st_size
        if size != self._size:
            self._size, self._since = size, now
        return size > 0 and now - self._since >= _SETTLED_S


class _CanNotAnswer(Exception):
    """Why a worker can't be asked."""
