"""One agent and everything that descends from it: starts, watches, stops and reaps it.

As a child subreaper, the supervisor finds, stops and reaps workers of a killed agent and grandchildren that detached
themselves. It sees a worker die the moment it happens, mostly before torchrun does, and reads how. The agent lists its
workers in a pipe, and the exit codes of those that it has reaped (``worker/agent.py``).
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

from ..machine import processes
from ..machine.processes import send_signal
from ..worker.spare_process import Spare, StartCold
from .ends import WATCH_S, until_look

_KILL_WAIT_S = 10.0  # after SIGKILL only a process in uninterruptible sleep stays
_HALT_S = 1.0  # Python heeds a signal within milliseconds, but not while it waits in torch's C++ code
_HALT_LOOK_S, _LOOK_S, _KILL_LOOK_S = 0.005, 0.05, 0.01  # between two looks while something ends
_ANSWER_LOOK_S = 0.005  # at a spare, which mostly answers within some milliseconds
_STRAGGLER_GRACE_S = 2.0  # for what the agent left behind when it ended by itself


# --- what happens. Times are seconds of this machine's monotonic clock; an exit code is negative for a signal.


class Refused(NamedTuple):
    """A spare could not become this agent, which starts cold instead; no process of it exists yet."""

    reason: str


class WorkerStarted(NamedTuple):
    """A worker runs."""

    rank: int
    local_rank: int
    pid: int


class WorkerEnded(NamedTuple):
    """A worker has ended."""

    rank: int
    local_rank: int
    pid: int
    status: int
    stopped: bool  # whether it may have ended because it was told to stop
    at: float
    stopped_at: float | None = None  # when torchrun was about to stop it; None if it was not

    @property
    def has_failed(self) -> bool:
        """Whether this end shows that it has failed by itself."""
        return self.status != 0 and not self.stopped


class Unreached(NamedTuple):
    """The agent gets no answer from torch's store on the control node; it tries on, as torch does."""

    why: str


class AgentEnded(NamedTuple):
    """The agent has ended by itself; what it has left running is stopped now."""

    status: int
    at: float


class End(NamedTuple):
    """The last event: nothing is left of the agent and its workers."""

    status: int | None  # the agent's exit code
    error: str | None = None  # why it has none
    left: Sequence[str] = ()  # what the agent had left running when it ended by itself


AgentEvent: TypeAlias = Refused | Unreached | WorkerStarted | WorkerEnded | AgentEnded | End


def left_behind_line(left: Sequence[str], who: str) -> str:
    """Return what is logged of processes that workers or commands had left running."""
    return f"stopped processes that the {who} had left running: {', '.join(left)}"


# --- the agent


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


class AgentProcess:
    """The agent of one generation; it belongs to the loop. `on_event` gets what happens; the last event is always `End`."""

    def __init__(
        self,
        on_event: Callable[[AgentEvent], None],
        command: Sequence[str],
        env: Mapping[str, str],
        options: Options,
        warm: Warm | None = None,
    ) -> None:
        self._command = list(command)
        self._env = dict(env)  # its whole environment
        self._options = options
        self._on_event = on_event
        self._warm = warm
        self._agent: subprocess.Popen[bytes]  # from its start on
        self.pid: int | None = None
        self._spare: Spare | None = None  # was asked to become the agent, and has not answered
        self._workers: dict[int, WorkerStarted] = {}  # by pid, as are the next two
        self._ended: set[int] = set()  # whose end was told
        self._stopped_at: dict[int, float] = {}  # when torchrun was about to stop them, in monotonic seconds
        self._loop: asyncio.AbstractEventLoop
        self._life: asyncio.Task[None] | None = None  # None before the start
        self._files: set[int] = set()  # what wakes us: pidfds, and the pipe of news
        self._news: int | None = None
        self._unread = b""  # of it: the begin of a line
        self._woken, self._is_over = asyncio.Event(), asyncio.Event()
        self._deadline = math.inf  # of the stop, until SIGKILL; infinite while nothing is to be stopped
        self._first_signal: int | None = None
        self._spared: Collection[int] = ()  # pids of workers that do not get that

    # --- what others ask ---------------------------------------------------------------------------

    def start(self) -> None:
        """Start the agent; all that happens arrives as events."""
        self._loop = asyncio.get_running_loop()
        if self._options.news is not None:
            self._news = os.open(self._options.news, os.O_RDWR | os.O_NONBLOCK)
            self._wake_by(self._news, self._woken.set)
        self._life = self._loop.create_task(self._live())

    def stop(self, grace_s: float, first_signal: int | None = None, spared: Collection[int] = ()) -> None:
        """Stop the whole tree: SIGTERM, `grace_s` seconds, SIGKILL. Returns at once; the first call counts.

        With `first_signal` the workers alone, without those `spared`, get that signal first, and all up to `grace_s` seconds
        to save. What they have started still serves them meanwhile.
        """
        if self._deadline == math.inf:
            self._deadline, self._first_signal = time.monotonic() + grace_s, first_signal
            self._spared = spared
            self._woken.set()

    async def close(self, grace_s: float) -> None:
        """Stop whatever still runs and wait for its end, at most the grace and some 11 s; can be repeated."""
        if self._life is not None:
            self.stop(grace_s)
            await self._is_over.wait()

    # --- its life ----------------------------------------------------------------------------------

    async def _live(self) -> None:
        error, left = None, list[str]()
        try:
            try:
                await self._begin()
            except Exception as problem:  # no such program, no more processes, a zero byte in a variable
                error = f"could not be started: {problem}"
                return
            await self._until(lambda: self._deadline < math.inf or self._agent.returncode is not None, WATCH_S)
            if self._deadline == math.inf:  # it has ended by itself
                status = self._agent.returncode
                self._read_news()
                self._on_event(AgentEnded(status, time.monotonic()))
                words = ((pid, processes.read(f"/proc/{pid}/cmdline").split("\0")) for pid in self._tree())
                left = [f"{pid} ({' '.join(argv).strip()[:200]})" for pid, argv in words]
                grace_s = _STRAGGLER_GRACE_S if status == 0 else self._options.grace_s
                self._deadline = time.monotonic() + grace_s
            await self._stop()
        finally:  # whatever happens: everybody waits for its end
            self._read_news()
            self._let_go()
            self._is_over.set()
            self._on_event(End(None if error else self._agent.returncode, error, left))

    async def _begin(self) -> None:
        """Have a spare become the agent, or start it cold."""
        asked = None if self._warm is None else self._warm(self._env, self._options)
        if isinstance(asked, Spare):
            self._spare, self._agent, self.pid = asked, asked.process, asked.process.pid
            try:
                await self._until(self._has_answered, _ANSWER_LOOK_S)
                return
            except (StartCold, OSError) as refused:
                self._end_spare()
                asked = Refused(f"{refused}")
        if asked is not None:
            self._on_event(asked)
        self._start_cold()

    def _has_answered(self) -> bool:
        """Return whether no answer of a spare is awaited any more; raise StartCold if it can't become the agent."""
        if self._spare is not None and self._deadline == math.inf:
            if not self._spare.poll():
                return False
            self._spare = None
            self._observe(self._agent.pid)
        return True

    async def _stop(self) -> None:
        """Stop all processes: the agent last, since torch's store, which it may serve, lives in it."""
        if self._spare is not None:
            self._end_spare()
        # The agent gets no SIGTERM: it would signal its workers a second time, reap them before we read their exit
        # codes, or wait in its exit barrier for up to 300 s (torch 2.13).
        if not self._is_command and self._agent.returncode is None:
            send_signal(self._agent.pid, self._options.halt_signal)
            # Until it has heard, it may still start a worker, or stop one.
            await self._until(self._has_heard, _HALT_LOOK_S, _HALT_S)
            self._read_news()
        if self._first_signal is not None:
            _signal_all([pid for pid in self._living_workers() if pid not in self._spared], self._first_signal)
            await self._until(lambda: not self._living_workers(), _LOOK_S)
            self._deadline = min(self._deadline, time.monotonic() + _STRAGGLER_GRACE_S)
        told = self._to_end()
        _signal_all(told, signal.SIGTERM)
        # What was forked between that look and the signal has heard nothing, and its parent may be gone.
        _signal_all([pid for pid in self._to_end() if pid not in told], signal.SIGTERM)
        await self._until(lambda: not self._to_end(), _LOOK_S)
        killed_at = time.monotonic()
        while not self._kill_all(killed_at) and time.monotonic() < killed_at + _KILL_WAIT_S:
            await self._sleep(_KILL_LOOK_S)

    def _has_heard(self) -> bool:
        number = self._options.halt_signal
        is_halted = number == signal.SIGSTOP or processes.has_signal(self._agent.pid, "SigBlk", number)
        return is_halted or self._agent.returncode is not None or not self._to_end()

    def _kill_all(self, since: float) -> bool:
        """Kill all; return whether nothing is left."""
        living = self._tree()
        # Workers first: dead while their agent is halted, they come to us with their exit codes. A command is not
        # halted, and would go on to its next step.
        has_turn = self._is_command or len(living) == 1 or time.monotonic() > since + _KILL_WAIT_S / 2
        _signal_all([pid for pid in living if pid != self.pid or has_turn], signal.SIGKILL)
        # Checked before reaping: a process that ends in between would else be left with its exit code unread.
        is_over = self._agent.returncode is not None and not self._tree()
        self._look()
        return is_over

    async def _until(self, is_so: Callable[[], bool], look_s: float, limit_s: float = math.inf) -> None:
        """Look at everything until something is so, at most for so long, and not longer than the stop may last."""
        limit = time.monotonic() + limit_s
        while True:
            self._look()
            if is_so() or time.monotonic() >= min(limit, self._deadline):
                return
            await self._sleep(look_s)

    async def _sleep(self, look_s: float) -> None:
        """Wait until something happens, or until the next look."""
        timer = self._loop.call_later(until_look(look_s), self._woken.set)
        await self._woken.wait()
        timer.cancel()
        self._woken.clear()

    def _start_cold(self) -> None:
        options = self._options
        with open(options.stdout, "ab") as out, open(options.stderr, "ab") as err:
            self._agent = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=out.fileno(),
                stderr=err.fileno(),
                cwd=options.cwd,
                env=self._env,
                start_new_session=True,
            )
        self.pid = self._agent.pid
        self._observe(self.pid)

    def _end_spare(self) -> None:
        assert self._spare is not None
        self._spare.kill()
        self._spare = None

    # --- what wakes us -----------------------------------------------------------------------------

    def _wake_by(self, fd: int, call: Callable[..., object], *args: Any) -> None:
        self._files.add(fd)
        self._loop.add_reader(fd, call, *args)

    def _close(self, fd: int) -> None:
        self._files.discard(fd)
        self._loop.remove_reader(fd)
        os.close(fd)

    def _observe(self, pid: int) -> None:
        """Have the end of a process wake us, by a pidfd. Without one the agent tells of a worker's, and we reap."""
        handle = processes.open_pidfd(pid)
        if handle is not None:  # else torchrun may have reaped it, and tells us
            self._wake_by(handle, self._has_ended, handle, pid)

    def _has_ended(self, pidfd: int, pid: int) -> None:
        self._close(pidfd)
        self._read_news()  # first: it may tell of a worker that has failed, and of others that were stopped for it
        # torchrun reaps its workers ten times a second. Until then the dead worker's exit code can be read.
        dead = processes.find(pid)
        if dead is not None and dead.status is not None:
            self._report_exit(pid, dead.status)
        self._woken.set()

    def _read_news(self) -> None:
        """Handle what the agent tells of its workers, line by line."""
        if self._news is not None:
            with suppress(BlockingIOError):
                self._unread += os.read(self._news, 65536)
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            self._handle_news(*line.decode().split())

    def _handle_news(self, what: str, word: str, *more: str) -> None:
        pid = int(word)
        if what == "started":
            rank, local_rank = map(int, more)
            self._workers[pid] = WorkerStarted(rank, local_rank, pid)
            self._on_event(self._workers[pid])
            self._observe(pid)
        elif what == "ended":
            self._report_exit(pid, int(more[0]))
        elif what == "unreached":
            self._on_event(Unreached(" ".join(more)))
        else:
            self._stopped_at.setdefault(pid, float(more[0]))

    def _report_exit(self, pid: int, status: int) -> None:
        """Report a worker's end, once."""
        if pid in self._workers.keys() - self._ended:
            self._ended.add(pid)
            stopped_at = self._stopped_at.get(pid)
            stopped = self._deadline < math.inf or stopped_at is not None
            self._on_event(WorkerEnded(*self._workers[pid], status, stopped, time.monotonic(), stopped_at))

    def _look(self) -> None:
        """Handle what the agent tells, and reap it and what was re-parented to this process."""
        self._read_news()
        for pid, status in processes.reap():
            if pid == self.pid:
                self._agent.returncode = status
            else:
                self._report_exit(pid, status)

    def _let_go(self) -> None:
        self._news = None
        for fd in list(self._files):
            self._close(fd)

    # --- processes -----------------------------------------------------------------------------------

    def _tree(self) -> list[int]:
        """Return the pids of the agent and all that it has started, however that detached itself."""
        return processes.living_descendants()

    def _living_workers(self) -> list[int]:
        return [pid for pid in self._tree() if pid in self._workers.keys() - self._ended]

    @property
    def _is_command(self) -> bool:
        return self._options.halt_signal == 0

    def _to_end(self) -> list[int]:
        """Return the pids of what gets SIGTERM: all below the agent, or a command with all below it."""
        return [pid for pid in self._tree() if self._is_command or pid != self.pid]


def _signal_all(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        send_signal(pid, number)
