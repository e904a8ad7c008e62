"""The guardian: a process between a task and its agent, which stops the agent's whole tree.

Three things can't be done from inside the task. When the task dies, even by SIGKILL, the guardian stops the whole tree.
As a child subreaper it finds, stops and reaps workers of a killed agent and grandchildren that detached themselves. It
sees a worker die the moment it happens, mostly before torchrun does, and reads how. The agent lists its workers in a
pipe, and the exit codes of those that it has reaped (``worker/agent.py``).
"""

from __future__ import annotations

import json
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from ..compat import linux
from ..machine import processes
from ..machine.frozen import WATCH_S, FrozenWatch
from ..machine.inherited import take_over
from ..machine.processes import living_descendants, send_signal
from .agent_events import (
    AgentEnded,
    AgentEvent,
    AgentStarted,
    End,
    Frozen,
    Terminated,
    WorkerEnded,
    WorkerStarted,
    as_line,
)
from .workers import Workers

_KILL_WAIT_S = 10.0  # after SIGKILL only a process in uninterruptible sleep stays
_HALT_S = 1.0  # Python heeds a signal within milliseconds, but not while it waits in torch's C++ code
_STRAGGLER_GRACE_S = 2.0  # for what the agent left behind when it ended by itself
_LOOK_S = 0.05  # between two looks at processes that are to end


class Options(NamedTuple):
    """How one agent is to be run."""

    stdout: str  # pipes for the agent's own output
    stderr: str
    grace_s: float  # time of the workers after SIGTERM if the task dies
    silence_s: (
        float  # how long a worker, the agent or the task may be stopped (SIGSTOP) before that counts as a failure
    )
    halt_signal: int = signal.SIGSTOP  # makes the agent act on its workers no more
    cwd: str | None = None  # working directory; default is the guardian's
    inherited: dict[str, Any] | None = None  # what the agent has from the task; default is what the guardian has
    umask: int | None = None
    news: str | None = None  # the pipe in which the agent tells of its workers
    pipes: str | None = None  # the folder with this and the pipes of agent and workers
    scratch: Sequence[str] = ()  # folders to remove if the task dies; while it lives, it removes them itself


def main() -> int:
    """Run one agent; return 0 unless it could not be started."""
    pid, began, options, *command = sys.argv[1:]
    task = processes.Other(int(pid), began)
    with task.end() as task_end:
        guardian = Guardian(task, task_end, Options(**json.loads(options)))
        have_default_signals(guardian.note_sigterm)
        return guardian.run(command)


def have_default_signals(note_sigterm: Callable[[], None]) -> None:
    """Reset all signals to their defaults, whatever the step's code has set."""
    # Ignored signals survive exec, so those of the step's code would reach the workers. With SIGCHLD ignored, the
    # kernel would reap our children and their exit codes would be lost.
    # Python ignores two for itself; a Popen sets them back in its child.
    for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:
        with suppress(OSError):  # SIGKILL and SIGSTOP
            signal.signal(number, signal.SIG_DFL)
    # Ctrl-C reaches the task, too, and the task sends us the command. A handler, not SIG_IGN, which workers would inherit.
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: note_sigterm())
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # last, since a blocked signal may be pending and arrives now


def _open_pipe(path: str) -> int:
    return os.open(path, os.O_RDWR | os.O_NONBLOCK)


# Starts a program with these files as its output.
Start = Callable[[Sequence[str], int, int], "subprocess.Popen[bytes]"]


def start_program(
    command: Sequence[str], stdout: int, stderr: int, options: Options, env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start the agent as a program."""

    def before_exec() -> None:
        # If even the guardian is killed, the agent gets SIGTERM and stops its workers.
        linux.die_with_parent()
        if options.inherited is not None:
            take_over(options.inherited)
        if options.umask is not None:
            os.umask(options.umask)

    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        cwd=options.cwd,
        env=env,
        start_new_session=True,
        preexec_fn=before_exec,
    )


class Guardian:
    """One agent and everything that descends from it; `task_end` is the file that tells the end of `task`, if one does."""

    # This process has one thread, so nothing here needs a lock. The handler of SIGTERM may interrupt any line, so it
    # only sets a flag.

    def __init__(
        self,
        task: processes.Other,
        task_end: int | None,
        options: Options,
        start: Start | None = None,
    ) -> None:
        self._task, self._task_end = task, task_end
        self._start_program: Start = start or (lambda command, out, err: start_program(command, out, err, options))
        self._options = options
        self._agent: subprocess.Popen[bytes]  # from `_start` on
        # Held so that no worker that saves dies of its next line if the task is gone, and with it who read the pipes.
        paths = [] if options.pipes is None else [each.path for each in os.scandir(options.pipes)]
        self._pipes = [_open_pipe(path) for path in paths if path != options.news]
        self._news = None if options.news is None else _open_pipe(options.news)
        self._workers = Workers()
        self._frozen = FrozenWatch(options.silence_s)
        self._pidfds: dict[int, int] = {}  # pidfd -> pid of a worker or the agent
        self._commands = b""
        self._got_sigterm = False
        self._task_gone = False
        self._deadline: float | None = None  # when SIGKILL is sent; set once, when everything must end
        self._preempt_signal: int | None = None
        self._left: list[str] = []

    def note_sigterm(self) -> None:
        """Record that SIGTERM arrived; the main loop acts on it."""
        self._got_sigterm = True

    def run(self, command: Sequence[str]) -> int:
        """Start the agent, watch, stop what must be stopped, and report the end."""
        linux.adopt_orphans()
        try:
            self._start(command)
        except OSError as error:
            self._say(End(None, f"could not be started: {error}"))
            return 1
        while self._deadline is None:
            self._wait(WATCH_S)
            self._watch()
        self._terminate(self._deadline)
        self._kill()
        self._read_news()
        self._say(End(self._agent.returncode, left=self._left))
        for folder in self._options.scratch if self._task_gone or self._task.has_ended else ():
            shutil.rmtree(folder, ignore_errors=True)
        return 0

    def _start(self, command: Sequence[str]) -> None:
        with open(self._options.stdout, "ab") as out, open(self._options.stderr, "ab") as err:
            self._agent = self._start_program(command, out.fileno(), err.fileno())
        self._observe(self._agent.pid)
        self._say(AgentStarted(self._agent.pid, processes.began(self._agent.pid)))

    def _say(self, event: AgentEvent) -> None:
        with suppress(OSError):  # the task is gone; what is left to do is to clean up
            os.write(sys.stdout.fileno(), as_line(event))

    # --- waiting -------------------------------------------------------------------------------

    def _wait(self, seconds: float) -> None:
        """Sleep until a command, a worker's end, or until `seconds` have passed."""
        # Gone may mean that it can't be heard any more: a task that lives still reads its pipes.
        of_task = (sys.stdin.fileno(), self._task_end) if not self._task_gone else ()
        pipes = self._pipes if self._task_gone and self._task.has_ended else ()
        others = [file for file in (*of_task, *pipes, self._news) if file is not None]
        poll = select.poll()  # not `select`, which takes no descriptor above 1023: a node may have hundreds of workers
        for fd in (*self._pidfds, *others):
            poll.register(fd, select.POLLIN)
        found = [fd for fd, _ in poll.poll(1000 * max(0.0, seconds)) if fd != self._news]
        self._read_news()  # first: it may tell of a worker that has failed, and of others that were stopped for it
        for fd in found:
            if fd in self._pidfds:
                self._has_ended(fd)
            elif fd in self._pipes:
                os.read(fd, 65536)
            elif fd == self._task_end:
                self._task_ended()
            else:
                self._read_commands()

    def _read_news(self) -> None:
        """Handle what the agent tells of its workers: whole lines, since each is written at once."""
        news = b""
        if self._news is not None:
            with suppress(BlockingIOError):
                news = os.read(self._news, 65536)
        for line in news.decode().splitlines():
            self._handle_news(*line.split())

    def _handle_news(self, what: str, pid: str, *more: str) -> None:
        if what == "started":
            rank, local_rank = map(int, more)
            worker = self._workers.add(rank, local_rank, int(pid))
            self._say(WorkerStarted(worker.rank, worker.local_rank, worker.pid, worker.began))
            self._observe(worker.pid)
        elif what == "ended":
            self._report_exit(int(pid), int(more[0]))
        elif (told := self._workers.get(int(pid))) is not None:
            told.stopped_at = min(told.stopped_at, float(more[0]))

    def _read_commands(self) -> None:
        data = os.read(sys.stdin.fileno(), 4096)
        if not data:
            self._task_ended()
        *lines, self._commands = (self._commands + data).split(b"\n")
        # ``stop GRACE_S`` sends SIGTERM to the whole tree. ``preempt GRACE_S SIGNAL`` first sends SIGNAL to the workers
        # alone, so that what they have started still serves them while they save.
        for line in lines:
            _, grace_s, *first = line.split()
            self._begin_to_stop(float(grace_s), *map(int, first))

    def _observe(self, pid: int) -> None:
        """Have the end of `pid` wake the main loop, by a pidfd. Without one the agent tells of a worker's, and we reap."""
        with suppress(ProcessLookupError):  # torchrun has reaped it, and tells us
            if (handle := processes.open_pidfd(pid)) is not None:
                self._pidfds[handle] = pid

    def _has_ended(self, pidfd: int) -> None:
        pid = self._pidfds.pop(pidfd)
        os.close(pidfd)
        # torchrun reaps its workers ten times a second. Until then the dead worker's exit code can be read.
        dead = processes.find(pid)
        if dead is not None and dead.status is not None:
            self._report_exit(pid, dead.status)

    def _report_exit(self, pid: int, status: int) -> None:
        """Report a worker's end, once."""
        worker = self._workers.get(pid)
        if worker is None or worker.status is not None:
            return
        worker.status = status
        at, told_at = time.monotonic(), worker.stopped_at
        stopped = self._deadline is not None or told_at < math.inf
        self._say(
            WorkerEnded(
                worker.rank, worker.local_rank, worker.pid, status, stopped, at, told_at if told_at < math.inf else None
            )
        )

    # --- watching ------------------------------------------------------------------------------

    def _watch(self) -> None:
        if self._got_sigterm and self._deadline is None:
            self._say(Terminated(time.monotonic()))
            self._begin_to_stop(self._options.grace_s)
        # End of file on the pipe is not enough: a process that the step forked may hold the other end open.
        if not self._task_gone and self._task.has_ended:
            self._task_ended()
        self._reap_orphans()
        if self._agent.returncode is not None and self._deadline is None:
            self._agent_ended(self._agent.returncode)
        self._continue_task()
        now = time.monotonic()
        frozen = self._frozen.overdue((self._agent.pid, *self._workers.living()), now)
        for pid in frozen:
            self._is_frozen(pid)

    def _continue_task(self) -> None:
        """Continue the process that we serve, if somebody has stopped it: nobody reads the workers' output meanwhile."""
        task = processes.find(self._task.pid)
        if task is not None and task.state == "T":
            self._task.send_signal(signal.SIGCONT)

    def _task_ended(self) -> None:
        self._task_gone = True
        self._begin_to_stop(self._options.grace_s)

    def _descendants(self) -> list[int]:
        """Return the pids of the agent and all that it has started."""
        return living_descendants(os.getpid())

    def _agent_ended(self, status: int) -> None:
        """Report an agent that has ended by itself, and stop what it has left running."""
        self._read_news()
        self._say(AgentEnded(status, time.monotonic()))
        self._left = [processes.describe(pid) for pid in self._descendants()]
        self._begin_to_stop(_STRAGGLER_GRACE_S if status == 0 else self._options.grace_s)

    def _is_frozen(self, pid: int) -> None:
        worker = self._workers.get(pid)
        rank, local_rank = (None, None) if worker is None else (worker.rank, worker.local_rank)
        self._say(Frozen(rank, local_rank, pid, time.monotonic()))

    def _reap_orphans(self) -> bool:
        """Reap the agent and what was re-parented to us; return whether any child is left."""
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0] != 0:
                pid, status = ended[0], os.waitstatus_to_exitcode(ended[1])
                if pid == self._agent.pid:
                    self._agent.returncode = status
                else:
                    self._report_exit(pid, status)
            return True
        return False

    # --- stopping ------------------------------------------------------------------------------

    def _begin_to_stop(self, grace_s: float, preempt_signal: int | None = None) -> None:
        """Make the main loop stop everything; the first call sets the deadline, later calls change nothing."""
        if self._deadline is None:
            self._deadline = time.monotonic() + grace_s
            self._preempt_signal = preempt_signal

    def _terminate(self, deadline: float) -> None:
        """Signal everything once and give it time to end."""
        # The agent gets no SIGTERM: it would signal its workers a second time, reap them before we read their exit
        # codes, or wait in its exit barrier for up to 300 s (torch 2.13). But torch's store, which it may serve, lives on.
        self._agent.send_signal(self._options.halt_signal)
        if self._options.halt_signal != signal.SIGSTOP and self._agent.returncode is None:
            self._await_halt()
        if self._preempt_signal is not None:
            self._read_news()
            self._end_all(self._workers.living, self._preempt_signal, deadline)
            deadline = min(deadline, time.monotonic() + _STRAGGLER_GRACE_S)
        self._end_all(self._below_agent, signal.SIGTERM, deadline)

    def _await_halt(self) -> None:
        """Wait until the agent has heard: until then it may still start a worker, or stop one."""
        send_signal(self._agent.pid, signal.SIGCONT)  # if somebody has stopped it, it serves its store again
        deadline = time.monotonic() + _HALT_S
        while time.monotonic() < deadline and self._below_agent():
            if processes.blocks(self._agent.pid, self._options.halt_signal):
                return
            self._wait(_LOOK_S / 10)
            self._reap_orphans()

    def _below_agent(self) -> list[int]:
        return [pid for pid in self._descendants() if pid != self._agent.pid]

    def _end_all(self, which: Callable[[], list[int]], number: int, deadline: float) -> None:
        """Signal processes once and wait until they are gone, or the deadline has come."""
        for pid in which():
            send_signal(pid, number)
            send_signal(pid, signal.SIGCONT)
        self._wait_while(lambda: bool(which()), deadline)

    def _wait_while(self, going_on: Callable[[], bool], deadline: float) -> None:
        while time.monotonic() < deadline and going_on():
            self._wait(_LOOK_S)
            self._reap_orphans()

    def _kill(self) -> None:
        deadline = time.monotonic() + _KILL_WAIT_S
        while time.monotonic() < deadline:
            living = self._descendants()
            for pid in living:
                # Workers first: dead while their agent is frozen, they come to us with their exit codes.
                if pid != self._agent.pid or len(living) == 1 or time.monotonic() > deadline - _KILL_WAIT_S / 2:
                    send_signal(pid, signal.SIGKILL)
            # Check before reaping: a process that ends in between would else be left with its exit code unread.
            all_ended = self._agent.returncode is not None and not self._descendants()
            if not self._reap_orphans() or all_ended:
                return
            self._wait(_LOOK_S / 5)
