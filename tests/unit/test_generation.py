"""The states of a generation, and what the machine has to do with its failures."""

import signal
import types
from dataclasses import replace

import pytest
from fake_node import FakeAgent

from metaflow_extensions.torchrun.plugins.torchrun.gang.cause import Cause
from metaflow_extensions.torchrun.plugins.torchrun.gang.protocol import Go
from metaflow_extensions.torchrun.plugins.torchrun.guardian.agent_events import AgentEnded, Frozen
from metaflow_extensions.torchrun.plugins.torchrun.launch.spec import LaunchSpec
from metaflow_extensions.torchrun.plugins.torchrun.machine.accelerators import Machine
from metaflow_extensions.torchrun.plugins.torchrun.node import agent_end
from metaflow_extensions.torchrun.plugins.torchrun.node.agent_end import MachineFaults
from metaflow_extensions.torchrun.plugins.torchrun.node.generation import Generation, Phase
from metaflow_extensions.torchrun.plugins.torchrun.node.plan import Plan

SPEC = LaunchSpec("/flow/train.py", (), False, nproc=2, num_nodes=2, node_index=1, python="python3")
KILLED = Cause("signal", 0, "host", 1, 1, -signal.SIGKILL, None, "the last lines")


@pytest.fixture
def generation(tmp_path):
    return made_in(str(tmp_path))


def made_in(folder):
    plan = Plan(SPEC, "127.0.0.1", Machine(1), lambda *_: True)
    go = Go(launch=0, generation=0, port=1, gang="gang", restarts=0, max_restarts=0)
    agent = FakeAgent([], {}, None, print)
    follower = types.SimpleNamespace(start=lambda: None, finish=lambda explained: None, written_bytes=int)
    return Generation(plan, "host", go, folder, [], agent, follower)


STARTING, RUNNING, STOPPING, ENDED = Phase


@pytest.mark.parametrize(
    ("acts", "phases"),
    [
        ("start stop stop close close", [STARTING, RUNNING, STOPPING, STOPPING, ENDED, ENDED]),
        ("stop start close", [STARTING, STARTING, RUNNING, ENDED]),
        ("close stop", [STARTING, ENDED, ENDED]),
        ("start", [STARTING, RUNNING]),
        ("start agent_fails stop freeze close", [STARTING, RUNNING, STOPPING, STOPPING, STOPPING, ENDED]),
        ("start agent_ends stop agent_fails close", [STARTING, RUNNING, RUNNING, STOPPING, STOPPING, ENDED]),
    ],
)
def test_the_way_of_a_generation(acts, phases, generation):
    can = {
        "agent_fails": lambda: generation.handle(AgentEnded(1, 0.0)),
        "agent_ends": lambda: generation.handle(AgentEnded(0, 0.0)),
        "freeze": lambda: generation.handle(Frozen(None, None, 7, 0.0)),
    }
    seen = [generation.phase]
    for act in acts.split():
        can.get(act, lambda act=act: getattr(generation, act)())()
        seen.append(generation.phase)
    assert seen == phases
    with pytest.raises(AssertionError, match="a generation can't go from"):
        generation.start()  # it does so once


# --- what the machine has to do with it --------------------------------------------------------------


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
    faults = MachineFaults("/")
    assert (faults.explained(replace(KILLED, exit_code=exit_code)).kind == "oom") is is_oom
    assert faults.how_ended(exit_code).startswith("ran out of memory") is is_oom


def test_a_full_disk_explains_what_a_worker_could_not(tmp_path):
    full = MachineFaults("/proc")  # a file system without a free block
    assert (
        full.explained(KILLED).exception == "a full disk: nothing more can be written to /proc, where its output goes"
    )
    said = Cause("exception", 0, "host", 1, 1, 1, "ValueError: nan")
    assert full.explained(said) is said
    assert not MachineFaults(str(tmp_path)).is_disk_full()
    assert not MachineFaults("/nowhere").is_disk_full()


def test_a_full_disk_explains_an_agents_end(tmp_path):
    generation = made_in("/proc")
    generation.start()
    generation.handle(AgentEnded(1, 0.0))
    text = "its torchrun agent exited with code 1, on a full disk: nothing more can be written to /proc"
    assert [failure.cause.exception for failure in generation.failures()] == [text]
