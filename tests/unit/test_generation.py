"""What a generation says of a worker that the kernel has killed for lack of memory."""

import signal
from dataclasses import replace

import pytest

from metaflow_extensions.torchrun.plugins.torchrun.gang.cause import Cause
from metaflow_extensions.torchrun.plugins.torchrun.node import agent_end
from metaflow_extensions.torchrun.plugins.torchrun.node.agent_end import MachineFaults

KILLED = Cause("signal", 0, "host", 1, 1, -signal.SIGKILL, None, "the last lines")


@pytest.mark.parametrize(
    ("before", "now", "exit_code", "is_oom"),
    [
        (1, 2, -signal.SIGKILL, True),
        (1, 1, -signal.SIGKILL, False),
        (1, 2, -signal.SIGSEGV, False),
        (None, 2, -signal.SIGKILL, False),
    ],
)
def test_a_worker_killed_for_lack_of_memory_is_called_so(before, now, exit_code, is_oom, monkeypatch):
    counts = iter([before, now, now])
    monkeypatch.setattr(agent_end, "oom_kills", lambda: next(counts))
    faults = MachineFaults()
    assert (faults.explained(replace(KILLED, exit_code=exit_code)).kind == "oom") is is_oom
    assert faults.how_ended(exit_code).startswith("ran out of memory") is is_oom
