"""What the machine has to do with the failures of a generation, and that it begins and ends once."""

import asyncio
import signal
import types
from dataclasses import replace

import pytest
from fake_node import FakeAgent

from metaflow_extensions.torchrun.plugins.torchrun.gang.cause import Cause
from metaflow_extensions.torchrun.plugins.torchrun.gang.protocol import Go
from metaflow_extensions.torchrun.plugins.torchrun.launch.spec import LaunchSpec
from metaflow_extensions.torchrun.plugins.torchrun.machine.accelerators import Machine
from metaflow_extensions.torchrun.plugins.torchrun.node import agent_end
from metaflow_extensions.torchrun.plugins.torchrun.node.agent_end import MachineFaults
from metaflow_extensions.torchrun.plugins.torchrun.node.agent_events import AgentEnded, Frozen
from metaflow_extensions.torchrun.plugins.torchrun.node.generation import Generation
from metaflow_extensions.torchrun.plugins.torchrun.node.news import Seen
from metaflow_extensions.torchrun.plugins.torchrun.node.plan import Plan

KILLED = Cause("signal", 0, "host", 1, 1, -signal.SIGKILL, None, "the last lines")


def made_in(folder):
    spec = LaunchSpec("/flow/train.py", (), False, nproc=2, num_nodes=2, node_index=1, python="python3")

    async def kept(limit_s=None):
        pass

    plan = Plan(spec, "127.0.0.1", Machine(1), lambda *_: True)
    go = Go(launch=0, generation=0, port=1, gang="gang", restarts=0, max_restarts=0)
    follower = types.SimpleNamespace(
        start=lambda: None,
        finish=lambda explained: None,
        let_end=lambda: None,
        kept=kept,
        written_bytes=int,
        tail=lambda *which: "",
        last_output_at=None,
    )
    return Generation(plan, "host", go, folder, [], FakeAgent(None, [], {}, None, print), follower)


def test_it_begins_and_ends_once(tmp_path):
    """And what ends once it is being stopped is no failure."""
    generation = made_in(str(tmp_path))
    generation.start()
    for _ in range(2):
        generation.stop()
    for event in (AgentEnded(1, 0.0), Frozen(None, None, 7, 0.0)):
        assert generation.handle(event) == Seen()
    for _ in range(2):
        asyncio.run(generation.close())
    assert generation._agent.orders == ["start", ("stop", 30.0), ("close", 0.0)]


def test_that_workers_have_written_is_told_when_there_is_no_other_news(tmp_path):
    """What comes at the same time, as a failure, goes first."""
    generation = made_in(str(tmp_path))
    generation._logs.last_output_at = 1.0
    assert [generation.poll(is_quiet).has_written for is_quiet in (False, True)] == [False, True]


def test_what_ends_the_wait_for_its_processes_leaves_no_reader_and_no_pipes(tmp_path):
    generation, ended = made_in(str(tmp_path)), []
    generation._logs.finish = lambda explained: ended.append(explained)
    generation.start()
    generation._agent.close = lambda grace_s: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(generation.close())
    assert (ended, tmp_path.exists()) == ([False], False)


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
