"""The process table: states, descendants and exit codes of processes.

It is read from ``/proc`` (see proc(5)). Standard library only, and little of it: `supervisor/between` imports this, too.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

_POLL_S = 0.05
_LOOK_S = 60.0  # with a pidfd
_NEVER = float("inf")
_KILL_WAIT_S = 10.0  # after SIGKILL only a process in uninterruptible sleep stays
HELPERS: set[int] = set()
"""Children of this process that belong to no launch: spares, and nvidia-smi. Who starts one reaps it."""


class Process(NamedTuple):
    """One line of the process table."""

    pid: int
    parent: int
    state: str  # one letter, such as "T" (stopped by a signal) or "Z" (dead, but not reaped)
    began: str = ""  # its start time. Pid and start time together name one process: the kernel reuses pids
    status: int | None = None  # the exit code of a dead process, negative for a signal; None if it can't be known
    threads: int = 1  # a dead process that is not reaped has one

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return not _has_ended(self.state, self.threads)


def _has_ended(state: str, threads: int) -> bool:
    """Return whether the process has ended for waitid(2) and a pidfd.

    The state is that of the main thread alone. As long as others run, or free memory, the process has its memory,
    ports and devices, and no exit code.
    """
    return state in ("Z", "X") and threads <= 1


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
    state, parent, threads, start_time, exit_code = fields[0], fields[1], int(fields[17]), fields[19], fields[49]
    is_known = state == "Z" and _has_ended(state, threads) and (exit_code != "0" or _shows_exit_code(pid))
    status = os.waitstatus_to_exitcode(int(exit_code)) if is_known else None
    return Process(pid, int(parent), state, start_time, status, threads)


def _shows_exit_code(pid: int) -> bool:
    """Return whether the exit code 0 of a dead process is true.

    The kernel says 0, whatever it is, to whom it denies ptrace access (proc_pid_stat(5)): without CAP_SYS_PTRACE, as in
    most containers, for a process that has changed its user or group.
    """
    ids, own = status(pid), {"Uid": os.geteuid(), "Gid": os.getegid()}
    return all(set(ids.get(name, "").split()) == {str(number)} for name, number in own.items())


def began(pid: int) -> str:
    """Return when a process began, see `Process.began`; empty if it is gone."""
    process = find(pid)
    return "" if process is None else process.began


def is_alive(pid: int, since: str) -> bool:
    """Return whether the process with this pid and start time lives."""
    process = find(pid)
    return process is not None and process.is_alive and process.began == since


def children(parent: int | None = None) -> list[int]:
    """Return the pids of the living children of a process; by default, of this one."""
    return [process.pid for process in _table() if process.is_alive and process.parent == _or_own(parent)]


def _or_own(pid: int | None) -> int:
    return pid or os.getpid()


def children_of_main_thread(parent: int | None = None) -> list[int]:
    """Return the pids of the children, dead ones too, that a process's main thread has started; by default, this one's.

    It is cheap enough to repeat. A kernel without CONFIG_PROC_CHILDREN tells the living children of all threads.
    """
    parent = _or_own(parent)
    path = f"/proc/{parent}/task/{parent}/children"
    return [int(pid) for pid in read(path).split()] if os.path.exists(path) else children(parent)


def living_descendants(ancestor: int | None = None, without: Collection[int] = ()) -> list[int]:
    """Return the pids of all living processes that descend from one, by default this, through dead ones, too.

    The processes `without`, and what descends from them, are left out.
    """
    below: dict[int, list[Process]] = {}
    for process in _table():
        below.setdefault(process.parent, []).append(process)
    found, queue = [], [_or_own(ancestor)]
    while queue:
        for process in below.get(queue.pop(), ()):
            if process.pid in without:
                continue
            queue.append(process.pid)
            if process.is_alive:
                found.append(process.pid)
    return found


def reap(without: Collection[int] = ()) -> Iterator[tuple[int, int]]:
    """Reap this process's children that have ended, but for those `without`; yield their pids and exit codes."""
    lists = [f"/proc/self/task/{thread}/children" for thread in os.listdir("/proc/self/task")]
    if os.path.exists(lists[0]):
        pids = [int(pid) for each in lists for pid in read(each).split()]
    else:  # a kernel without CONFIG_PROC_CHILDREN
        pids = [each.pid for each in _table() if each.parent == _or_own(None)]
    for pid in pids:
        if pid not in without:
            with suppress(ChildProcessError):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    yield pid, os.waitstatus_to_exitcode(status)


def _table() -> Iterator[Process]:
    for name in os.listdir("/proc"):
        if name.isdigit() and (process := find(int(name))) is not None:
            yield process


def command_line(pid: int) -> list[str]:
    """Return the argv of a process; empty if it is gone."""
    return _words(pid, "cmdline")[:-1]


def describe(pid: int) -> str:
    """Return a process's number and the beginning of its command line."""
    return f"{pid} ({' '.join(command_line(pid))[:200]})"


def status(pid: int) -> dict[str, str]:
    """Return ``/proc/PID/status``, which can be read even when the kernel holds the process; {} if there is none."""
    lines = (line.partition(":") for line in read(f"/proc/{pid}/status").splitlines())
    return {name: value.strip() for name, _, value in lines}


def blocks(pid: int, number: int) -> bool:
    """Return whether the main thread of a process blocks a signal."""
    return bool(int(status(pid).get("SigBlk", "0"), 16) >> (number - 1) & 1)


def _words(pid: int, name: str) -> list[str]:
    with suppress(OSError), open(f"/proc/{pid}/{name}", "rb") as file:
        return [os.fsdecode(word) for word in file.read().split(b"\0")]
    return []


def open_pidfd(pid: int) -> int | None:
    """Return a pidfd, or None. Raises ProcessLookupError if it is gone.

    Linux has it since 5.3, and some Pythons lack the name, such as uv's (python-build-standalone, in July 2026).
    """
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except (OSError, AttributeError):
        return None


class Other:
    """A process that need not be a child of this one, so that wait(2) can't report its end."""

    def __init__(self, pid: int, since: str) -> None:
        self.pid = pid
        self.began = since  # as `Process.began`; so it is not taken for one that gets its number later

    @property
    def has_ended(self) -> bool:
        """Whether it has ended; also true for dead processes that are not reaped."""
        return not is_alive(self.pid, self.began)

    @contextmanager
    def end(self) -> Iterator[int | None]:
        """Open a file that becomes readable at its end; None where there is none, or it has ended."""
        handle = None
        with suppress(ProcessLookupError):
            handle = open_pidfd(self.pid)
        try:
            yield None if self.has_ended else handle  # after its end the number may be another's
        finally:
            if handle is not None:
                os.close(handle)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for its end, or so long; return whether it has ended."""
        deadline = _NEVER if timeout_s is None else time.monotonic() + timeout_s
        with self.end() as handle:
            end = select.poll()
            if handle is not None:
                end.register(handle, select.POLLIN)
            look_s = _POLL_S if handle is None else _LOOK_S
            while not self.has_ended and time.monotonic() < deadline:
                end.poll(1000 * max(0.0, min(look_s, deadline - time.monotonic())))
        return self.has_ended

    def send_signal(self, number: int) -> None:
        """Signal it, if it is still there."""
        if not self.has_ended:
            send_signal(self.pid, number)


def send_signal(pid: int, number: int) -> None:
    """Signal a process, if it is still there."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def await_or_kill(roots: Iterable[int], grace_s: float) -> None:
    """Wait until `roots` and what descends from them are gone; after `grace_s` seconds kill them."""
    deadline = time.monotonic() + grace_s
    tree = {pid: began(pid) for pid in roots}
    while True:
        tree = {pid: since for pid, since in tree.items() if is_alive(pid, since)}
        # When a process ends, its children get another parent. So every process found is remembered.
        tree.update({pid: began(pid) for root in tree for pid in living_descendants(root)})
        if not tree or time.monotonic() > deadline + _KILL_WAIT_S:
            return
        if time.monotonic() > deadline:
            for pid in tree:
                send_signal(pid, signal.SIGKILL)
        time.sleep(_POLL_S)
