"""Starts and stops one agent and its process tree, from the task.

The task only asks: a guardian, which is a process of its own, starts and stops the tree (`guardian/guardian.py` says
why). A thread of this object reads the guardian's events.
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from ..guardian.agent_events import AgentEvent, AgentStarted, End, Refused, WorkerStarted
from ..guardian.guardian import Options
from ..guardian.guardian_process import GuardianProcess
from ..launch.command import AGENT_VARIABLE
from ..machine import processes

# The guardian waits 10 s at most after SIGKILL; then it reports what it has.
_END_WAIT_S = 15.0
_STRAGGLER_GRACE_S = 2.0  # as the guardian's

Warm: TypeAlias = Callable[[Mapping[str, str], Options], "GuardianProcess | Refused"]
"""A way to start an agent faster than cold: returns a guardian that was asked for the agent, or why there is none."""


class AgentProcess:
    """The agent of one generation. `on_event` is called in this object's reader thread; the last event is always `End`."""

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
        # Guards `_guardian` and `_sent`: the reader thread may replace the guardian while another thread sends a command.
        self._lock = threading.Lock()
        self._sent: list[str] = []
        self._is_warm = False  # whether the guardian held a spare
        self._reader = threading.Thread(target=self._read, name="torchrun-agent", daemon=True)
        # They belong to the reader thread.
        self._tree: dict[int, str] = {}  # pid -> when it began
        self._agent: AgentStarted | None = None

    def start(self) -> None:
        """Start the agent. All further news arrives as events."""
        warm = self._ask_warm()
        self._is_warm, guardian = warm is not None, warm or self._own_guardian()
        try:
            self._guardian = guardian
            self._reader.start()
        except RuntimeError:  # no more threads can start. The kernel sends the agent SIGTERM when its guardian ends.
            self._guardian = None
            guardian.kill()
            guardian.close()
            raise

    def _ask_warm(self) -> GuardianProcess | None:
        """Return a guardian that starts the agent warm, or None after an event with the reason."""
        asked = None if self._warm is None else self._warm(self._env, self._options)
        if isinstance(asked, Refused):
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
        self._send(f"stop {grace_s}")

    def preempt(self, grace_s: float, number: int) -> None:
        """As `stop`, but first the workers alone get signal `number` and up to `grace_s` seconds to save."""
        self._send(f"preempt {grace_s} {number}")

    def _send(self, line: str) -> None:
        with self._lock:
            self._sent.append(line)
            if self._guardian is not None:
                self._guardian.tell(line)

    def close(self, grace_s: float) -> None:
        """Stop whatever still runs and wait for its end, at most the grace and 15 s; can be repeated."""
        if self._guardian is None:
            return
        self.stop(grace_s)
        self._reader.join(grace_s + _END_WAIT_S)
        try:
            if not self._guardian.wait(_END_WAIT_S):
                self._guardian.kill()
        finally:
            self._guardian.close()
            self._reader.join(_END_WAIT_S)

    # --- in the reader thread

    def _read(self) -> None:
        """Pass on the guardian's events, up to `End`."""
        end = self._follow()
        if end.guardian_gone and self._start_cold():
            end = self._follow()
        self._on_event(end)

    def _start_cold(self) -> bool:
        """Start the agent cold if its guardian held a spare and died before the agent ran; return whether that was so."""
        with self._lock:
            if not self._is_warm or self._tree or self._sent or self._guardian is None:
                return False
            self._is_warm = False
            try:
                guardian = self._own_guardian()
            except Exception:  # then the launch fails: its guardian is gone
                return False
            self._guardian.close()
            self._guardian = guardian
        self._on_event(Refused("the guardian that held the spare has ended"))
        return True

    def _follow(self) -> End:
        """Pass on the events of one guardian but the last, and return that."""
        assert self._guardian is not None
        try:
            for event in self._guardian.events():
                if isinstance(event, AgentStarted | WorkerStarted):
                    self._tree[event.pid] = event.began
                if isinstance(event, AgentStarted):
                    self._agent = event
                if isinstance(event, End):
                    return event
                self._on_event(event)
            end = End(None, guardian_gone=True)
        except Exception as error:
            # For example an event of another version, after the package was replaced on disk. The launch must get an `End`.
            end = End(None, f"could not be followed: {type(error).__name__}: {error}")
        self._stop_in_its_place(self._guardian)
        return end

    def _stop_in_its_place(self, guardian: GuardianProcess) -> None:
        """Kill a guardian, and stop the agent, the workers that it had reported, and all that these have started."""
        guardian.kill()
        # The kernel sends the agent SIGTERM at its guardian's death, and the agent stops its workers. The rest is killed.
        # A pid may belong to another process by now, so the time at which it began must be the same.
        same = {pid for pid, began in self._tree.items() if processes.began(pid) == began}
        processes.await_or_kill(same, self._options.grace_s)
        if self._agent is not None:
            # The guardian had adopted what detached itself; nobody else knows of it.
            left = processes.living_with(f"{AGENT_VARIABLE}={self._agent.pid}", self._agent.began)
            for pid in left:
                processes.send_signal(pid, signal.SIGTERM)
            processes.await_or_kill(left, min(self._options.grace_s, _STRAGGLER_GRACE_S))
