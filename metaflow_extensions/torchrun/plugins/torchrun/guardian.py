"""Stands between a task and its agent, and outlives neither.

It runs as a process of its own (``python -I -S guardian.py OPTIONS -- ARGV``), standard library only,
because three things can't be done from inside the task:

- when the task dies, by SIGKILL even, we see it, and the whole tree is stopped;
- as a child subreaper it inherits every orphan of the tree, so workers of a killed agent and
  grandchildren that detached themselves are found, stopped and reaped;
- it sees a worker die the moment it happens, before torchrun does, and reads how.

Whatever signals the step's code ignores or blocks, we and all that we start begin with the defaults.

Protocol: lines on stdin are commands: ``stop GRACE_S`` sends SIGTERM to the whole tree, ``preempt GRACE_S
SIGNAL`` sends SIGNAL to the workers alone, so that what they have started still serves them while they save.
Lines on stdout are JSON events (``agent``, ``worker``, ``worker_end``, ``worker_reaped``, ``frozen``, ``terminated``,
``agent_end``, ``stopping``, ``end``). Times are seconds of the machine's monotonic clock.

Made for Linux. Elsewhere (untried; it needs ``os.waitid``, on macOS Python 3.13) the tree is found by
walking parents, so processes that detach themselves *and* lose their parent are not seen; torchrun's
own report names the failed workers then.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

_PR_SET_PDEATHSIG = 1  # Linux, <linux/prctl.h>
_PR_SET_CHILD_SUBREAPER = 36
_IN_CREATE = 0x100  # Linux, <linux/inotify.h>
_SEARCH_S = 0.05  # between looks while workers appear, and while processes are to go
_WATCH_S = 0.5  # between looks while none appear, or all are known; every end wakes us at once
_SLOWER = 1.05  # a factor that makes of the former the latter within 10 s
_KILL_WAIT_S = 10.0  # after SIGKILL only a process in uninterruptible sleep stays
_REPORT_S = 1.0  # torchrun polls every 0.1 s; workers that obey SIGTERM are gone soon after
_STRAGGLER_GRACE_S = 2.0  # for what the agent left behind when it ended by itself
_HAS_PROC = os.path.isdir("/proc/self")
_STAT_BEGAN = 21  # indices in /proc/PID/stat, see proc(5)
_STAT_EXIT_CODE = 51  # readable while it is a zombie


def main() -> int:
    """Run one agent; return 0 unless it could not be started."""
    options = _parse(sys.argv[1:])
    guardian = Guardian(options)
    _reset_signals()
    # Ctrl-C is the task's to handle: it tells us. A handler, since workers would inherit SIG_IGN.
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: guardian.on_sigterm())
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # last: what was blocked may be waiting
    return guardian.run(options.argv)


def _reset_signals() -> None:
    """Set back what the step's code ignores: it came through exec, and would reach the workers.

    With SIGCHLD ignored, the kernel reaps our children and nobody hears of their ends.
    """
    # Python ignores these two for itself; a Popen sets them back in its child.
    for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:
        with suppress(OSError):  # SIGKILL and SIGSTOP
            signal.signal(number, signal.SIG_DFL)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="guardian")
    parser.add_argument("--stdout", required=True)
    parser.add_argument("--stderr", required=True)
    parser.add_argument("--cwd")
    parser.add_argument("--grace", type=float, required=True)
    parser.add_argument("--task", type=int, required=True, help="pid of the task, whose child this is")
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--silence", type=float, required=True, help="seconds that a process may be stopped (state T)")
    parser.add_argument("--restarts", action="store_true", help="the agent may start its workers again")
    parser.add_argument("--scratch", action="append", help="folder to remove if the task dies, which can't any more")
    parser.add_argument("argv", nargs="+")
    return parser.parse_args(argv)


class Guardian:
    """One agent and everything that descends from it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._agent: subprocess.Popen[bytes] | None = None
        self._agent_status: int | None = None
        self._workers: dict[int, dict[str, Any]] = {}  # pid -> what was said of it
        self._strangers: set[int] = set()
        self._search_s = _SEARCH_S
        self._inotify = -1
        self._pidfds: dict[int, int] = {}  # pidfd -> pid
        self._await_report = False
        self._task_gone = False
        self._signalled = False
        self._stop_grace: float | None = None
        self._preempt_signal: int | None = None
        self._task: int = options.task
        self._frozen_since: dict[int, float] = {}
        self._looked_at = time.monotonic()
        self._commands = b""

    def request_stop(self, grace_s: float) -> None:
        """Stop everything as soon as the main loop looks."""
        if self._stop_grace is None:
            self._stop_grace = grace_s

    def on_sigterm(self) -> None:
        """Stop everything because somebody wants this process to end; the task hears why."""
        self._signalled = self._stop_grace is None
        self.request_stop(self._options.grace)

    def run(self, argv: list[str]) -> int:
        """Start the agent, watch, stop what must be stopped, and report the end."""
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        try:
            self._start(argv)
        except OSError as error:
            self._say("end", status=None, error=f"could not be started: {error}", left=[])
            return 1
        while self._agent_status is None and self._stop_grace is None:
            self._wait(self._search_s if self._expects_workers() else _WATCH_S)
            self._watch()
        if self._signalled:
            self._say("terminated")
        left = self._stop_all()
        for folder in self._options.scratch or () if self._task_gone else ():
            shutil.rmtree(folder, ignore_errors=True)
        self._say("end", status=self._agent_status, error=None, left=left)
        return 0

    def _start(self, argv: list[str]) -> None:
        with open(self._options.stdout, "ab") as out, open(self._options.stderr, "ab") as err:
            self._agent = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=self._options.cwd,
                start_new_session=True,
                # If even the guardian is killed, the agent gets SIGTERM and stops its workers.
                preexec_fn=_die_with_parent,
            )
        self._observe(self._agent.pid)
        if sys.platform == "linux":
            self._inotify = _libc().inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
            self._watch_folders()
        self._say("agent", pid=self._agent.pid, began=began(self._agent.pid))

    def _wait(self, seconds: float) -> None:
        """Sleep until a command, a worker's end, or `seconds` have passed."""
        fds: list[int] = [*self._pidfds, *([self._inotify] if self._inotify >= 0 else [])]
        if not self._task_gone:
            fds.append(sys.stdin.fileno())
        with suppress(InterruptedError):
            ready, _, _ = select.select(fds, [], [], seconds)
            if not self._task_gone and sys.stdin.fileno() in ready:
                self._read_commands()
            if self._inotify in ready:
                os.read(self._inotify, 65536)
                self._watch_folders()  # a restart's is below that of the first start
                self._search_s = _SEARCH_S
            for fd in ready:
                if fd in self._pidfds:
                    self._worker_ended(fd)

    def _read_commands(self) -> None:
        data = os.read(sys.stdin.fileno(), 4096)
        if not data:
            self._task_ended()
        self._commands += data
        *lines, self._commands = self._commands.split(b"\n")
        for line in lines:
            verb, *values = line.decode("ascii", "replace").split()
            if verb == "preempt" and self._stop_grace is None:
                self._preempt_signal = int(values[1])
            if verb in ("stop", "preempt"):
                self.request_stop(float(values[0]))

    def _task_ended(self) -> None:
        self._task_gone = True
        self.request_stop(self._options.grace)

    # --- watching ------------------------------------------------------------------------------

    def _watch(self) -> None:
        assert self._agent is not None
        # Its pipe alone does not tell: a process that the step has forked may hold the other end.
        if os.getppid() != self._task:
            self._task_ended()
        if self._expects_workers():
            self._find_workers(self._agent.pid)
        self._reap_orphans()
        if time.monotonic() - self._looked_at >= _WATCH_S / 2:
            self._look_for_frozen()

    def _expects_workers(self) -> bool:
        """Tell whether the agent has not started all its workers yet, or may start them again."""
        known = self._living_workers() if self._options.restarts else self._workers
        return len(known) < int(self._options.workers)

    def _living_workers(self) -> list[int]:
        return [pid for pid, worker in self._workers.items() if _alive(pid, worker["began"])]

    def _look_for_frozen(self) -> None:
        """Find processes that somebody else has stopped (SIGSTOP) and not continued in time.

        A frozen worker keeps all others waiting, a frozen agent never ends, and a frozen task is deaf: the
        gang takes its node for lost, so its workers must end. A debugger's stop is another state (t).
        """
        assert self._agent is not None
        now, last = time.monotonic(), self._looked_at
        self._looked_at = now
        if now - last > 4 * _WATCH_S:  # we were frozen ourselves, perhaps as part of a whole container
            self._frozen_since.clear()
        for pid in (self._agent.pid, self._task, *self._living_workers()):
            if _stat(pid)[2:3] != ["T"]:
                self._frozen_since.pop(pid, None)
            elif now - self._frozen_since.setdefault(pid, now) >= self._options.silence:
                self._frozen_since[pid] = float("inf")  # said once
                self._say_frozen(pid)

    def _say_frozen(self, pid: int) -> None:
        if pid == self._task:
            self.request_stop(self._options.grace)
        else:
            self._say("frozen", **{"rank": None, "local_rank": None, "pid": pid, **self._workers.get(pid, {})})

    def _find_workers(self, agent: int) -> None:
        """Look for the agent's children among the processes that are new since the last look."""
        # An agent takes minutes to import torch where a pod has a tenth of a CPU, and we share that.
        self._search_s = min(self._search_s * _SLOWER, _WATCH_S)
        pids = set(_pids())
        self._strangers &= pids  # whoever gets the number of one that is gone is somebody else
        for pid in pids - self._strangers:
            if _parent(pid) != agent:
                self._strangers.add(pid)
            elif pid not in self._workers or not _alive(pid, self._workers[pid]["began"]):
                self._discover(pid)

    def _watch_folders(self) -> None:
        """Be woken when torchrun makes folders for its workers' output.

        It does that right before it starts them (`reify` in ``torch/distributed/elastic/multiprocessing/api.py``, 2.13).
        Where that can't be watched, or another version does it otherwise, we find them a moment later.
        """
        root = os.path.dirname(self._options.stdout)
        with suppress(OSError), os.scandir(root) as entries:
            for folder in [root, *(entry.path for entry in entries if entry.is_dir())]:
                _libc().inotify_add_watch(self._inotify, os.fsencode(folder), _IN_CREATE)

    def _discover(self, pid: int) -> None:
        env = _environment(pid)
        # Between fork and exec a child still shows its parent's environment, without a rank.
        if "RANK" not in env or "LOCAL_RANK" not in env:
            return
        worker = {"rank": int(env["RANK"]), "local_rank": int(env["LOCAL_RANK"]), "pid": pid, "began": began(pid)}
        self._workers[pid] = worker
        self._search_s = _SEARCH_S  # its siblings come now
        self._observe(pid)
        self._say("worker", **worker)

    def _observe(self, pid: int) -> None:
        """Be woken by the end of `pid` where the system can do that (Linux 5.3); else we poll."""
        with suppress(OSError, AttributeError):
            self._pidfds[os.pidfd_open(pid)] = pid

    def _worker_ended(self, fd: int) -> None:
        pid = self._pidfds.pop(fd)
        os.close(fd)
        # torchrun polls ten times a second; until it does, the dead worker tells its exit code.
        status = _zombie_status(pid)
        if status is None and pid in self._workers and "status" not in self._workers[pid]:
            self._await_report = True  # torchrun was faster; now it alone knows how the worker ended
            self._say("worker_reaped", **self._workers[pid])
        self._tell_end(pid, status, self._stop_grace is not None)

    def _tell_end(self, pid: int, status: int | None, stopped: bool) -> None:
        worker = self._workers.get(pid)
        if worker is None or "status" in worker or status is None:
            return
        worker["status"] = status
        self._say("worker_end", **worker, stopped=stopped)

    def _reap_orphans(self) -> bool:
        """Reap the agent and what was re-parented to us; return whether any child is left."""
        assert self._agent is not None
        with suppress(ChildProcessError):
            while True:
                # Looked at before it is taken, so that the agent's end reaches its Popen.
                dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if dead is None:
                    return True
                if dead.si_pid == self._agent.pid:
                    self._agent_status = self._agent.poll()
                else:
                    _, status = os.waitpid(dead.si_pid, 0)
                    self._tell_end(dead.si_pid, os.waitstatus_to_exitcode(status), self._stop_grace is not None)
        return False

    # --- stopping ------------------------------------------------------------------------------

    def _stop_all(self) -> list[str]:
        """Stop the whole tree: SIGTERM once to everyone, grace, SIGKILL; return what was left behind."""
        assert self._agent is not None
        by_itself = self._stop_grace is None
        if by_itself:
            self._say("agent_end", status=self._agent_status)
            self._stop_grace = _STRAGGLER_GRACE_S if self._agent_status == 0 else self._options.grace
        grace = self._stop_grace or 0.0
        stragglers = [_name(pid) for pid in living_descendants(os.getpid())] if by_itself else []
        if not by_itself or stragglers:
            self._say("stopping", grace_s=grace)
            self._terminate(grace)
        self._kill()
        return stragglers

    def _terminate(self, grace: float) -> None:
        assert self._agent is not None
        deadline = time.monotonic() + grace
        if self._await_report:
            self._let_agent_report()
        # The agent is frozen, not told: told, it would signal its workers a second time, reap them
        # before we see how they ended, or wait out its exit barrier (300 s, torch 2.13).
        _signal(self._agent.pid, signal.SIGSTOP)
        if self._preempt_signal is not None:
            self._find_workers(self._agent.pid)
            self._end_all(self._living_workers, self._preempt_signal, deadline)
            deadline = min(deadline, time.monotonic() + _STRAGGLER_GRACE_S)
        self._end_all(self._below_agent, signal.SIGTERM, deadline)

    def _below_agent(self) -> list[int]:
        assert self._agent is not None
        return [pid for pid in living_descendants(os.getpid()) if pid != self._agent.pid]

    def _end_all(self, which: Callable[[], list[int]], number: int, deadline: float) -> None:
        """Signal processes once and wait until they are gone, or the deadline has come."""
        for pid in which():
            _signal(pid, number)
            _signal(pid, signal.SIGCONT)
        while time.monotonic() < deadline and which():
            self._wait(_SEARCH_S)
            self._reap_orphans()

    def _let_agent_report(self) -> None:
        """Give the agent a moment to end by itself: it stops its workers and prints how they failed."""
        deadline = time.monotonic() + _REPORT_S
        while self._agent_status is None and time.monotonic() < deadline:
            self._wait(_SEARCH_S)
            self._reap_orphans()

    def _kill(self) -> None:
        assert self._agent is not None
        deadline = time.monotonic() + _KILL_WAIT_S
        while time.monotonic() < deadline:
            living = list(living_descendants(os.getpid()))
            for pid in living:
                # Workers first: dead while their agent is frozen, they come to us with their exit codes.
                if pid != self._agent.pid or len(living) == 1 or time.monotonic() > deadline - _KILL_WAIT_S / 2:
                    _signal(pid, signal.SIGKILL)
            if not self._reap_orphans():
                return
            self._wait(_SEARCH_S / 5)

    def _say(self, event: str, **fields: Any) -> None:
        line = json.dumps({"event": event, "t": time.monotonic(), **fields}) + "\n"
        with suppress(OSError):  # the task is gone; what is left to do is to clean up
            os.write(sys.stdout.fileno(), line.encode())


# --- the process table ------------------------------------------------------------------------


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        _libc().prctl(option, value, 0, 0, 0)


def _die_with_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()] if _HAS_PROC else []


def _table() -> Iterator[tuple[int, int, bool]]:
    """Yield pid, parent's pid and whether it is alive (not a zombie), of every process."""
    if not _HAS_PROC:
        yield from _table_from_ps()
    for pid in _pids():
        fields = _stat(pid)
        if fields:
            yield pid, int(fields[3]), fields[2] not in ("Z", "X")


def _table_from_ps() -> Iterator[tuple[int, int, bool]]:
    listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,stat="], capture_output=True, text=True, check=False).stdout
    for line in listing.splitlines():
        pid, parent, state = line.split()[:3]
        yield int(pid), int(parent), not state.startswith("Z")


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat; none if the process is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            text = file.read()
    except OSError:
        return []
    head, _, rest = text.rpartition(")")  # the command's name may hold spaces and parentheses
    pid_text, _, name = head.partition("(")
    return [pid_text.strip(), name, *rest.split()]


def began(pid: int) -> str:
    """Return when a process began: with its pid it names one process, whoever gets that number later."""
    return "".join(_stat(pid)[_STAT_BEGAN : _STAT_BEGAN + 1])


def _parent(pid: int) -> int | None:
    fields = _stat(pid)
    return int(fields[3]) if fields else None


def _zombie_status(pid: int) -> int | None:
    """Return a dead but unreaped process's exit code, negative for a signal; None if it is gone."""
    fields = _stat(pid)
    if len(fields) <= _STAT_EXIT_CODE or fields[2] != "Z":
        return None
    return os.waitstatus_to_exitcode(int(fields[_STAT_EXIT_CODE]))


def living_descendants(ancestor: int) -> list[int]:
    """Return the pids of all living processes that descend from `ancestor`."""
    table = list(_table())
    children: dict[int, list[int]] = {}
    for pid, parent, _ in table:
        children.setdefault(parent, []).append(pid)
    alive = {pid for pid, _, living in table if living}
    found, queue = [], [ancestor]
    while queue:
        for pid in children.get(queue.pop(), ()):
            queue.append(pid)
            if pid in alive:
                found.append(pid)
    return found


def await_or_kill(pids: set[int], grace_s: float) -> None:
    """Wait until `pids` and what descends from them are gone; after `grace_s` seconds kill them."""
    deadline = time.monotonic() + grace_s
    tree = {pid: began(pid) for pid in pids}
    while True:
        tree = {pid: at for pid, at in tree.items() if _alive(pid, at)}
        # Those of a root that ends first are remembered: they get another parent then.
        tree.update({pid: began(pid) for root in tree for pid in living_descendants(root)})
        if not tree:
            return
        if time.monotonic() > deadline:
            for pid in tree:
                _signal(pid, signal.SIGKILL)
        if time.monotonic() > deadline + _KILL_WAIT_S:
            return
        time.sleep(_SEARCH_S)


def children() -> list[int]:
    """Return the pids of this process's living children."""
    own = os.getpid()
    return [pid for pid, parent, alive in _table() if alive and parent == own]


def _alive(pid: int, since: str) -> bool:
    """Tell whether the process lives that had this pid and began then."""
    fields = _stat(pid)
    return bool(fields) and fields[2] not in ("Z", "X") and fields[_STAT_BEGAN] == since


def _environment(pid: int) -> dict[str, str]:
    try:
        with open(f"/proc/{pid}/environ", encoding="utf-8", errors="surrogateescape") as file:
            entries = file.read().split("\0")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def command_line(pid: int) -> list[str]:
    """Return a process's argv; empty if it is gone."""
    with suppress(OSError), open(f"/proc/{pid}/cmdline", encoding="utf-8", errors="surrogateescape") as file:
        return file.read().split("\0")[:-1]
    return []


def _name(pid: int) -> str:
    return f"{pid} ({' '.join(command_line(pid))[:200]})"


if __name__ == "__main__":
    sys.exit(main())
