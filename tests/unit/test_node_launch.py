"""What one node does in one launch: which message follows on what its agent says and what its gang decides."""

import json
import queue
import signal
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest
from fake_node import DEADLINE_S, ERROR, NOBODY, FakeNode
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from unit_helpers import eventually, write

from metaflow_extensions.torchrun.plugins.torchrun.errors import LaunchFailed
from metaflow_extensions.torchrun.plugins.torchrun.gang.cause import Cause
from metaflow_extensions.torchrun.plugins.torchrun.gang.messages import (
    Ask,
    Ended,
    Failed,
    Go,
    Report,
    Stop,
    Store,
    Verdict,
)
from metaflow_extensions.torchrun.plugins.torchrun.gang.policy import Group, LaunchPolicy
from metaflow_extensions.torchrun.plugins.torchrun.supervisor import generation
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.agent import (
    AgentEnded,
    End,
    Refused,
    Unreached,
    WorkerEnded,
    WorkerStarted,
)
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.endings import Broken, GivenUp, MustEnd


@pytest.fixture
def node(tmp_path):
    """Return the control node of a fake gang; a test that makes others gives them folders of their own."""
    return FakeNode(tmp_path)


# --- failures of this node --------------------------------------------------------------------------


def test_the_rank_that_fails_first_is_told(node):
    agent = node.running()
    now = time.monotonic()
    for local_rank, at in ((0, now), (1, now - 1.0)):
        record = {"exception": "ValueError: nan", "traceback": "", "at": at}
        write(node.worker_writes(agent, "stderr", "", local_rank) / "exception.json", json.dumps(record))
    node.worker_ended(agent, 0, 1, at=now)
    assert [each.cause.rank for each in node.expect(Failed).failures] == [0]
    node.worker_ended(agent, 1, -signal.SIGTERM, stopped=True)  # it was killed after it had raised
    (failure,) = node.ends(agent).failures
    assert failure.cause.rank == 1


# --- what follows on what -------------------------------------------------------------------------

CAUSE = Cause("exit", 0, "host", 1, 1, 3)
MUST_END = MustEnd("its machine goes")


def words_of(node):
    """Return what a node has sent so far, each by its kind, and "given up" for what says so."""
    found = []
    while not node._sent.empty():
        message = node.next_message()
        word = message.kind if isinstance(message, Report) else type(message).__name__
        found.append(f"{word}, given up" if getattr(message, "given_up", False) else word)
    return found


def test_an_order_to_end_lets_the_gang_decide_while_workers_run_and_a_second_one_ends_at_once(tmp_path):
    node = FakeNode(tmp_path, 1, policy=LaunchPolicy(max_restarts=1))
    agent = node.running()
    node.interrupt(MUST_END)
    assert not node.expect(Failed).given_up
    assert "stop" not in str(agent.orders)
    node.interrupt(MUST_END)
    assert "If the gang ends by this, Metaflow's @retry starts a new one." in str(node.outcome())
    assert words_of(node) == ["Failed, given up", "Ended"]
    assert agent.orders[-1] == ("close", 30.0)
    assert node.texts("stopping") == ["was preempted: its machine goes; stopping all nodes"]


def test_an_agent_that_can_not_be_started_is_the_end_of_the_generation(tmp_path):
    node = FakeNode(tmp_path, stores=True)
    node.new_agent = lambda on_event: None  # calling it with more raises
    node.launch()
    node.say_go()
    ended = node.expect(Ended)
    assert (ended.ok, ended.stores, ended.failures[0].cause.kind) == (False, True, "agent")
    assert node.verdict(ERROR) is ERROR


def test_what_is_stored_is_given_up_before_a_restart_at_a_stop_and_at_an_error(node):
    agent = node.running()
    node.side.deliver(Store(0, 0, ERROR))
    node.all_end_well(agent)
    node.expect(Ended)
    assert node.stored == [], "workers still ran"
    for news, stored in ((Store(0, 0), 1), (Stop(0, 0), 2), (Store(0, 0), 3), (Verdict(0, ERROR), 4)):
        node.side.deliver(news)
        eventually(lambda stored=stored: len(node.stored) == stored)
    assert [each is None for each in node.stored] == [False, True, False, True]
    assert node.outcome() is ERROR


def test_the_error_that_store_has_announced_is_raised_when_the_gang_breaks(node):
    error = LaunchFailed("Rank 3 failed.")
    node.launch()
    node.side.deliver(Store(0, 0, error, 3.0))
    node.interrupt(Broken(ERROR))
    assert node.outcome() is error


def test_a_restart_says_why_and_which_nodes_take_part(node):
    node.ends_first = node.running()
    node.all_end_well(node.ends_first)
    node.expect(Ended)
    agent = node.go(1, left=(1,), came=(2,), again="all workers start again, because", cause=CAUSE)
    node.all_end_well(agent)
    node.expect(Ended)
    result = node.verdict()
    assert node.texts("restart") == ["all workers start again, because"]
    assert [(each["generation"], each["left"], each["came"]) for each in result.restarts] == [(1, [1], [2])]


@pytest.mark.parametrize(("group", "ranks"), [(Group(2), "2"), (Group(1, (0,)), "0"), (Group(1), None)])
def test_a_node_has_the_ranks_of_its_place_in_the_group(group, ranks, tmp_path):
    """That is node 1, whose workers have another place after a loss; a spare has none."""
    node = FakeNode(tmp_path, 1)
    node.launch()
    node.say_go(group=group)
    if ranks is None:
        assert node.verdict() is not None
        assert node._agents.empty()
    else:
        agent = node._agents.get(timeout=DEADLINE_S)
        assert f"--node-rank={int(ranks) // 2}" in agent.command
        node.verdict(ERROR)


NEWS = [
    *(Go(0, generation, 29500, "gang", 3) for generation in (0, 1)),
    *(Stop(0, 0), Stop(0, 0, "rank 3 failed", 1, signal.SIGUSR1)),
    *(Ask(0, 0, "a", "stacks"), Store(0, 0), Store(0, 0, ERROR, 3.0), Verdict(0), Verdict(0, ERROR)),
    *(Broken(ERROR), MUST_END, GivenUp(None), GivenUp(CAUSE)),
    *(Go(1, 0, 1, "gang", 0), Ask(1, 0, "a", "stop"), Stop(1, 0), Store(1, 0)),
    Verdict(1),
]
OF_AGENT = [
    *(WorkerStarted(0, 0, NOBODY), WorkerEnded(0, 0, NOBODY, 0, False, 0.0), WorkerEnded(1, 1, NOBODY, 3, False, 0.0)),
    *(AgentEnded(0, 0.0), AgentEnded(1, 0.0), End(0), End(-9), Refused("there is none"), Unreached("no answer")),
]


@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(many=some.lists(some.sampled_from([*NEWS, *OF_AGENT]), max_size=10))
def test_a_node_ends_after_any_order_of_news_with_nothing_left(many, tmp_path):
    node, agents = FakeNode(tmp_path), []
    node.launch()
    for each in many:
        if each in NEWS:
            node.interrupt(each)
        elif agents:
            agents[-1].say(each)
        if isinstance(each, Go):
            with suppress(queue.Empty):
                agents.append(node._agents.get(timeout=0.05))
    node.interrupt(GivenUp(None))
    end = node.outcome()
    while not node._agents.empty():
        agents.append(node._agents.get())
    assert all(agent.orders[-1][0] == "close" for agent in agents)
    assert not list(tmp_path.iterdir())
    told = words_of(node)
    is_decided = not isinstance(end, BaseException) or end is ERROR
    assert "Ended" in told or is_decided, "the gang hears of it"
    assert node.stored.count(None) <= len(node.stored) / 2, "only what was begun is given up"
    node.loop.stop()


# --- what a node observes -------------------------------------------------------------------------


@pytest.mark.parametrize("fails", ["make", "poll"])
def test_an_observer_that_raises_is_left_out_and_a_line_says_so_once(fails, tmp_path, monkeypatch):
    def maker(fails):
        def do(name, found=None):
            if name == fails:
                raise OSError("gone")
            return found

        return lambda workers: do("make", SimpleNamespace(poll=lambda: do("poll", {"is": "well"})))

    monkeypatch.setattr(generation, "_OBSERVERS", {"ill": maker(fails), "well": maker("")})
    node = FakeNode(tmp_path)
    node.launch()
    node.go()
    for _ in range(3):
        assert node.report("well") == {"is": "well"}
    assert [text for text in node.texts("note") if "ill" in text] == [
        "this node reports nothing more of its ill: OSError: gone"
    ]
    node.verdict()
