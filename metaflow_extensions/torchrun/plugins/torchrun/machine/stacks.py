"""What the workers of one node are doing: the Python stacks of their main threads.

Our hook in each worker (`stacks_hook`) has Python's `faulthandler` write the stack at a signal. That works while the
worker waits in C code, without any package, and without the right to trace it. A `Question` sends the signal.
"""

from __future__ import annotations

import hashlib
import os
import re
import signal
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from . import processes

# A real-time signal: SIGUSR1 and SIGUSR2 belong to scripts, schedulers and torch itself (FatalSignalHandler in
# c10/util/signal_handler.h, torch 2.13). Who needs any real-time signal counts up from SIGRTMIN, and Valgrind
# takes SIGRTMAX, so this one is far from both. Counted from the top since C libraries differ in SIGRTMIN.
_SIGNAL = int(getattr(signal, "SIGRTMAX", 64)) - 8  # macOS has none, and commands import this there
HOOK = os.path.join(os.path.dirname(os.path.abspath(__file__)), "stacks_hook.py")
_FILE = "torchrun-stacks"  # the beginning of the file's name, also in `stacks_hook`
_SETTLED_S = 0.3  # a file that has not grown for so long is complete


@dataclass(frozen=True)
class Found:
    """What was found out about one worker."""

    where: str  # where its main thread was, in one line; or why that is not known
    mark: str  # equal marks: the main thread was at the same place, in all its frames; "" where that is not known
    text: str  # the stack, with the innermost frame first; "" where there is none

    def shortened(self, limit: int) -> str:
        """Return the text without its end if it is longer."""
        left_out = len(self.text) - limit
        return self.text if left_out <= 0 else f"{self.text[:limit]}\n[… {left_out} characters left out]"


def hook_environment() -> dict[str, str]:
    """Return the variables that let workers be asked."""
    # Not the folder of the logs, which may be on a network's disk, where a removed file that is open gets another name.
    return {"TORCHRUN_STACKS_FOLDER": tempfile.gettempdir(), "TORCHRUN_STACKS_SIGNAL": str(_SIGNAL)}


class Question:
    """Asks all workers of a node at once what they do. Never raises for what a worker does or is.

    A worker without our hook is never signalled: the signal would kill it.
    """

    def __init__(self, workers: Mapping[int, int], within_s: float) -> None:
        """Ask; `workers` has a pid for each global rank."""
        self._deadline = time.monotonic() + within_s
        self._open = {rank: _Worker(pid) for rank, pid in workers.items()}
        self._found: dict[int, Found] = {}

    def poll(self) -> dict[int, Found] | None:
        """Return the answers by rank when all workers have answered or the time is up; None before."""
        is_late = time.monotonic() >= self._deadline
        for rank, worker in list(self._open.items()):
            if (found := worker.found(is_late)) is not None:
                self._found[rank] = found
                del self._open[rank]
        return None if self._open else dict(sorted(self._found.items()))


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

    def found(self, is_late: bool) -> Found | None:
        """Return its answer, or why there is none; None while it may still write."""
        if self._problem:
            return _without_stack(self._problem)
        try:
            if not (self._has_settled() or is_late):
                return None
            with open(self._path, encoding="utf-8", errors="replace") as file:
                stack = file.read().strip()
        except OSError:
            return _without_stack("the process has ended")
        if not stack:
            return _without_stack(f"it did not answer in time; it is in state {self._state()}")
        return _read(stack)

    def _has_settled(self) -> bool:
        now, size = time.monotonic(), os.stat(self._path).st_size
        if size != self._size:
            self._size, self._since = size, now
        return size > 0 and now - self._since >= _SETTLED_S


class _CanNotAnswer(Exception):
    """Why a worker can't be asked."""


# --- reading a stack ----------------------------------------------------------------------------

_FRAME = re.compile(r'^  File "(?P<path>.*)", line (?P<line>\d+|\?+) in (?P<function>.*)$', re.MULTILINE)
# torch and the standard library. Not all installed packages: a trainer's loop may be one.
_LIBRARY = re.compile(r"(site|dist)-packages/torch/|/lib(64)?/python3\.\d+t?/(?!(site|dist)-packages/)|^<frozen ")


def _without_stack(problem: str) -> Found:
    return Found(f"no Python stack: {problem}", "", "")


def _read(stack: str) -> Found:
    """Return where the thread was: the innermost frame of the user's, and the innermost function of all."""
    frames = list(_FRAME.finditer(stack))
    if not frames:
        return Found("outside of Python", "", stack)
    mark = hashlib.sha256("\n".join(frame[0] for frame in frames).encode()).hexdigest()[:16]
    own = next((frame for frame in frames if not _LIBRARY.search(frame["path"])), frames[0])
    where, inner = f"{os.path.basename(own['path'])}:{own['line']} in {own['function']}", frames[0]["function"]
    # A module's `forward` that calls torch's says nothing more.
    return Found(where if inner == own["function"] else f"{where} (in {inner})", mark, stack)
