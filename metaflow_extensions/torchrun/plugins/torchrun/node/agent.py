"""One agent and everything that descends from it: starts, watches, stops and reaps it.

As a child subreaper, the supervisor finds, stops and reaps workers of a killed agent and grandchildren that detached
themselves. It sees a worker die the moment it happens, mostly before torchrun does, and reads how. The agent lists its
workers in a pipe, and the exit codes of those that it has reaped (``worker/agent.py``).
"""

from __future__ import annotations

import asyncio
import enum
import math
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, NamedTuple, TypeAlias

from ..machine import processes
from ..machine.looks import WATCH_S, until_look
from ..machine.processes import HELPERS, send_signal
from ..worker.spare_process import Spare
from .agent_events import AgentEnded, AgentEvent, End, Refused, Unreached, WorkerEnded, WorkerStarted
from .workers import Workers

_KILL_WAIT_S = 10.0  # after SIGKILL only a process in uninterruptible sleep stays
_HALT_S = 1.0  # Python heeds a signal within milliseconds, but not while it waits in torch's C++ code
_FREE_FILES = 20  # stay free of what this process may open, to look at the process table and to start programs
_STRAGGLER_GRACE_S = 2.0  # for what the agent left behind when it ended by itself


class Options(NamedTuple):
    """How one agent is to be run."""

    stdout: str  # pipes for the agent's own output
    stderr: str
    grace_s: float = 0.0  # time of the workers after SIGTERM
    # Makes the agent act on its workers no more; 0: it is a command of the user's, and ends like all below it.
    halt_signal: int = 0
    cwd: str | None = None  # working directory; default is this process's
    news: str | None = None  # the pipe in which the agent tells of its workers


Warm: TypeAlias = Callable[[Mapping[str, str], Options], "Spare | Refused"]
"""A way to start an agent faster than cold: returns a spare that was asked for the agent, or why there is none."""


class Phase(enum.Enum):
    """The state of an agent; the value says at least how often it is looked at, in seconds."""

    ASKING = ("a spare was asked to become it", 0.1)
    RUNNING = ("it runs", WATCH_S)
    HALTING = ("it was told to act on its workers no more", 0.005)
    SAVING = ("its workers got a signal of the user's choice first, so that they can save", 0.05)
    TERMINATING = ("everything below it got SIGTERM", 0.05)
    KILLING = ("everything gets SIGKILL", 0.01)
    ENDED = ("nothing is left of it", math.inf)

    @property
    def look_s(self) -> float:
        """Seconds between two looks."""
        return self.value[1]


class AgentProcess:
    """The agent of one generation; it belongs to the loop. `on_event` gets what happens; the last event is always `End`."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        options: Options,
        on_event: Callable[[AgentEvent], None],
        warm: Warm | None = None,
    ) -> None:
        self._command = list(command)
        self._env = dict(env)  # its whole environment
        self._options = options
        self._on_event = on_event
        self._warm = warm
        self._phase: Phase | None = None  # None before the start
        self._asked: Spare | None = None
        self._agent: subprocess.Popen[bytes]  # from the start on
        self._workers = Workers()
        self._loop: asyncio.AbstractEventLoop
        self._files: set[int] = set()  # what wakes us: pidfds, and the pipe of news
        self._news: int | None = None
        self._unread = b""  # of it: the begin of a line
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = asyncio.Event()
        self._deadline = math.inf  # of the whole stop; set once
        self._phase_deadline = math.inf
        self._first_signal: int | None = None
        self._error: str | None = None
        self._left: list[str] = []

    # --- what others ask ---------------------------------------------------------------------------

    def start(self) -> None:
        """Start the agent. Raises what keeps it from starting; all further news arrives as events."""
        self._loop = asyncio.get_running_loop()
        if self._options.news is not None:
            self._news = os.open(self._options.news, os.O_RDWR | os.O_NONBLOCK)
        asked = None if self._warm is None else self._warm(self._env, self._options)
        if isinstance(asked, Refused):
            self._on_event(asked)
        elif asked is not None:
            self._asked, self._agent = asked, asked.process
            self._phase = Phase.ASKING
            self._wake_by(asked.fileno(), self._step)
            self._step()
            return
        try:
            self._start_cold()
        except BaseException:
            self._let_go()
            raise

    @property
    def pid(self) -> int | None:
        """The agent's pid; None before the start."""
        return None if self._phase in (None, Phase.ASKING) else self._agent.pid

    def stop(self, grace_s: float, first_signal: int | None = None) -> None:
        """Stop the whole tree: SIGTERM, `grace_s` seconds, SIGKILL. Returns at once; the first call counts.

        With `first_signal` the workers alone get that signal first, and up to `grace_s` seconds to save. What they have
        started still serves them meanwhile.
        """
        if self._phase in (Phase.ASKING, Phase.RUNNING):
            self._first_signal = first_signal
            self._begin_to_stop(grace_s)
            self._step()

    async def close(self, grace_s: float) -> None:
        """Stop whatever still runs and wait for its end, at most the grace and some 11 s; can be repeated."""
        if self._phase is not None:
            self.stop(grace_s)
            await self._is_over.wait()

    # --- starting ----------------------------------------------------------------------------------

    def _start_cold(self) -> None:
        options = self._options
        with open(options.stdout, "ab") as out, open(options.stderr, "ab") as err:
            agent = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=out.fileno(),
                stderr=err.fileno(),
                cwd=options.cwd,
                env=self._env,
                start_new_session=True,
            )
        self._run(agent)

    def _run(self, agent: subprocess.Popen[bytes]) -> None:
        self._agent, self._phase = agent, Phase.RUNNING
        if self._news is not None:
            self._wake_by(self._news, self._step)
        self._observe(agent.pid)
        self._step()

    def _on_asking(self) -> bool:
        assert self._asked is not None
        fd = self._asked.fileno()
        try:
            if not self._asked.poll():
                return False
        except Exception as error:
            self._wake_no_more(fd)
            self._asked.kill()
            self._on_event(Refused(f"{error}"))
            try:
                self._start_cold()
            except Exception as cold:  # no more processes, a zero byte in a variable
                self._error = f"could not be started: {cold}"
                self._enter(Phase.ENDED)
            return False
        self._wake_no_more(fd)
        self._run(self._agent)
        return False

    # --- what wakes us -----------------------------------------------------------------------------

    def _wake_by(self, fd: int, call: Callable[..., object], *args: Any) -> None:
        self._files.add(fd)
        self._loop.add_reader(fd, call, *args)

    def _wake_no_more(self, fd: int) -> None:
        self._files.discard(fd)
        self._loop.remove_reader(fd)

    def _observe(self, pid: int) -> None:
        """Have the end of a process wake us, by a pidfd. Without one the agent tells of a worker's, and we reap.

        So none is opened where others would lack the number.
        """
        with suppress(ProcessLookupError):  # torchrun has reaped it, and tells us
            handle = processes.open_pidfd(pid)
            if handle is not None and handle >= resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _FREE_FILES:
                os.close(handle)
            elif handle is not None:
                self._wake_by(handle, self._has_ended, handle, pid)

    def _has_ended(self, pidfd: int, pid: int) -> None:
        self._wake_no_more(pidfd)
        os.close(pidfd)
        self._read_news()  # first: it may tell of a worker that has failed, and of others that were stopped for it
        # torchrun reaps its workers ten times a second. Until then the dead worker's exit code can be read.
        dead = processes.find(pid)
        if dead is not None and dead.status is not None:
            self._report_exit(pid, dead.status)
        self._step()

    def _read_news(self) -> None:
        """Handle what the agent tells of its workers, line by line."""
        if self._news is not None:
            with suppress(BlockingIOError):
                self._unread += os.read(self._news, 65536)
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            self._handle_news(*line.decode().split())

    def _handle_news(self, what: str, pid: str, *more: str) -> None:
        if what == "started":
            rank, local_rank = map(int, more)
            self._workers.add(rank, local_rank, int(pid))
            self._on_event(WorkerStarted(rank, local_rank, int(pid)))
            self._observe(int(pid))
        elif what == "ended":
            self._report_exit(int(pid), int(more[0]))
        elif what == "unreached":
            self._on_event(Unreached(" ".join(more)))
        elif (told := self._workers.get(int(pid))) is not None:
            told.stopped_at = min(told.stopped_at, float(more[0]))

    def _report_exit(self, pid: int, status: int) -> None:
        """Report a worker's end, once."""
        worker = self._workers.get(pid)
        if worker is None or worker.status is not None:
            return
        worker.status = status
        told_at = worker.stopped_at if worker.stopped_at < math.inf else None
        stopped = self._deadline < math.inf or told_at is not None
        self._on_event(
            WorkerEnded(worker.rank, worker.local_rank, worker.pid, status, stopped, time.monotonic(), told_at)
        )

    def _reap(self) -> None:
        """Reap the agent and what was re-parented to this process."""
        for pid, status in processes.reap(HELPERS):
            if pid == self._agent.pid:
                self._agent.returncode = status
            else:
                self._report_exit(pid, status)

    # --- the phases ----------------------------------------------------------------------------------

    def _step(self) -> None:
        """Look at everything, and go on to the next phase, if it is time."""
        if self._phase is Phase.ENDED:
            return
        assert self._phase is not None
        self._look_later()  # first: whatever goes wrong below is tried again
        self._read_news()
        self._reap()
        while self._STEPS[self._phase](self):
            pass
        self._look_later()

    def _look_later(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._phase not in (None, Phase.ENDED):
            self._timer = self._loop.call_later(until_look(self._phase.look_s), self._step)

    def _enter(self, phase: Phase, limit_s: float = math.inf) -> bool:
        self._phase, self._phase_deadline = phase, time.monotonic() + limit_s
        if phase is Phase.ENDED:
            self._end()
        return phase is not Phase.ENDED

    @property
    def _is_late(self) -> bool:
        return time.monotonic() >= min(self._phase_deadline, self._deadline)

    def _on_running(self) -> bool:
        if self._agent.returncode is not None:
            self._agent_ended(self._agent.returncode)
            return True
        return False

    def _agent_ended(self, status: int) -> None:
        """Report an agent that has ended by itself, and stop what it has left running."""
        self._read_news()
        self._on_event(AgentEnded(status, time.monotonic()))
        self._left = [processes.describe(pid) for pid in self._tree()]
        self._begin_to_stop(_STRAGGLER_GRACE_S if status == 0 else self._options.grace_s)

    def _begin_to_stop(self, grace_s: float) -> None:
        self._deadline = min(self._deadline, time.monotonic() + grace_s)
        if self._phase is Phase.ASKING:
            assert self._asked is not None
            self._wake_no_more(self._asked.fileno())
            self._asked.kill()
            self._error = "was stopped before it had started"
            self._kill_all()
            return
        # The agent gets no SIGTERM: it would signal its workers a second time, reap them before we read their exit
        # codes, or wait in its exit barrier for up to 300 s (torch 2.13). But torch's store, which it may serve, lives on.
        if self._is_command:
            self._terminate()
        else:
            self._signal_agent(self._options.halt_signal)
            self._enter(Phase.HALTING, _HALT_S)

    def _on_halting(self) -> bool:
        """Wait until the agent has heard: until then it may still start a worker, or stop one."""
        number = self._options.halt_signal
        has_heard = number == signal.SIGSTOP or self._agent.returncode is not None
        if not (has_heard or self._is_late or processes.blocks(self._agent.pid, number)) and self._to_end():
            return False
        self._read_news()
        if self._first_signal is not None:
            self._signal_all(self._workers.living(), self._first_signal)
            return self._enter(Phase.SAVING)
        return self._terminate()

    def _on_saving(self) -> bool:
        if self._workers.living() and not self._is_late:
            return False
        self._deadline = min(self._deadline, time.monotonic() + _STRAGGLER_GRACE_S)
        return self._terminate()

    def _terminate(self) -> bool:
        told = self._to_end()
        self._signal_all(told, signal.SIGTERM)
        # What was forked between that look and the signal has heard nothing, and its parent may be gone.
        self._signal_all([pid for pid in self._to_end() if pid not in told], signal.SIGTERM)
        return self._enter(Phase.TERMINATING)

    def _on_terminating(self) -> bool:
        return not (self._to_end() and not self._is_late) and self._kill_all()

    def _kill_all(self) -> bool:
        return self._enter(Phase.KILLING, _KILL_WAIT_S)

    def _on_killing(self) -> bool:
        living, left_s = self._tree(), self._phase_deadline - time.monotonic()
        for pid in living:
            # Workers first: dead while their agent is halted, they come to us with their exit codes. A command is not
            # halted, and would go on to its next step.
            if pid != self._agent.pid or self._is_command or len(living) == 1 or left_s < _KILL_WAIT_S / 2:
                send_signal(pid, signal.SIGKILL)
        # Checked before reaping: a process that ends in between would else be left with its exit code unread.
        all_ended = self._agent.returncode is not None and not self._tree()
        self._reap()
        return (all_ended or left_s <= 0) and self._enter(Phase.ENDED)

    def _end(self) -> None:
        self._read_news()
        self._let_go()
        status = None if self._error else self._agent.returncode
        self._is_over.set()
        self._on_event(End(status, self._error, self._left))

    def _let_go(self) -> None:
        if self._news is not None:
            self._wake_no_more(self._news)
            os.close(self._news)
            self._news = None
        for pidfd in list(self._files):
            self._wake_no_more(pidfd)
            os.close(pidfd)

    # --- processes -----------------------------------------------------------------------------------

    def _tree(self) -> list[int]:
        """Return the pids of the agent and all that it has started, however that detached itself."""
        return processes.living_descendants(without=HELPERS)

    @property
    def _is_command(self) -> bool:
        return self._options.halt_signal == 0

    def _to_end(self) -> list[int]:
        """Return the pids of what gets SIGTERM: all below the agent, or a command with all below it."""
        return [pid for pid in self._tree() if self._is_command or pid != self._agent.pid]

    def _signal_agent(self, number: int) -> None:
        if self._agent.returncode is None:
            send_signal(self._agent.pid, number)

    @staticmethod
    def _signal_all(pids: Sequence[int], number: int) -> None:
        for pid in pids:
            send_signal(pid, number)

    _STEPS: ClassVar[dict[Phase, Callable[[AgentProcess], bool]]] = {
        Phase.ASKING: _on_asking,
        Phase.RUNNING: _on_running,
        Phase.HALTING: _on_halting,
        Phase.SAVING: _on_saving,
        Phase.TERMINATING: _on_terminating,
        Phase.KILLING: _on_killing,
        Phase.ENDED: lambda self: False,
    }
