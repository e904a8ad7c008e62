"""A launch of two nodes, as threads of this process with a real channel, that ends in a way that nobody planned."""

import os
import queue
import signal
import sys
import threading
import time

import pytest
from unit_helpers import eventually

from metaflow_extensions.torchrun.plugins.torchrun import joining
from metaflow_extensions.torchrun.plugins.torchrun.devices import Machine
from metaflow_extensions.torchrun.plugins.torchrun.errors import GangError, LaunchFailed
from metaflow_extensions.torchrun.plugins.torchrun.executor import Context, TorchrunExecutor
from metaflow_extensions.torchrun.plugins.torchrun.launch_spec import LaunchSpec
from metaflow_extensions.torchrun.plugins.torchrun.policy import LaunchPolicy
from metaflow_extensions.torchrun.plugins.torchrun.settings import DEFAULTS, parse_settings
from metaflow_extensions.torchrun.plugins.torchrun.supervisor import Supervisor

SETTINGS = parse_settings({**DEFAULTS, "grace_s": 1}, "train")
AGENT = f"""#!{sys.executable} -IS
import os, sys, time
node = [arg for arg in sys.argv if arg.startswith("--node-rank=")][0].split("=")[1]
open(sys.argv[-1] + node, "w").close()
while not os.path.exists(sys.argv[-1] + ".end"):
    time.sleep(0.01)
"""


class Book:
    """An address book in memory."""

    def __init__(self):
        self._addresses = queue.Queue()

    def publish(self, address, patience_s):
        self._addresses.put(address)

    def look_up(self, timeout_s, all_s, wait):
        return self._addresses.get(timeout=timeout_s)


class Node:
    """One node of a gang of two."""

    def __init__(self, number, book, folder):
        self.number, self.script, self.started = number, folder / "script", folder / f"script{number}"
        self.said = []
        emit = lambda event: self.said.append(event.text)  # noqa: E731
        if number == 0:
            self.seat, _ = joining.join_as_control(book, 2, "", SETTINGS, emit, True)
        else:
            self.seat, _ = joining.join_as_member(book, 1, 2, SETTINGS, emit)
        self.agent = folder / "agent"
        self.agent.write_text(AGENT)
        self.agent.chmod(0o755)

    def run(self, **more):
        own = {"nproc": 1, "num_nodes": 2, "node_index": self.number, "python": str(self.agent), **more}
        spec = LaunchSpec(str(self.script), (), False, **own)
        supervisor = Supervisor(
            spec, self.seat, "127.0.0.1", Machine(1), LaunchPolicy(max_restarts=3), 1.0, 30.0, {}, lambda *_: None
        )
        return supervisor.run()

    def end(self):
        """Let the agents of both nodes end."""
        self.script.with_name("script.end").touch()


class Call(threading.Thread):
    """A call of `run` in a thread of its own, and what comes of it."""

    def __init__(self, node, **more):
        super().__init__(daemon=True)
        self._node, self._more, self.came = node, more, queue.Queue()
        self.start()

    def run(self):
        try:
            self.came.put(self._node.run(**self._more))
        except BaseException as error:
            self.came.put(error)

    def outcome(self, deadline_s=20):
        return self.came.get(timeout=deadline_s)


@pytest.fixture
def nodes(tmp_path):
    book = Book()
    made = [Node(number, book, tmp_path) for number in range(2)]
    yield made
    for node in reversed(made):
        node.seat.leave()


def test_what_is_no_oserror_between_ready_and_the_start_is_told_to_all(nodes, tmp_path):
    calls = [Call(nodes[0]), Call(nodes[1], log_dir=f"{tmp_path}/a\0b")]
    errors = [call.outcome() for call in calls]
    assert all(isinstance(error, LaunchFailed) for error in errors), errors
    assert str(errors[0]) == str(errors[1])
    assert "its torchrun agent could not be started: ValueError: " in str(errors[0])


@pytest.mark.parametrize("moment", ["before go", "after go"])
def test_an_error_of_a_nodes_own_ends_the_launch_for_all_at_once(moment, nodes):
    first = Call(nodes[0]) if moment == "after go" else None
    second = Call(nodes[1])
    eventually(lambda: nodes[1].seat.is_in_launch and (first is None or nodes[1].started.exists()))
    nodes[1].seat.inbox.put({"type": "go"})  # no message of ours
    assert isinstance(second.outcome(), KeyError)
    error = (first or Call(nodes[0])).outcome()
    assert isinstance(error, LaunchFailed)
    assert "node 1" in str(error).lower()
    assert "failed with KeyError: 'generation'" in str(error)


def test_a_second_call_in_another_thread_is_an_error_and_the_first_is_unharmed(nodes):
    calls = [Call(node) for node in nodes]
    eventually(lambda: all(node.started.exists() for node in nodes))
    error = Call(nodes[0]).outcome()
    assert isinstance(error, GangError)
    assert "while launch 0 still ran there, in another thread" in str(error)
    nodes[0].end()
    assert [call.outcome().launch for call in calls] == [0, 0]
    assert [call.outcome().launch for call in [Call(node) for node in nodes]] == [1, 1]


def test_a_call_in_a_forked_child_is_an_error(nodes):
    mine, its = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        try:
            TorchrunExecutor(Context(nodes[0].seat, "127.0.0.1", Machine(1), SETTINGS)).run("script.py")
        except GangError as error:
            os.write(its, str(error).encode())
        os._exit(0)
    os.close(its)
    with os.fdopen(mine) as answer:
        assert "was forked from the task" in answer.read()
    os.waitpid(pid, 0)


def test_waiting_for_the_control_node_is_told_now_and_then(monkeypatch):
    monkeypatch.setattr(joining, "QUIET_S", 0.1)
    monkeypatch.setattr(joining, "REMIND_S", 0.1)
    said = []

    class Late(Book):
        def look_up(self, timeout_s, all_s, wait):
            deadline = time.monotonic() + 10
            while len(said) < 2 and time.monotonic() < deadline:
                wait(0.02)
            raise GangError("nobody came")

    with pytest.raises(GangError):
        joining.join_as_member(Late(), 1, 2, SETTINGS, lambda event: said.append(event.text))
    assert said == ["waits for node 0 (the control node) to start"] * 2
