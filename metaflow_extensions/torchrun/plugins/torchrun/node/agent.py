"""One agent and its whole process tree, seen from the task: start, follow, stop, account for.

A guardian does the work, as a process of its own; see `guardian.py` why. Its events are read in a thread of their own.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from ..guardian.agent_events import AgentEvent, AgentStarted, End, Refused, WorkerStarted
from ..guardian.guardian import Options
from ..guardian.guardian_process import GuardianProcess
from ..machine import processes

# The guardian waits 10 s at most after SIGKILL; then it reports what it has.
_END_WAIT_S = 15.0
# Until a guardian that has waited says that it has read its request; a busy machine is slow, and a frozen one says nothing.
_ANSWER_S = 15.0


class Warm(Protocol):
    """A way to start an agent faster than cold."""

    def start(self, env: Mapping[str, str], options: Options) -> GuardianProcess | Refused:
        """Return a guardian that was asked for the agent, or why there is none."""


class AgentProcess:
    """The agent of one generation. `on_event` is called in a thread of its own; the last event is always `End`."""

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
        self._guardian: GuardianProcess | None = None
        self._told: list[str] = []  # in order
        self._has_ended = False
        # Guards the three above: the reader goes on with another guardian where a waiting one ends too early.
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, name="torchrun-agent", daemon=True)
        self._tree: dict[int, str] = {}  # pid -> when it began

    def start(self) -> None:
        """Start the agent; what becomes of it arrives as events."""
        guardian = self._ask_warm() or self._own_guardian()
        try:
            self._guardian = guardian
            self._reader.start()
        except RuntimeError:  # no more threads; its agent gets SIGTERM from the kernel when the guardian is gone
            self._guardian = None
            guardian.kill()
            guardian.close()
            raise

    def _ask_warm(self) -> GuardianProcess | None:
        """Return who starts the agent warm; None if nobody does, and then why was told."""
        asked = None if self._warm is None else self._warm.start(self._env, self._options)
        if isinstance(asked, Refused):
            self._warm = None
            self._on_event(asked)
            return None
        return asked

    def _own_guardian(self) -> GuardianProcess:
        return GuardianProcess("guardian.guardian", [json.dumps(self._options._asdict()), *self._command], self._env)

    @property
    def pid(self) -> int | None:
        """The guardian's, from which all processes of this node's launch descend; None before the start."""
        return None if self._guardian is None else self._guardian.pid

    def stop(self, grace_s: float) -> None:
        """Ask for the end of the whole tree: SIGTERM, `grace_s` seconds, SIGKILL. Returns at once; can be repeated."""
        self._tell(f"stop {grace_s}")

    def preempt(self, grace_s: float, number: int) -> None:
        """As `stop`, but first the workers alone get signal `number` and up to `grace_s` seconds to save."""
        self._tell(f"preempt {grace_s} {number}")

    def _tell(self, line: str) -> None:
        with self._lock:
            if self._guardian is not None and not self._has_ended:
                self._told.append(line)
                self._guardian.tell(line)

    def close(self, grace_s: float) -> None:
        """Stop whatever still runs and wait for its end, at most the grace and 15 s; can be repeated."""
        if self._guardian is None:
            return
        self.stop(grace_s)
        self._reader.join(grace_s + _END_WAIT_S)
        with self._lock:
            guardian = self._guardian
        try:
            if not guardian.wait(_END_WAIT_S):
                guardian.kill()
        finally:
            guardian.close()
            self._reader.join(_END_WAIT_S)

    def _read(self) -> None:
        try:
            self._follow_all()
        except Exception as error:
            # As of a guardian of another version, where this package was replaced meanwhile. The launch must hear an end.
            assert self._guardian is not None
            self._stop_in_its_place(self._guardian)
            self._end(End(None, f"could not be followed: {type(error).__name__}: {error}"))

    def _follow_all(self) -> None:
        assert self._guardian is not None
        if self._follow(self._guardian):
            return
        self._guardian.kill()
        self._on_event(Refused("the guardian that waited with the spare has ended, or does not answer"))
        try:
            self._start_cold()
        except OSError as error:  # no more processes
            self._end(End(None, f"could not be started: {error}"))
        else:
            self._follow(self._guardian)

    def _follow(self, guardian: GuardianProcess) -> bool:
        """Pass on what a guardian tells, to the end; return False if it ended before it had an agent, or is frozen."""
        for event in guardian.events(None if self._warm is None else _ANSWER_S):
            if isinstance(event, AgentStarted | WorkerStarted):
                self._tree[event.pid] = event.began
            if isinstance(event, End):
                self._end(event)
                return True
            self._on_event(event)
        if self._warm is not None and not self._tree:
            return False  # a spare ends with it
        self._stop_in_its_place(guardian)
        self._end(End(None, guardian_gone=True))
        return True

    def _start_cold(self) -> None:
        """Start the agent with a guardian of its own, and tell that what the other one was told."""
        with self._lock:
            self._warm, self._guardian = None, self._own_guardian()
            for line in self._told:
                self._guardian.tell(line)

    def _stop_in_its_place(self, guardian: GuardianProcess) -> None:
        """Stop what a guardian that has ended, or is ended now, has told of."""
        guardian.kill()
        # The agent's parent-death signal makes it stop its workers; what does not obey is killed.
        same = {pid for pid, began in self._tree.items() if processes.began(pid) == began}
        processes.await_or_kill(same, self._options.grace_s)

    def _end(self, event: End) -> None:
        with self._lock:
            self._has_ended = True
        self._on_event(event)
