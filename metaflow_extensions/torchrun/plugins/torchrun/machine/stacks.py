"""What the workers of one node are doing: their Python stacks.

Before the start, `hook_environment` arranges that the workers can be asked. Our hook in each worker (`stacks_hook`)
registers a handler that writes their Python stacks. Later, `ask_workers` asks all workers at once, each in a thread of
its own: by that signal, or with py-spy where the caller has found it.

Made for Linux. Elsewhere (untried) only py-spy can tell stacks.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from . import processes

# A real-time signal: SIGUSR1 and SIGUSR2 belong to scripts, schedulers and torch itself (FatalSignalHandler in
# c10/util/signal_handler.h, torch 2.13). Who needs any real-time signal counts up from SIGRTMIN, and Valgrind
# takes SIGRTMAX, so this one is far from both. Counted from the top since C libraries differ in SIGRTMIN.
_SIGNAL = int(signal.SIGRTMAX) - 7 if hasattr(signal, "SIGRTMAX") else None

FOLDER = "stacks"  # where workers leave their stacks, in the folder of their logs
HOOK = os.path.join(os.path.dirname(os.path.abspath(__file__)), "stacks_hook.py")
_PY_SPY_SHARE = 0.6  # of the time; the rest is for the signal
_MARGIN_S = 0.5  # for threads that end at the deadline to say so
_SETTLED_S = 0.3  # a file that has not grown for so long is complete
_POLL_S = 0.05


@dataclass(frozen=True)
class Found:
    """What was found out about one worker."""

    where: str  # where its main thread was, in one line; or why that is not known
    mark: str  # equal marks: the main thread was at the same place, in all its frames; "" where that is not known
    text: str  # the stacks of all its threads; "" where there are none

    def shortened(self, limit: int) -> str:
        """Return the text without its middle: py-spy has the main thread first, faulthandler has it last."""
        if len(self.text) <= limit:
            return self.text
        half = limit // 2
        return f"{self.text[:half]}\n[… {len(self.text) - 2 * half} characters left out …]\n{self.text[-half:]}"


def hook_environment(folder: str) -> dict[str, str]:
    """Return the variables that let workers be asked; their stacks go to `folder`, which must exist as long as they."""
    return {} if _SIGNAL is None else {"TORCHRUN_STACKS_FOLDER": folder, "TORCHRUN_STACKS_SIGNAL": str(_SIGNAL)}


def find_py_spy() -> str | None:
    """Return the py-spy beside this Python, else the one on ``PATH``, or None."""
    return shutil.which("py-spy", path=os.path.dirname(sys.executable)) or shutil.which("py-spy")


def ask_workers(
    workers: Mapping[int, int],
    folder: str,
    within_s: float,
    py_spy: str | None,
    native: bool = False,
    is_ending: bool = True,
) -> dict[int, Found]:
    """Ask all workers at once what they do; return when all have answered, or when `within_s` seconds are over.

    `workers` has a pid for each global rank; `folder` is that of `hook_environment`. With a path of `py_spy` that is
    tried first, `native` with the frames of C and C++, for which it stops a worker for seconds. The signal gives the
    stacks of all threads only where the worker `is_ending`: to read those of others may end it (`stacks_hook`). A worker
    without our hook is never signalled. Never raises for what workers or py-spy do.
    """
    how = _How(folder, within_s, time.monotonic() + within_s, py_spy, native, is_ending)
    answers = _ask_all(workers, how)
    return {rank: _found(stacks, problem, workers[rank]) for rank, (stacks, problem) in answers.items()}


# --- asking -------------------------------------------------------------------------------------


_Answer: TypeAlias = tuple[str, str]
"""What one worker told: its stacks, or "" and why there are none."""


class _How(NamedTuple):
    """How the workers of one node are asked; the arguments of `ask_workers`."""

    folder: str
    within_s: float
    deadline: float  # of the monotonic clock
    py_spy: str | None
    native: bool
    is_ending: bool


def _ask_all(workers: Mapping[int, int], how: _How) -> dict[int, _Answer]:
    """Ask every worker in a thread of its own: even reading /proc can block on a process that the kernel holds."""
    answers: dict[int, _Answer] = {}  # each thread sets its own rank's, and one that is late is not looked at

    def ask(rank: int, pid: int) -> None:
        try:
            answers[rank] = _ask(pid, how)
        except Exception as error:
            answers[rank] = "", f"it could not be asked ({type(error).__name__}: {error})"

    # Daemons: one that the kernel holds must not keep the task from ending.
    threads = [threading.Thread(target=ask, args=each, name="torchrun-stacks", daemon=True) for each in workers.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, how.deadline + _MARGIN_S - time.monotonic()))
    found = dict(answers)
    for rank, pid in workers.items():
        if rank not in found:
            found[rank] = "", f"nothing could be learned within {how.within_s:g} s; it is in state {_state(pid)}"
    return dict(sorted(found.items()))


def _ask(pid: int, how: _How) -> _Answer:
    process = processes.find(pid)
    if sys.platform == "linux" and (process is None or not process.is_alive):
        return "", "the process has ended"
    stacks, failure = ("", "") if how.py_spy is None else _by_py_spy(how.py_spy, pid, how)
    if stacks:
        return stacks, ""
    stacks, problem = _by_signal(pid, how)
    return stacks, f"{problem}; {failure}" if failure else problem


def _by_py_spy(py_spy: str, pid: int, how: _How) -> _Answer:
    within_s = how.within_s * _PY_SPY_SHARE
    argv = [py_spy, "dump", *(["--native"] if how.native else []), "--full-filenames", "--pid", str(pid)]
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=within_s)
    except subprocess.TimeoutExpired:
        return "", f"py-spy gave no answer within {within_s:g} s"
    except OSError as error:
        return "", f"py-spy could not be started ({error})"
    stacks = done.stdout.decode("utf-8", "replace").strip()
    if done.returncode == 0 and _PY_SPY_FRAME.search(stacks):
        return stacks, ""
    said = " ".join(done.stderr.decode("utf-8", "replace").split())
    return "", f"py-spy failed: {said[:200] or f'exit code {done.returncode}'}"


def _by_signal(pid: int, how: _How) -> _Answer:
    path = os.path.join(how.folder, f"stacks-{pid}.txt")
    state = _state(pid)
    if state[:1] in "Tt":  # it would answer when it goes on, which nobody waits for
        return "", f"it is stopped (state {state}), as by SIGSTOP or a debugger"
    number = None if _SIGNAL is None else _SIGNAL if how.is_ending else _SIGNAL - 1
    # Without a handler the signal would kill it. That it has our file open says that ours ran in this program: the file
    # is closed when the process becomes another one (exec).
    if number is None or not _holds(pid, path) or not _catches(pid, number):
        return (
            "",
            "it has no handler of ours (no Python, started with -I, -E or -S, or it has reset the signal)",
        )
    os.truncate(path, 0)  # else it would grow with each question; the worker appends
    with suppress(ProcessLookupError):
        os.kill(pid, number)
    _wait_for_growth(path, how.deadline)
    with open(path, encoding="utf-8", errors="replace") as file:
        stacks = file.read().strip()
    return stacks, f"it did not answer in time; it is in state {_state(pid)}"


def _wait_for_growth(path: str, deadline: float) -> None:
    """Wait until the file has something and stays as it is, or until the deadline."""
    size, since = 0, time.monotonic()
    while (now := time.monotonic()) < deadline:
        if (current := os.path.getsize(path)) != size:
            size, since = current, now
        elif size > 0 and now - since >= _SETTLED_S:
            return
        time.sleep(_POLL_S)


def _state(pid: int) -> str:
    return processes.status(pid).get("State", "unknown")


def _holds(pid: int, path: str) -> bool:
    wanted = os.path.realpath(path)
    for number in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):  # closed meanwhile
            if os.readlink(f"/proc/{pid}/fd/{number}") == wanted:
                return True
    return False


def _catches(pid: int, number: int) -> bool:
    return bool(int(processes.status(pid).get("SigCgt", "0"), 16) >> (number - 1) & 1)


# --- reading stacks -----------------------------------------------------------------------------

_PY_SPY_FRAME = re.compile(r"^    (?P<function>\S.*) \((?P<path>.*):(?P<line>\d+)\)$", re.MULTILINE)
_FAULTHANDLER_FRAME = re.compile(r'^  File "(?P<path>.*)", line (?P<line>\d+|\?+) in (?P<function>.*)$', re.MULTILINE)
_THREAD = re.compile(r"^(?=(?:Thread|Current thread) \S+ )", re.MULTILINE)
# torch and the standard library. Not all installed packages: a trainer's loop may be one.
_LIBRARY = re.compile(r"(site|dist)-packages/torch/|/lib(64)?/python3\.\d+t?/(?!(site|dist)-packages/)|^<frozen ")


def _found(stacks: str, problem: str, pid: int) -> Found:
    """Return where the main thread was: the innermost frame of the user's and the innermost function of all."""
    if not stacks:
        return Found(f"no Python stack: {problem}", "", "")
    if stacks.endswith("\n..."):  # MAX_NTHREADS in Python/traceback.c
        return Found("of 100 threads none is the main one; install py-spy to see all", "", stacks)
    thread = _main_thread(stacks, pid)
    frames = list(_PY_SPY_FRAME.finditer(thread)) or list(_FAULTHANDLER_FRAME.finditer(thread))
    if not frames:
        return Found("outside of Python", "", stacks)
    mark = hashlib.sha256("\n".join(frame[0] for frame in frames).encode("utf-8", "replace")).hexdigest()[:16]
    own = next((frame for frame in frames if not _LIBRARY.search(frame["path"])), frames[0])
    text = f"{os.path.basename(own['path'])}:{own['line']} in {own['function']}"
    return Found(text if own is frames[0] else f"{text} (in {frames[0]['function']})", mark, stacks)


def _main_thread(stacks: str, pid: int) -> str:
    threads = _THREAD.split(stacks)[1:]
    for thread in threads:
        # py-spy gives the kernel's thread id, which is the process id for the main one.
        if thread.startswith(f"Thread {pid} "):
            return thread
    # faulthandler begins with the youngest (Python/traceback.c and add_threadstate in Python/pystate.c, 3.10 to 3.13).
    # With one thread alone there is no line that names it.
    return threads[-1] if threads else stacks
