"""What the workers of one node were doing when the gang was found to hang.

Two parts meet here. Before the start, `hook_environment` arranges that the workers can be asked: the
``sitecustomize`` of ours (`worker_hooks`) registers a handler that writes their Python stacks, and NCCL's
flight recorder gets a pipe through which a dump can be requested. After the decision, `collect` asks all
workers at once: with py-spy where it is installed, else by the signal.

Made for Linux. Elsewhere (untried) only py-spy can tell stacks.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

# A real-time signal: SIGUSR1 and SIGUSR2 belong to scripts, schedulers and torch itself (FatalSignalHandler in
# c10/util/signal_handler.h, torch 2.13). Who needs any real-time signal counts up from SIGRTMIN, and Valgrind
# takes SIGRTMAX, so this one is far from both. Counted from the top since C libraries differ in SIGRTMIN.
_SIGNAL = int(signal.SIGRTMAX) - 7 if hasattr(signal, "SIGRTMAX") else None
_FOLDER_VARIABLE = "TORCHRUN_STACKS_FOLDER"
_SIGNAL_VARIABLE = "TORCHRUN_STACKS_SIGNAL"

# The flight recorder, as torch 2.13 has it (torch/include/torch/csrc/distributed/c10d/ in the wheel). It knows both
# names (FlightRecorder.hpp), but prints of the second on every rank that it is deprecated. Versions before 2.8 know the
# second only, and old ones (2.4 by its documentation) record nothing without it.
_SIZE_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_RENAMED_IN = (2, 8)
_ENTRIES = "2000"
# A dump is written to this stem and the global rank (DebugInfoWriter in FlightRecorder.hpp); first wins.
_DUMP_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
# What is written to the pipe <stem><global rank>.pipe requests a dump (DumpPipe in ProcessGroupNCCL.hpp).
_PIPE_VARIABLE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
# With it (the default of 2.13, but not of old versions) NCCL's monitor looks at the pipe every second, without it
# every 8 minutes (HeartbeatMonitor::runLoop in ProcessGroupNCCL.cpp).
_MONITOR_VARIABLE = "TORCH_NCCL_DUMP_ON_TIMEOUT"
# torchfrtrace infers the prefix if only dumps have names that end with digits
# (_determine_prefix in torch/distributed/flight_recorder/components/loader.py, torch 2.13).
_DUMP_STEM = "nccl_trace_rank_"

_MAX_LOG_CHARS = 200_000
_PY_SPY_SHARE = 0.6  # of the time; the rest is for the signal
_SETTLED_S = 0.3  # a file that has not changed for so long is complete
_POLL_S = (0.01, 0.1)  # first and longest pause between looks
_MARGIN_S = 0.5  # for threads that end at the deadline to say so
_NONE = "no Python stack: "


@dataclass(frozen=True)
class Evidence:
    """What was found out about the workers of one node.

    Attributes
    ----------
    file : str or None
        The file with everything; flight recorder dumps lie beside it. None if nothing could be written.
    text : str
        Its contents for the log, at most some 200 KB: of long stacks the middle is left out.
    where : dict
        For every rank one line: where its main thread was, or why that is not known.
    """

    file: str | None
    text: str
    where: dict[int, str]


def hook_environment(folder: str, inherited: Mapping[str, str], torch_version: str) -> dict[str, str]:
    """Return the variables that let workers be asked what they do; what the user has set stays.

    Parameters
    ----------
    folder : str
        Where stacks and dumps go. It must exist already, and as long as the workers do.
    inherited : mapping
        The whole environment that the agent gets otherwise.
    torch_version : str
        Decides about names of variables.
    """
    defaults = {_MONITOR_VARIABLE: "1"}
    if not any(name in inherited for name in _SIZE_VARIABLES):
        defaults[_SIZE_VARIABLES[_is_older(torch_version, _RENAMED_IN)]] = _ENTRIES
    if not any(name in inherited for name in _DUMP_VARIABLES):  # ours under one name would beat theirs under the other
        defaults.update(dict.fromkeys(_DUMP_VARIABLES, os.path.join(folder, _DUMP_STEM)))
    if _holds_pipes(folder):  # or NCCL's monitor thread would throw, which ends the worker
        defaults[_PIPE_VARIABLE] = os.path.join(folder, _DUMP_STEM)
    env = {name: value for name, value in defaults.items() if name not in inherited}
    if _SIGNAL is not None:
        env[_FOLDER_VARIABLE] = folder
        env[_SIGNAL_VARIABLE] = str(_SIGNAL)
    return env


def _is_older(version: str, than: tuple[int, int]) -> bool:
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and (int(found[1]), int(found[2])) < than


def _holds_pipes(folder: str) -> bool:
    probe = os.path.join(folder, f".pipe-{os.getpid()}")
    try:
        os.mkfifo(probe)
        os.unlink(probe)
    except OSError:
        return False
    return True


def collect(
    workers: Mapping[int, int], folder: str, keep_in: str | None, name: str, within_s: float = 15.0
) -> Evidence:
    """Ask all workers at once what they do, and keep the answers where they survive the launch.

    A worker that runs our hook gets a signal; one without it is never signalled. Never raises for what workers,
    py-spy or the disk do.

    Parameters
    ----------
    workers : mapping
        Global rank -> process id.
    folder : str
        The folder given to `hook_environment`.
    keep_in : str or None
        Where the file is to be kept; made if it is missing. None, or a folder that can't be written to, is the
        system's temporary one.
    name : str
        What to call the fresh folder with the file.
    within_s : float
        Longest wait for all answers together.
    """
    return _collect(workers, folder, keep_in, name, within_s, _find_py_spy(sys.executable, None))


def _collect(
    workers: Mapping[int, int], folder: str, keep_in: str | None, name: str, within_s: float, py_spy: str | None
) -> Evidence:
    answers = _ask_all(workers, folder, within_s, py_spy)
    where = {rank: _where(answer, workers[rank]) for rank, answer in answers.items()}
    sections = [_section(rank, workers[rank], where[rank], answer) for rank, answer in answers.items()]
    dumps = _dumps(answers, folder)
    file, kept = _keep("\n".join(sections), dumps, keep_in, name)
    share = _MAX_LOG_CHARS // max(1, len(sections))
    return Evidence(file, "\n".join([_shortened(section, share) for section in sections] + kept), where)


def _find_py_spy(python: str, path: str | None) -> str | None:
    """Return the py-spy beside `python`, else the one on `path` (None: ``PATH``), or None."""
    return shutil.which("py-spy", path=os.path.dirname(python)) or shutil.which("py-spy", path=path)


# --- asking -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Answer:
    """What one worker told: its stacks, or why there are none; notes about ways that failed; its dump, if one came."""

    stacks: str = ""
    problem: str = ""
    notes: tuple[str, ...] = ()
    dump: str | None = None


def _ask_all(workers: Mapping[int, int], folder: str, within_s: float, py_spy: str | None) -> dict[int, _Answer]:
    """Ask every worker in a thread of its own: even reading /proc can block on a process that the kernel holds."""
    deadline = time.monotonic() + within_s
    answers: dict[int, _Answer] = {}

    def ask(rank: int, pid: int) -> None:
        try:
            dump = _request_dump(pid, rank, folder)
            answers[rank] = answer = _ask(pid, folder, deadline, within_s * _PY_SPY_SHARE, py_spy)
            if dump is not None and _await_change(*dump, deadline):
                answers[rank] = _Answer(answer.stacks, answer.problem, answer.notes, dump[0])
        except Exception as error:
            answers.setdefault(rank, _Answer(problem=f"it could not be asked ({type(error).__name__}: {error})"))

    threads = [
        threading.Thread(target=ask, args=each, name="torchrun-evidence", daemon=True) for each in workers.items()
    ]
    with suppress(RuntimeError):  # no thread or process is to be had any more
        for thread in threads:
            thread.start()
    for thread in threads:
        if thread.ident is not None:
            thread.join(max(0.0, deadline + _MARGIN_S - time.monotonic()))
    return {rank: answers.get(rank) or _silent(pid, within_s) for rank, pid in sorted(workers.items())}


def _ask(pid: int, folder: str, deadline: float, py_spy_s: float, py_spy: str | None) -> _Answer:
    if _is_gone(pid):
        return _Answer(problem="the process has ended")
    if py_spy is None:
        return _by_signal(pid, folder, deadline)
    answer = _by_py_spy(py_spy, pid, py_spy_s)
    if answer.stacks:
        return answer
    second = _by_signal(pid, folder, deadline)
    return _Answer(second.stacks, second.problem, (answer.problem,))


def _by_py_spy(py_spy: str, pid: int, within_s: float) -> _Answer:
    argv = [py_spy, "dump", "--full-filenames", "--pid", str(pid)]
    if _state(pid)[:1] in ("T", "t"):
        argv.append("--nonblocking")  # py-spy 0.4.3 fails to pause what is stopped already
    try:
        env = {**os.environ, "CLICOLOR_FORCE": "0"}
        done = subprocess.run(argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=within_s)
    except subprocess.TimeoutExpired:
        return _Answer(problem=f"py-spy gave no answer within {within_s:g} s")
    except OSError as error:
        return _Answer(problem=f"py-spy could not be started ({error})")
    stacks = done.stdout.decode("utf-8", "replace").strip()
    if done.returncode == 0 and _PY_SPY_FRAME.search(stacks):
        return _Answer(stacks)
    said = done.stderr.decode("utf-8", "replace").split("Stack backtrace:")[0]
    return _Answer(problem=f"py-spy failed: {' '.join(said.split())[:500] or f'exit code {done.returncode}'}")


def _by_signal(pid: int, folder: str, deadline: float) -> _Answer:
    path = os.path.join(folder, f"stacks-{pid}.txt")
    # Without a handler the signal would kill it. The file says that ours ran in this process.
    if _SIGNAL is None or not os.path.exists(path) or not _catches(pid, _SIGNAL):
        return _Answer(problem="it has no handler of ours (no Python, or one started with -I, -E or -S)")
    if _state(pid)[:1] in ("T", "t"):
        return _Answer(problem=f"it is in state {_state(pid)}, so it runs no handler; install py-spy to see it anyway")
    before = _signature(path)
    try:
        os.kill(pid, _SIGNAL)
    except OSError as error:
        return _Answer(problem=f"it could not be signalled ({error})")
    _await_change(path, before, deadline)
    with open(path, encoding="utf-8", errors="replace") as file:
        file.seek(before[0] if before else 0)
        stacks = file.read().strip()
    return _Answer(stacks) if stacks else _Answer(problem=f"it did not answer in time; it is in state {_state(pid)}")


def _silent(pid: int, within_s: float) -> _Answer:
    return _Answer(problem=f"nothing could be learned within {within_s:g} s; it is in state {_state(pid)}")


def _await_change(path: str, before: tuple[int, int] | None, deadline: float) -> bool:
    """Wait until a file has changed and stays as it is; tell whether it has changed."""
    pause, longest = _POLL_S
    seen, since = before, time.monotonic()
    while (now := time.monotonic()) < deadline:
        current = _signature(path)
        if current != seen:
            seen, since = current, now
        elif seen != before and seen is not None and seen[0] > 0 and now - since >= _SETTLED_S:
            return True
        time.sleep(pause)
        pause = min(pause * 1.5, longest)
    return seen not in (before, None)


def _signature(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


# --- /proc --------------------------------------------------------------------------------------


def _status(pid: int) -> dict[str, str]:
    """Return ``/proc/PID/status``, which can be read even when the kernel holds the process; {} if there is none."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            return {name: value.strip() for name, _, value in (line.partition(":") for line in file)}
    except OSError:
        return {}


def _state(pid: int) -> str:
    """Return a process's state, such as ``D (disk sleep)``."""
    return _status(pid).get("State", "unknown")


def _is_gone(pid: int) -> bool:
    with suppress(PermissionError):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
    return _state(pid)[:1] in ("Z", "X")


def _catches(pid: int, number: int) -> bool:
    return bool(int(_status(pid).get("SigCgt", "0"), 16) >> (number - 1) & 1)


def _environment(pid: int) -> dict[str, str]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            entries = (os.fsdecode(entry).partition("=") for entry in file.read().split(b"\0"))
            return {name: value for name, _, value in entries}
    except OSError:
        return {}


# --- flight recorder ----------------------------------------------------------------------------


def _request_dump(pid: int, rank: int, folder: str) -> tuple[str, tuple[int, int] | None] | None:
    """Request a dump if there is a pipe; return which file to wait for and what that is now."""
    pipe = os.path.join(folder, f"{_DUMP_STEM}{rank}.pipe")
    try:
        fd = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)  # fails if nobody reads
    except OSError:
        return None
    try:
        if not stat.S_ISFIFO(os.fstat(fd).st_mode):
            return None
        env = _environment(pid)  # the user may have chosen another file
        stem = next((env[name] for name in _DUMP_VARIABLES if env.get(name)), os.path.join(folder, _DUMP_STEM))
        path = os.path.join(f"/proc/{pid}/cwd", f"{stem}{rank}")
        before = _signature(path)
        os.write(fd, b"dump\n")
    except OSError:
        return None
    finally:
        os.close(fd)
    return path, before


def _dumps(answers: Mapping[int, _Answer], folder: str) -> list[str]:
    """Return the dumps that came, and those that had been made before, such as at a timeout of NCCL's own."""
    came = [answer.dump for answer in answers.values() if answer.dump is not None]
    with suppress(OSError):
        came += [os.path.join(folder, name) for name in sorted(os.listdir(folder)) if _DUMP_NAME.fullmatch(name)]
    return list({os.path.basename(path): path for path in came}.values())


_DUMP_NAME = re.compile(re.escape(_DUMP_STEM) + r"\d+")


# --- keeping ------------------------------------------------------------------------------------


def _keep(text: str, dumps: Sequence[str], keep_in: str | None, name: str) -> tuple[str | None, list[str]]:
    """Write a fresh folder with everything; return the file and what to say of the dumps."""
    for parent in ([keep_in] if keep_in is not None else []) + [None]:
        try:
            folder = _fresh_folder(parent, name)
        except OSError:
            continue
        path = os.path.join(folder, "stacks.txt")
        try:
            with open(path, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text + "\n")
        except OSError:  # the disk is full
            shutil.rmtree(folder, ignore_errors=True)
            continue
        said = _said_of_dumps([os.path.basename(dump) for dump in dumps if _copied(dump, folder)], folder)
        with suppress(OSError), open(path, "a", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(f"{line}\n" for line in said)
        return path, said
    return None, []


def _fresh_folder(parent: str | None, name: str) -> str:
    if parent is not None:
        os.makedirs(parent, exist_ok=True)
    name = re.sub(r"[^\w.-]", "_", name)[:50]
    return tempfile.mkdtemp(prefix=f"torchrun-hang-{name}-", dir=parent)


def _copied(dump: str, folder: str) -> bool:
    copy = os.path.join(folder, os.path.basename(dump))
    try:
        shutil.copyfile(dump, copy)
    except OSError:
        with suppress(OSError):
            os.unlink(copy)
        return False
    return True


def _said_of_dumps(names: Sequence[str], folder: str) -> list[str]:
    if not names:
        return []
    return [
        f"NCCL's flight recorder: {', '.join(names)} in {folder}. With those of all nodes in one folder, "
        "torchfrtrace FOLDER (it comes with torch) tells which collective is missing whom."
    ]


# --- reading stacks -----------------------------------------------------------------------------

_PY_SPY_FRAME = re.compile(r"^    (?P<function>\S.*) \((?P<path>.*):(?P<line>\d+)\)$", re.MULTILINE)
_FAULTHANDLER_FRAME = re.compile(r'^  File "(?P<path>.*)", line (?P<line>\d+|\?+) in (?P<function>.*)$', re.MULTILINE)
_THREAD = re.compile(r"^(?=(?:Thread|Current thread) \S+ )", re.MULTILINE)
# torch and the standard library. Not all installed packages: a trainer's loop may be one.
_LIBRARY = re.compile(r"(site|dist)-packages/torch/|/lib(64)?/python3\.\d+t?/(?!(site|dist)-packages/)|^<frozen ")


def _where(answer: _Answer, pid: int) -> str:
    """Return where the main thread was: the innermost frame of the user's and the innermost function of all."""
    if not answer.stacks:
        return _NONE + answer.problem
    if answer.stacks.endswith("\n..."):
        return "of 100 threads none is the main one; install py-spy to see all"  # MAX_NTHREADS in Python/traceback.c
    thread = _main_thread(answer.stacks, pid)
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


def _section(rank: int, pid: int, where: str, answer: _Answer) -> str:
    heading = f"--- rank {rank}, pid {pid}: {where}"
    notes = [f"({note})" for note in answer.notes]
    return "\n".join([heading, *notes, *([answer.stacks] if answer.stacks else [])]) + "\n"


def _shortened(text: str, limit: int) -> str:
    """Leave out the middle: py-spy has the main thread first, faulthandler has it last."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half} characters left out …]\n{text[-half:]}"
