"""Launches that do not begin, since a node can't reach torch's store: what a node tries, and what the control node asks."""

import os
import socket
import subprocess
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from metaflow_extensions.torchrun.plugins.torchrun.features.reach.keep import ReachKeeper
from metaflow_extensions.torchrun.plugins.torchrun.gang.keepers import Remarks, Where
from unit_helpers import eventually

from metaflow_extensions.torchrun.plugins.torchrun.features.reach import watch
from metaflow_extensions.torchrun.plugins.torchrun.features.reach.watch import ReachWatcher
from metaflow_extensions.torchrun.plugins.torchrun.gang.messages import Report
from metaflow_extensions.torchrun.plugins.torchrun.machine.network import listening_socket

# --- on the control node ----------------------------------------------------------------------------


@pytest.fixture
def kept():
    found = ReachKeeper()
    found.begin(0, {}, 100.0)
    return found


def tell(kept, node, data):
    return kept.handle(node, Report("reach", 0, 0, data), 101.0)


def unreached(number, why="timed out"):
    return {"number": number, "address": "10.0.0.1", "port": 29500, "why": why}


def where(rank):
    return Where(rank, rank, f"host-{rank}")


def ask(number):
    return Remarks(ask={"number": number})


def test_a_node_that_fails_twice_is_the_cause(kept):
    assert tell(kept, 0, {"waits": True}) == ask(1)
    assert tell(kept, 3, unreached(1)) == ask(2), "the network may have been mended meanwhile"
    assert kept.tick(110.0, where) == Remarks()
    assert tell(kept, 3, unreached(2)) is None
    failing = kept.tick(111.0, where).failing
    assert (failing.kind, failing.node) == ("unreachable", 3)
    assert failing.text == (
        "can't reach torch's store on node 0 (host host-0): tried 10.0.0.1 on port 29500: timed out"
    )
    assert "Open TCP port 29500" in failing.advice
    kept.begin(0, {}, 120.0)
    assert kept.tick(121.0, where) == Remarks()
    assert tell(kept, 0, {"waits": True}) == ask(1)


def test_a_node_that_has_failed_once_only_is_not_to_blame(kept):
    assert tell(kept, 0, {"waits": True}) == ask(1)
    assert tell(kept, 1, unreached(1)) == ask(2)
    assert tell(kept, 2, unreached(2)) == ask(3), "it has failed once, too"
    assert kept.tick(130.0, where) == Remarks()
    assert tell(kept, 2, unreached(3)) is None
    failing = kept.tick(131.0, where).failing
    assert (failing.node, failing.text.endswith("timed out")) == (2, True), "node 1 has reached it since"


def test_all_that_fail_are_asked_twice_and_named(kept):
    tell(kept, 0, {"waits": True})
    told = [tell(kept, node, unreached(number)) for number in (1, 2) for node in (3, 2, 1)]
    assert told == [ask(2), *[None] * 5]
    failing = kept.tick(120.0, where).failing
    assert failing.node == 1
    assert failing.text.endswith("timed out; nodes 2, 3 can't either")


def test_nodes_wait_once_in_a_generation_and_of_one_node_there_is_no_keeper(kept):
    assert [tell(kept, 0, {"waits": True}) for _ in range(2)] == [ask(1), None]
    assert [ReachKeeper.of(num_nodes) is not None for num_nodes in (2, 1)] == [True, False]


# --- on each node -----------------------------------------------------------------------------------


class Node:
    """A node whose agent runs: its watcher, polled twice a second; all of this process counts as the agent's."""

    def __init__(self, index, port=0, agent=None):
        self.now, self.workers, self.active_at = 500.0, {}, None
        spec = SimpleNamespace(node_index=index)
        here = SimpleNamespace(
            request=SimpleNamespace(spec=spec, main_addr="127.0.0.1"),
            port=port,
            pid=lambda: agent or os.getppid(),
            running=lambda: self.workers,
            active_at=lambda: self.active_at,
        )
        self.watcher = ReachWatcher(here, lambda: self.now)

    def polled(self, seconds, each_s=0.5):
        """Return what it tells in so many seconds, each with the time since the begin."""
        told = []
        for _ in range(int(seconds / each_s)):
            self.now += each_s
            told += [(self.now - 500.0, data)] if (data := self.watcher.poll()) is not None else []
        return told


@pytest.fixture
def store():
    with listening_socket(0) as found:
        yield found.getsockname()[1]


@contextmanager
def stranger():
    """Another process that listens: its pid and its port."""
    code = (
        "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as process:
        yield process.pid, int(process.stdout.readline())
        process.communicate("\n")


def closed_port():
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


def test_the_control_node_tells_once_that_the_store_has_listened_for_long_without_workers(store):
    ((at, data),) = Node(0, store).polled(60)
    assert data == {"waits": True}
    assert 10 < at <= 11
    ((at, data),) = Node(0, store).polled(60, 0.4995)
    assert 10 < at <= 11, "looks that come a bit early"
    assert Node(1, store).polled(60) == [], "the control node alone has the store"
    assert Node(0, closed_port()).polled(60) == []


def test_time_in_which_this_node_was_stopped_is_no_time_of_waiting(store):
    node = Node(0, store)
    assert node.polled(5) == []
    node.now += 900.0
    assert node.polled(4) == []
    assert node.polled(5) != []


def test_a_stranger_who_has_taken_the_port_is_no_store():
    with stranger() as (pid, port), subprocess.Popen(["sleep", "600"]) as agent:
        assert Node(0, port, agent=agent.pid).polled(30) == [], "the agent has not opened it, nor what it has started"
        assert Node(0, port, agent=pid).polled(30) != [], "the agent itself has it"
        agent.kill()
        assert Node(0, port).polled(30) != [], "it is one of ours"


@pytest.mark.parametrize("index", [0, 1])
def test_a_node_that_can_reach_the_store_says_nothing(index, store):
    node = Node(index, store)
    for number in (1, 2):
        node.watcher.asked({"number": number})
    assert [told for told in node.polled(20) if told[1] != {"waits": True}] == []


def test_a_node_tries_for_some_time_and_tells_why_it_was_not_reached(monkeypatch):
    monkeypatch.setattr(watch, "_TRY_S", 1.0)
    port = closed_port()
    node = Node(1, port)
    node.watcher.asked({"number": 1})
    assert node.polled(4) == []
    node.watcher.asked({"number": 2})
    for number in (1, 2):
        told = eventually(node.watcher.poll)
        assert told == {"number": number, "address": "127.0.0.1", "port": port, "why": "Connection refused"}
