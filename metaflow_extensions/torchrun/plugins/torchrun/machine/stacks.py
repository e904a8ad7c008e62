"""What the workers of one node are doing: the Python stacks of their main threads.

Our hook in each worker (`worker_hooks`) has Python's `faulthandler` write the stack at a signal. That works while the
worker waits in C code, without any package, and without the right to trace it.
"""

from __future__ import annotations

import asyncio
import linecache
import os
import signal
import tempfile
import time
from collections.abc import Iterable, Mapping

from . import processes
from .aside import Aside
from .frames import Found, SourceLine, read, without_stack

# A real-time signal: SIGUSR1 and SIGUSR2 belong to scripts, schedulers and torch itself (FatalSignalHandler in
# c10/util/signal_handler.h, torch 2.13). Who needs any real-time signal counts up from SIGRTMIN, and Valgrind
# takes SIGRTMAX, so this one is far from both. Counted from the top since C libraries differ in SIGRTMIN.
_SIGNAL = int(getattr(signal, "SIGRTMAX", 64)) - 8  # macOS has none, and commands import this there
_FILE = "torchrun-stacks"  # the beginning of the file's name, also in `worker_hooks`
_POLL_S = 0.05
_SETTLED_S = 0.3  # a file that has not grown for so long is complete
_LINES_S = 2.0  # for source lines, besides: their disk may be the very one that makes a launch hang
_LINE_CHARS = 160
_DISK = Aside("torchrun-lines")


def hook_environment() -> dict[str, str]:
    """Return the variables that let workers be asked."""
    return {"TORCHRUN_STACKS_FOLDER": tempfile.gettempdir(), "TORCHRUN_STACKS_SIGNAL": str(_SIGNAL)}


async def ask(workers: Mapping[int, int], within_s: float) -> dict[int, Found]:
    """Ask all workers of a node at once what they do; `workers` has a pid for each global rank.

    Returns when all have answered or the time is up. Never raises for what a worker does or is.
    """
    deadline = time.monotonic() + within_s
    found = await asyncio.gather(*(_stack_of(pid, deadline) for pid in workers.values()))
    try:
        linecache.clearcache()  # a script may have changed since
        answers = await _DISK.within(_LINES_S, _read_all, found, source_line)
    except TimeoutError:
        answers = _read_all(found)
    return dict(sorted(zip(workers, answers, strict=True)))


def _read_all(found: Iterable[str | Found], *line_of: SourceLine) -> list[Found]:
    return [read(each, *line_of) if isinstance(each, str) else each for each in found]


async def _stack_of(pid: int, deadline: float) -> str | Found:
    """Return the stack of a worker, or why there is none. One without our hook gets no signal, which would kill it."""
    try:
        if (process := processes.find(pid)) is None or not process.is_alive:
            raise ProcessLookupError
        # Its file has no name any more. That it is open says that our hook ran in this program: exec closes it.
        ours = [path for path, target in processes.open_files(pid) if f"/{_FILE}-{pid} " in target]
        if not ours or not processes.has_signal(pid, "SigCgt", _SIGNAL):
            return without_stack(
                "it has no handler of ours (no Python, started with -I, -E or -S, or it has reset the signal)"
            )
        os.truncate(ours[0], 0)  # else it would grow with each question; the worker appends
        os.kill(pid, _SIGNAL)
        size, since = 0, time.monotonic()
        while (now := time.monotonic()) < deadline and (size == 0 or now < since + _SETTLED_S):
            await asyncio.sleep(_POLL_S)
            if (grown := os.stat(ours[0]).st_size) != size:
                size, since = grown, time.monotonic()
        with open(ours[0], encoding="utf-8", errors="replace") as file:
            late = f"it did not answer in time; it is in state {processes.status(pid)['State']}"
            return file.read().strip() or without_stack(late)
    except (FileNotFoundError, ProcessLookupError, KeyError):
        return without_stack("the process has ended")
    except OSError as error:
        return without_stack(str(error))


def source_line(path: str, number: int) -> str:
    """Return a line of a source file, cut to what people read; "" where it can't be read."""
    text = linecache.getline(path, number).strip()
    text = "".join(char if char.isprintable() else " " for char in text)
    return text if len(text) <= _LINE_CHARS else f"{text[:_LINE_CHARS]}…"
