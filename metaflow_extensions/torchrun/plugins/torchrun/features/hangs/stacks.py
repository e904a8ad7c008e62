"""What the workers of one node were doing when the gang was found to hang.

Before the start, `hook_environment` arranges that the workers can be asked. Our hook in each worker (`hook`)
registers a handler that writes their Python stacks. Later, `collect` asks all workers at once, each in a thread of its
own: with py-spy where it is installed, else by the signal.

Made for Linux. Elsewhere (untried) only py-spy can tell stacks.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

from ...machine import processes

# A real-time signal: SIGUSR1 and SIGUSR2 belong to scripts, schedulers and torch itself (FatalSignalHandler in
# c10/util/signal_handler.h, torch 2.13). Who needs any real-time signal counts up from SIGRTMIN, and Valgrind
# takes SIGRTMAX, so this one is far from both. Counted from the top since C libraries differ in SIGRTMIN.
_SIGNAL = int(signal.SIGRTMAX) - 7 if hasattr(signal, "SIGRTMAX") else None

_MAX_LOG_CHARS = 200_000
_PY_SPY_SHARE = 0.6  # of the time; the rest is for the signal
_MARGIN_S = 0.5  # for threads that end at the deadline to say so
_SETTLED_S = 0.3  # a file that has not grown for so long is complete
_POLL_S = 0.05


@dataclass(frozen=True)
class Findings:
    """What was found out about the workers of one node."""

    file: str | None  # with everything. None if nothing could be written
    text: str  # its contents for the log, at most some 200 KB: of long stacks the middle is left out
    where: dict[int, str]  # for every rank one line: where its main thread was, or why that is not known


def hook_environment(folder: str) -> dict[str, str]:
    """Return the variables that let workers be asked; their stacks go to `folder`, which must exist as long as they."""
    return {} if _SIGNAL is None else {"TORCHRUN_STACKS_FOLDER": folder, "TORCHRUN_STACKS_SIGNAL": str(_SIGNAL)}


def find_py_spy() -> str | None:
    """Return the py-spy beside this Python, else the one on ``PATH``, or None."""
    return shutil.which("py-spy", path=os.path.dirname(sys.executable)) or shutil.which("py-spy")


def collect(
    workers: Mapping[int, int], folder: str, keep_in: str | None, name: str, within_s: float, py_spy: str | None
) -> Findings:
    """Ask all workers at once what they do, and keep the answers where they survive the launch.

    `workers` has a pid for each global rank; `folder` is that of `hook_environment`. The file lies in a fresh folder
    below `keep_in`, or below the system's temporary folder. A worker without our hook is never signalled. Never raises
    for what workers, py-spy or the disk do.
    """
    answers = _ask_all(workers, folder, within_s, py_spy)
    where = {rank: _where(*answer, workers[rank]) for rank, answer in answers.items()}
    sections = [
        f"--- rank {rank}, pid {workers[rank]}: {where[rank]}\n{stacks}\n" for rank, (stacks, _) in answers.items()
    ]
    file = _keep("\n".join(sections), keep_in, name)
    share = _MAX_LOG_CHARS // max(1, len(sections))
    return Findings(file, "\n".join(_shortened(section, share) for section in sections), where)


def _keep(text: str, keep_in: str | None, name: str) -> str | None:
    try:
        if keep_in is not None:
            os.makedirs(keep_in, exist_ok=True)
        path = os.path.join(tempfile.mkdtemp(prefix=f"torchrun-hang-{name}-", dir=keep_in), "stacks.txt")
        with open(path, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{text}\n")
    except OSError:  # no such place, or the disk is full
        return None
    return path


def _shortened(text: str, limit: int) -> str:
    """Leave out the middle: py-spy has the main thread first, faulthandler has it last."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half} characters left out …]\n{text[-half:]}"


# --- asking -------------------------------------------------------------------------------------


_Answer: TypeAlias = tuple[str, str]
"""What one worker told: its stacks, or "" and why there are none."""


def _ask_all(workers: Mapping[int, int], folder: str, within_s: float, py_spy: str | None) -> dict[int, _Answer]:
    """Ask every worker in a thread of its own: even reading /proc can block on a process that the kernel holds."""
    deadline = time.monotonic() + within_s
    answers: dict[int, _Answer] = {}  # each thread sets its own rank's, and one that is late is not looked at

    def ask(rank: int, pid: int) -> None:
        try:
            answers[rank] = _ask(pid, folder, deadline, within_s * _PY_SPY_SHARE, py_spy)
        except Exception as error:
            answers[rank] = "", f"it could not be asked ({type(error).__name__}: {error})"

    # Daemons: one that the kernel holds must not keep the task from ending.
    threads = [threading.Thread(target=ask, args=each, name="torchrun-stacks", daemon=True) for each in workers.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline + _MARGIN_S - time.monotonic()))
    found = dict(answers)
    for rank, pid in workers.items():
        if rank not in found:
            found[rank] = "", f"nothing could be learned within {within_s:g} s; it is in state {_state(pid)}"
    return dict(sorted(found.items()))


def _ask(pid: int, folder: str, deadline: float, py_spy_s: float, py_spy: str | None) -> _Answer:
    process = processes.find(pid)
    if sys.platform == "linux" and (process is None or not process.is_alive):
        return "", "the process has ended"
    stacks, failure = ("", "") if py_spy is None else _by_py_spy(py_spy, pid, py_spy_s)
    if stacks:
        return stacks, ""
    stacks, problem = _by_signal(pid, folder, deadline)
    return stacks, f"{problem}; {failure}" if failure else problem


def _by_py_spy(py_spy: str, pid: int, within_s: float) -> _Answer:
    argv = [py_spy, "dump", "--full-filenames", "--pid", str(pid)]
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


def _by_signal(pid: int, folder: str, deadline: float) -> _Answer:
    path = os.path.join(folder, f"stacks-{pid}.txt")
    # Without a handler the signal would kill it. The file says that ours ran in this process.
    if _SIGNAL is None or not os.path.exists(path) or not _catches(pid, _SIGNAL):
        return "", "it has no handler of ours (no Python, or one started with -I, -E or -S)"
    former_size = os.path.getsize(path)
    with suppress(ProcessLookupError):
        os.kill(pid, _SIGNAL)
    _wait_for_growth(path, former_size, deadline)
    with open(path, encoding="utf-8", errors="replace") as file:
        file.seek(former_size)
        stacks = file.read().strip()
    return stacks, f"it did not answer in time; it is in state {_state(pid)}"


def _wait_for_growth(path: str, former_size: int, deadline: float) -> None:
    """Wait until the file is larger than `former_size` and stays as it is, or until the deadline."""
    size, since = former_size, time.monotonic()
    while (now := time.monotonic()) < deadline:
        if (current := os.path.getsize(path)) != size:
            size, since = current, now
        elif size > former_size and now - since >= _SETTLED_S:
            return
        time.sleep(_POLL_S)


def _state(pid: int) -> str:
    return processes.status(pid).get("State", "unknown")


def _catches(pid: int, number: int) -> bool:
    return bool(int(processes.status(pid).get("SigCgt", "0"), 16) >> (number - 1) & 1)


# --- reading stacks -----------------------------------------------------------------------------

_PY_SPY_FRAME = re.compile(r"^    (?P<function>\S.*) \((?P<path>.*):(?P<line>\d+)\)$", re.MULTILINE)
_FAULTHANDLER_FRAME = re.compile(r'^  File "(?P<path>.*)", line (?P<line>\d+|\?+) in (?P<function>.*)$', re.MULTILINE)
_THREAD = re.compile(r"^(?=(?:Thread|Current thread) \S+ )", re.MULTILINE)
# torch and the standard library. Not all installed packages: a trainer's loop may be one.
_LIBRARY = re.compile(r"(site|dist)-packages/torch/|/lib(64)?/python3\.\d+t?/(?!(site|dist)-packages/)|^<frozen ")


def _where(stacks: str, problem: str, pid: int) -> str:
    """Return where the main thread was: the innermost frame of the user's and the innermost function of all."""
    if not stacks:
        return f"no Python stack: {problem}"
    if stacks.endswith("\n..."):  # MAX_NTHREADS in Python/traceback.c
        return "of 100 threads none is the main one; install py-spy to see all"
    thread = _main_thread(stacks, pid)
    frames = list(_PY_SPY_FRAME.finditer(thread)) or list(_FAULTHANDLER_FRAME.finditer(thread))
    if not frames:
        return "outside of Python"
    own = next((frame for frame in frames if not _LIBRARY.search(frame["path"])), frames[0])
    text = f"{os.path.basename(own['path'])}:{own['line']} in {own['function']}"
    return text if own is frames[0] else f"{text} (in {frames[0]['function']})"


def _main_thread(stacks: str, pid: int) -> str:
    threads = _THREAD.split(stacks)[1:]
    for thread in threads:
        # py-spy gives the kernel's thread id, which is the process id for the main one.
        if thread.startswith(f"Thread {pid} "):
            return thread
    # faulthandler begins with the youngest (Python/traceback.c and add_threadstate in Python/pystate.c, 3.10 to 3.13).
    return threads[-1] if threads else ""
