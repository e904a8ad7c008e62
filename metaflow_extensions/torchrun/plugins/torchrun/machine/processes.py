"""The process table: who lives, descends from whom, and how a process has ended.

It is read from ``/proc`` (see proc(5)). Standard library only, and little of it: `supervisor/between` imports this, too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

_POLL_S = 0.01  # a task waits for its supervisor's end
HELPERS: set[int] = set()
"""Children of this process that belong to no launch: spares, and nvidia-smi. Who starts one reaps it."""


class Process(NamedTuple):
    """One process, named by pid and start time: the kernel reuses pids. The rest is as it was when it was found."""

    pid: int
    began: str  # its start time
    parent: int = 0
    # False as for waitid(2) and a pidfd: no thread is left. As long as another one than the main thread runs, or frees
    # memory, the process has its memory, ports and devices, and no exit code.
    is_alive: bool = True
    status: int | None = None  # the exit code of a dead process, negative for a signal; None if it can't be known

    def now(self) -> Process | None:
        """Return the same process as it is now; None if it is gone and reaped."""
        now = find(self.pid)
        return now if now is not None and now.began == self.began else None

    @property
    def has_ended(self) -> bool:
        """Whether it has ended; also true for dead processes that are not reaped."""
        now = self.now()
        return now is None or not now.is_alive

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end, or so long; return whether it has ended."""
        deadline = time.monotonic() + timeout_s
        while not self.has_ended and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return self.has_ended


def read(path: str) -> str:
    """Return what a file of the kernel says, or nothing where it can't be read."""
    with suppress(OSError), open(path, "rb", buffering=0) as file:  # half the cost of a text file
        return file.read().decode(errors="replace")
    return ""


def find(pid: int) -> Process | None:
    """Return what ``/proc/PID/stat`` says of a process; None if it is gone and reaped."""
    # The second field, the command's name, may hold spaces and parentheses. So fields[0] is the third.
    fields = read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    if not fields:
        return None
    state, parent, threads, began, code = fields[0], int(fields[1]), fields[17], fields[19], fields[49]
    is_alive = state not in ("Z", "X") or threads not in ("0", "1")
    is_known = state == "Z" and not is_alive
    return Process(pid, began, parent, is_alive, os.waitstatus_to_exitcode(int(code)) if is_known else None)


def began(pid: int) -> str:
    """Return when a process began, see `Process.began`; empty if it is gone."""
    process = find(pid)
    return "" if process is None else process.began


def children(parent: int | None = None, of_main_thread: bool = False) -> list[int]:
    """Return the pids of a process's children, dead ones too; by default, of this process's.

    Those `of_main_thread` alone are cheap enough to look for again and again. A kernel without CONFIG_PROC_CHILDREN
    tells those of all threads.
    """
    parent = parent or os.getpid()
    tasks = f"/proc/{parent}/task"
    if os.path.exists(f"{tasks}/{parent}/children"):
        threads = [str(parent)] if of_main_thread else os.listdir(tasks)
        return [int(pid) for thread in threads for pid in read(f"{tasks}/{thread}/children").split()]
    return [process.pid for process in _table() if process.parent == parent]


def living_descendants(ancestor: int | None = None) -> list[int]:
    """Return the pids of all living processes that descend from one, by default this, through dead ones, too.

    The `HELPERS`, and what descends from them, are left out.
    """
    below: dict[int, list[Process]] = {}
    for process in _table():
        if process.pid not in HELPERS:
            below.setdefault(process.parent, []).append(process)
    found, queue = [], [ancestor or os.getpid()]
    for parent in queue:  # it grows meanwhile
        queue += [process.pid for process in below.get(parent, ())]
        found += [process.pid for process in below.get(parent, ()) if process.is_alive]
    return found


def reap() -> Iterator[tuple[int, int]]:
    """Reap this process's children that have ended, but for the `HELPERS`; yield their pids and exit codes."""
    for pid in children():
        if pid not in HELPERS:
            with suppress(ChildProcessError):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    yield pid, os.waitstatus_to_exitcode(status)


def _table() -> Iterator[Process]:
    for name in os.listdir("/proc"):
        if name.isdigit() and (process := find(int(name))) is not None:
            yield process


def status(pid: int) -> dict[str, str]:
    """Return ``/proc/PID/status``, which can be read even when the kernel holds the process; {} if there is none."""
    lines = (line.partition(":") for line in read(f"/proc/{pid}/status").splitlines())
    return {name: value.strip() for name, _, value in lines}


def has_signal(pid: int, field: str, number: int) -> bool:
    """Return whether a field of ``/proc/PID/status`` names a signal, such as ``"SigBlk"``, those that it blocks."""
    return bool(int(status(pid).get(field, "0"), 16) >> (number - 1) & 1)


def open_files(pid: int) -> Iterator[tuple[str, str]]:
    """Yield a path of each open file of a process, and what that is, such as ``socket:[7]``."""
    with suppress(OSError):  # the process is gone, or another user's
        for path in [f"/proc/{pid}/fd/{number}" for number in os.listdir(f"/proc/{pid}/fd")]:
            with suppress(OSError):  # closed meanwhile
                yield path, os.readlink(path)


def open_pidfd(pid: int) -> int | None:
    """Return a pidfd; None if the process is gone, or there are no pidfds.

    Linux has them since 5.3, and some Pythons lack the name, such as uv's (python-build-standalone, in July 2026).
    """
    with suppress(OSError, AttributeError):
        return os.pidfd_open(pid)
    return None


def send_signal(pid: int, number: int) -> None:
    """Signal a process, if it is still there."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
