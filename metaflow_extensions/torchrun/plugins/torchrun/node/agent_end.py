"""Failures that no worker explains itself: how the agent of one generation ended, and what the machine has done."""

from __future__ import annotations

import signal
from dataclasses import replace

from ..gang.cause import Cause, describe_exit, signal_name
from ..launch.call import Call
from ..machine.cgroup import describe_oom, oom_kills
from .agent_events import End
from .exits import read_agent_report
from .pipes import Tail

AGENT_NAME = "torchrun agent"
"""What messages call torchrun's own process."""


class MachineFaults:
    """What this machine has done to the workers of one generation since this object was made."""

    def __init__(self) -> None:
        self._oom_kills_before = oom_kills()

    def explained(self, cause: Cause) -> Cause:
        """Return `cause`, explained by the machine's state."""
        if cause.kind == "signal" and self._is_out_of_memory(cause.exit_code):
            cause = replace(cause, kind="oom", exception=describe_oom())
        return cause

    def how_ended(self, exit_code: int) -> str:
        """Say how a process ended."""
        return f"ran {describe_oom()}" if self._is_out_of_memory(exit_code) else describe_exit(exit_code)

    def _is_out_of_memory(self, exit_code: int | None) -> bool:
        """Tell whether it was the kernel's out-of-memory killer: its counter has moved since *go*."""
        before, now = self._oom_kills_before, oom_kills()
        return exit_code == -signal.SIGKILL and before is not None and now is not None and now > before


class AgentEnd:
    """The end of one agent."""

    def __init__(self, call: Call, host: str, tail: Tail) -> None:
        self._node, self._host = call.node_index, host
        self._tail = tail
        self.machine = MachineFaults()
        self.exit_code: int | None = None
        self.failed_at: float | None = None
        self._end: End | None = None

    def record(self, end: End) -> None:
        """Record an end that the agent did not reach by itself."""
        self.exit_code, self._end = end.status, end

    def describe(self, status: int) -> str:
        """Return for the log how the agent failed by itself."""
        return f"the {AGENT_NAME} {describe_exit(status)}"

    def cause(self, has_workers: bool) -> Cause:
        """Return why it failed; `has_workers`: it had started some."""
        report, code, who = read_agent_report(self._tail), self.exit_code, f"its {AGENT_NAME}"
        if report.got_signal is not None:
            how = f"got {signal_name(report.got_signal)} from outside of the gang, and gave up"
        elif self._end is not None and self._end.error is not None:
            how = self._end.error
        elif code == 0:
            how = "exited with code 0 and has started no worker"
        else:
            how = "vanished" if code is None else self.machine.how_ended(code)
        # An agent with workers did start: it was killed, or lost its own connections.
        kind = "agent_ended" if has_workers else "agent"
        return Cause(kind, self._node, self._host, None, None, code, f"{who} {how}", report.tail)
