"""A node's phases: every news in every phase, and any order of news, leaves a node that can end."""

import asyncio
import signal
from itertools import product
from types import SimpleNamespace

import pytest
from fake_node import NOBODY
from hypothesis import given
from hypothesis import strategies as some

from metaflow_extensions.torchrun.plugins.torchrun.errors import LaunchFailed, TorchrunError
from metaflow_extensions.torchrun.plugins.torchrun.gang.cause import Cause
from metaflow_extensions.torchrun.plugins.torchrun.gang.endings import Interruption, TimedOut
from metaflow_extensions.torchrun.plugins.torchrun.gang.protocol import (
    Abort,
    Ask,
    Ended,
    Go,
    Ready,
    Restart,
    Stop,
    Store,
    Verdict,
)
from metaflow_extensions.torchrun.plugins.torchrun.gang.seat import GivenUp, Seat
from metaflow_extensions.torchrun.plugins.torchrun.launch.spec import LaunchSpec
from metaflow_extensions.torchrun.plugins.torchrun.machine.accelerators import Machine
from metaflow_extensions.torchrun.plugins.torchrun.node.agent_events import AgentEnded, End, WorkerEnded, WorkerStarted
from metaflow_extensions.torchrun.plugins.torchrun.node.commands import CommandNews
from metaflow_extensions.torchrun.plugins.torchrun.node.node_launch import HANDLERS, Completed, NodeLaunch
from metaflow_extensions.torchrun.plugins.torchrun.node.phases import LIVING, NEXT, Phase
from metaflow_extensions.torchrun.plugins.torchrun.node.plan import Plan
from metaflow_extensions.torchrun.plugins.torchrun.node.start import AgentNews

CAUSE = Cause("exit", 0, "host", 1, 1, 3)
ERROR = LaunchFailed("Rank 1 failed.", CAUSE.as_dict())
SPEC = LaunchSpec("/flow/train.py", (), False, nproc=1, num_nodes=2, node_index=1, python="python3")


class Agent:
    """An agent without processes."""

    pid = None

    def __init__(self, of_workers):
        self.of_workers, self.is_running, self.is_closed = of_workers, False, False

    def start(self):
        self.is_running = True

    def stop(self, grace_s, first_signal=None):
        assert self.is_running

    async def close(self, grace_s):
        self.is_closed = True


class Node:
    """A launch on one node, and what it has sent, said and asked of its task."""

    def __init__(self, commands=()):
        self.sent, self.said, self.asked, self.agents = [], [], [], []
        link = SimpleNamespace(own_address=None, send=self.sent.append, settle_lines=lambda: asyncio.sleep(0))
        self.seat = Seat(1, 2, self.said.append, link)
        self.plan = Plan(SPEC, "127.0.0.1", Machine(1), commands=commands, write=lambda *_: True)
        complete, store = lambda: self.asked.append("complete"), lambda what: self.asked.append(what)
        self.launch = NodeLaunch(self.plan, self.seat, 0, complete, store, self.new_agent)
        self.seat.begin_launch()
        self.launch._begin()

    def new_agent(self, *_):
        self.agents.append(Agent(of_workers=self.phase is Phase.STARTING))
        return self.agents[-1]

    @property
    def phase(self):
        return self.launch.life.phase

    async def handle(self, news):
        """Handle news as `NodeLaunch.run` does; return what that raises."""
        if isinstance(news, Interruption) and news is Interruption.BROKEN:
            self.seat.deliver(Abort(ERROR))
        try:
            await self.launch._handle(news)
        except (TorchrunError, GivenUp) as error:
            return error
        return self.launch._verdict and (self.launch._verdict.error or "well")

    async def end(self, error):
        """End as `NodeLaunch.run` does after an error."""
        await self.launch._give_up(error if isinstance(error, BaseException) else ERROR)
        assert self.phase is Phase.OVER
        assert all(agent.is_closed for agent in self.agents)


GO, STOP, STORE = Go(0, 0, 1, "gang", 0, 0), Stop(0, 0), Store(0, 0)
END = AgentNews(0, End(0))
WAYS = {
    Phase.PREPARING: [],
    Phase.COMPLETING: [CommandNews(End(0))],
    Phase.READY: [],
    Phase.RUNNING: [GO],
    Phase.STOPPING: [GO, STOP],
    Phase.ENDED: [GO, END],
    Phase.STORING: [GO, END, STORE],
}
NEWS = [
    GO,
    Go(0, 1, 1, "gang", 1, 2),
    Ask(0, 0, "stacks", {}),
    Ask(0, 1, "stacks", {}),
    STOP,
    Stop(0, 0, "rank 3 failed", 1, signal.SIGUSR1, "exit"),
    Restart(0, 1, 2, 1.0, CAUSE),
    STORE,
    Store(0, 0, ERROR, 3.0),
    Verdict(0),
    Verdict(0, ERROR),
    CommandNews(End(0)),
    CommandNews(End(1)),
    Completed(Plan(SPEC, "127.0.0.1", Machine(1), write=lambda *_: True)),
    AgentNews(0, WorkerStarted(1, 0, NOBODY)),
    AgentNews(0, WorkerEnded(1, 0, NOBODY, 3, False, 0.0)),
    AgentNews(0, AgentEnded(1, 0.0)),
    END,
    AgentNews(0, End(1)),
    AgentNews(1, End(0)),
    None,
    Interruption.BROKEN,
    Interruption.MUST_END,
    TimedOut("the step's @timeout is over"),
    GivenUp(None),
    GivenUp(CAUSE),
]


def has_commands(phase):
    return (("true",),) if phase in (Phase.PREPARING, Phase.COMPLETING) else ()


def after(*former):
    """Return all phases that may follow on some, also by way of others, and themselves."""
    found, more = set(), set(former)
    while more:
        found |= more
        more = {after for before in more for after in NEXT[before]} - found
    return found


def test_the_news_here_are_of_every_kind_and_every_phase_is_reached_that_lasts():
    assert {type(news) for news in NEWS} == set(HANDLERS)
    # News is handled neither before the begin nor after the end, nor while the agent is started.
    assert set(WAYS) == set(Phase) - {Phase.BEGINNING, Phase.STARTING, Phase.OVER}
    assert after(Phase.BEGINNING) == set(Phase)


@pytest.mark.parametrize(("phase", "news"), list(product(WAYS, NEWS)), ids=lambda each: getattr(each, "name", None))
def test_every_news_in_every_phase_does_what_the_table_says_or_nothing(phase, news, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    async def run():
        node = Node(has_commands(phase))
        for each in WAYS[phase]:
            assert await node.handle(each) is None
        assert node.phase is phase
        before = [len(each) for each in (node.sent, node.said, node.asked, node.agents)]
        error = await node.handle(news)
        if phase not in HANDLERS[type(news)]:
            assert error is None
            assert node.phase is phase
            assert [len(each) for each in (node.sent, node.said, node.asked, node.agents)] == before
        assert node.phase in after(phase)
        await node.end(error)
        if not (error and isinstance(news, Verdict)):
            assert isinstance(node.sent[-1], Ended), "the gang hears of it"
        assert list(tmp_path.iterdir()) == []

    asyncio.run(run())


@given(some.lists(some.sampled_from(NEWS), max_size=12), some.booleans())
def test_a_node_ends_after_any_order_of_news(many, with_commands):
    async def run():
        node, error = Node((("true",),) if with_commands else ()), None
        for news in many:
            before = node.phase
            error = await node.handle(news)
            assert node.phase in after(before)
            run = [each for each in node.agents if each.of_workers and each.is_running and not each.is_closed]
            assert len(run) == (node.phase in LIVING)
            if error is not None:
                break
        assert len([each for each in node.sent if isinstance(each, Ready)]) <= 1
        await node.end(error)

    asyncio.run(run())
