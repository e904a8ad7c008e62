"""One agent and its whole process tree, seen from the task: start, follow, stop, account for.

`guardian.py` does the work, as a process of its own; see there why. Its events are read in a thread of their own.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from ..machine import processes
from .agent_events import AgentEvent, AgentStarted, End, WorkerStarted, from_line
from .guardian import Options

# The guardian is a module of this package, but it runs without the package's `__init__`, which imports Metaflow, and
# without site-packages (-S). So it starts fast, and nothing that a user has installed can keep it from starting.
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_GUARDIAN = (
    "import sys, types; package = sys.modules['torchrun'] = types.ModuleType('torchrun'); "
    "package.__path__ = [sys.argv.pop(1)]; from torchrun.node.guardian import main; sys.exit(main())"
)
# The guardian waits 10 s at most after SIGKILL; then it reports what it has.
_END_WAIT_S = 15.0
_LOOK_S = 0.5  # between looks whether a silent guardian still lives, where the system does not tell (before Linux 5.3)


class AgentProcess:
    """The agent of one generation. `on_event` is called in a thread of its own; the last event is always `End`."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], options: Options, on_event: Callable[[AgentEvent], None]
    ) -> None:
        words = [str(os.getpid()), json.dumps(options._asdict()), *command]
        self._argv = [sys.executable, "-I", "-S", "-c", _GUARDIAN, _PACKAGE, *words]
        self._env = dict(env)  # its whole environment
        self._grace_s = options.grace_s
        self._on_event = on_event
        self._guardian: subprocess.Popen[bytes] | None = None
        self._reader = threading.Thread(target=self._read, name="torchrun-agent", daemon=True)
        self._tree: dict[int, str] = {}  # pid -> when it began

    def start(self) -> None:
        """Start the agent; what becomes of it arrives as events."""
        self._guardian = subprocess.Popen(
            self._argv, env=self._env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        self._reader.start()

    @property
    def pid(self) -> int | None:
        """The guardian's, from which all processes of this node's launch descend; None before the start."""
        return None if self._guardian is None else self._guardian.pid

    def stop(self, grace_s: float) -> None:
        """Ask for the end of the whole tree: SIGTERM, `grace_s` seconds, SIGKILL. Returns at once; can be repeated."""
        self._command(f"stop {grace_s}")

    def preempt(self, grace_s: float, number: int) -> None:
        """As `stop`, but first the workers alone get signal `number` and up to `grace_s` seconds to save."""
        self._command(f"preempt {grace_s} {number}")

    def _command(self, line: str) -> None:
        guardian = self._guardian
        # Asked, since the step's code may have set SIGPIPE to end the task.
        if guardian is not None and guardian.poll() is None:
            assert guardian.stdin is not None
            with suppress(OSError, ValueError):  # it has ended meanwhile
                guardian.stdin.write(f"{line}\n".encode())
                guardian.stdin.flush()

    def close(self, grace_s: float) -> None:
        """Stop whatever still runs and wait for its end, at most the grace and 15 s; can be repeated."""
        if self._guardian is None:
            return
        self.stop(grace_s)
        try:
            self._guardian.wait(grace_s + _END_WAIT_S)
        except subprocess.TimeoutExpired:
            self._guardian.kill()
            self._guardian.wait()
        finally:
            assert self._guardian.stdin is not None
            with suppress(OSError):
                self._guardian.stdin.close()
            if self._reader.ident is not None:  # else there was no thread to be had
                self._reader.join(_END_WAIT_S)

    def _read(self) -> None:
        assert self._guardian is not None
        ended = False
        for line in self._lines(self._guardian):
            event = from_line(line)
            ended = isinstance(event, End)
            if isinstance(event, AgentStarted | WorkerStarted):
                self._tree[event.pid] = event.began
            self._on_event(event)
        if not ended:
            self._guardian_was_killed(self._guardian)

    def _lines(self, guardian: subprocess.Popen[bytes]) -> Iterator[bytes]:
        """Yield what the guardian says, to its end.

        The pipe alone does not tell the end: a process that the step's code has forked can hold it open.
        """
        assert guardian.stdout is not None
        with guardian.stdout as events, _end_of(guardian.pid) as end:
            poll, rest, fd = select.poll(), b"", events.fileno()
            for each in (fd, *end):
                poll.register(each, select.POLLIN)
            while True:
                gone = guardian.poll() is not None  # asked first: what it has said is in the pipe by then
                ready = dict(poll.poll(0 if gone else None if end else _LOOK_S * 1000))
                if fd in ready:
                    data = os.read(fd, 65536)
                    *lines, rest = (rest + data).split(b"\n")
                    yield from lines
                    gone = not data
                if gone:
                    return

    def _guardian_was_killed(self, guardian: subprocess.Popen[bytes]) -> None:
        """Stop in the guardian's place what it had told of, then report the end."""
        code = guardian.wait()
        # 0 is what Popen says where the kernel, or the step's code, has reaped it.
        ignored = (
            "ended, and how is not known: the step's code ignores SIGCHLD, or waits for all children of its process"
        )
        error = ignored if code == 0 else None
        # The agent's parent-death signal makes it stop its workers; what does not obey is killed.
        same = {pid for pid, began in self._tree.items() if processes.began(pid) == began}
        processes.await_or_kill(same, self._grace_s)
        self._on_event(End(None, error, guardian=code))


@contextmanager
def _end_of(pid: int) -> Iterator[tuple[int, ...]]:
    """Open what tells the end of a process, where the system has that."""
    handle = None
    with suppress(ProcessLookupError):  # the step's code waits for all children of its process
        handle = processes.open_pidfd(pid)
    try:
        yield () if handle is None else (handle,)
    finally:
        if handle is not None:
            os.close(handle)
