"""Failures that no worker explains itself: how the agent of one generation ended, and what the machine has done."""

from __future__ import annotations

import re
import signal
from dataclasses import replace

from ..gang.cause import Cause, describe_exit, signal_name
from ..machine.cgroup import describe_oom, oom_kills
from .agent_events import End
from .call import Call
from .exits import last_lines, without_labels
from .pipes import AGENT, Tail

AGENT_NAME = "torchrun agent"
"""What messages call torchrun's own process."""
# `_terminate_process_handler` in torch/distributed/elastic/multiprocessing/api.py, torch 2.13.
_GOT_SIGNAL = re.compile(r"SignalException: Process \d+ got signal: (\d+)")


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


def agent_failure(call: Call, host: str, tail: Tail, end: End, faults: MachineFaults, has_workers: bool) -> Cause:
    """Return why an agent failed; `has_workers`: it had started some."""
    code, text = end.status, without_labels(tail(AGENT, "stderr"))
    if (got := _GOT_SIGNAL.search(text)) is not None:
        how = f"got {signal_name(int(got[1]))} from outside of the gang, and gave up"
    elif end.error is not None:
        how = end.error
    elif code == 0:
        how = "exited with code 0 and has started no worker"
    else:
        how = "vanished" if code is None else faults.how_ended(code)
    # An agent with workers did start: it was killed, or lost its own connections.
    kind = "agent_ended" if has_workers else "agent"
    return Cause(kind, call.node_index, host, None, None, code, f"its {AGENT_NAME} {how}", last_lines(text))
