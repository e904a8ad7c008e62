"""One process of a gang gets a signal; every process of every node must go, and all nodes must say which it was."""

from __future__ import annotations

import math
import os
import re
import signal
import socket
import time

import pytest
from gangs import Gang
from limits import limit_s

# Silence is declared after so long in these tests; where a process dies, nobody may wait for silence.
HEARTBEAT_S = math.ceil(limit_s(2))
HOST = socket.gethostname()
NAMES = {
    "worker": "a worker",
    "agent": "an agent",
    "task": "a task",
    "control task": "the control task",
}
# Who reaps a dead task first is also who can read its signal.
KILLED = re.compile("(was killed by SIGKILL|ended unexpectedly)")
NODE_1 = f"Node 1 (host {HOST})"
RANK_2 = f"Rank 2 on node 1 (host {HOST})"
SAID = {  # who is hurt, and how: the cause's category and text
    ("worker", signal.SIGKILL): ("killed", f"{RANK_2} was killed by SIGKILL"),
    ("worker", signal.SIGTERM): ("killed", f"{RANK_2} was killed by SIGTERM"),
    ("agent", signal.SIGKILL): ("killed", f"{NODE_1} failed: its torchrun agent was killed by SIGKILL"),
    ("agent", signal.SIGTERM): ("killed", f"{NODE_1} failed: its torchrun agent got SIGTERM"),
    ("task", signal.SIGKILL): ("node_lost", f"{NODE_1} failed: its task "),
    ("task", signal.SIGTERM): ("preempted", f"{NODE_1} was preempted: its Metaflow task got SIGTERM"),
    ("control task", signal.SIGKILL): ("node_lost", f"Node 0 (host {HOST}) failed: its task "),
    ("control task", signal.SIGTERM): (
        "preempted",
        f"Node 0 (host {HOST}) was preempted: its Metaflow task got SIGTERM",
    ),
}


def start(gang: Gang, victim: str) -> int:
    """Start a gang, with three nodes where one can't tell afterwards; return the pid of who is hurt, on node 1."""
    nodes, nproc = (3, 1) if "task" in victim else (2, 2)
    gang.start(nodes, nproc)
    gang.await_workers()
    if "task" in victim:
        return gang.task(0 if "control" in victim else 1)
    return int(getattr(gang, victim)(rank=nproc))


def others(gang: Gang, victim: str) -> list[int]:
    """Return the nodes whose task is not the victim."""
    gone = {"task": 1, "control task": 0}.get(victim)
    return [node for node in gang.processes if node != gone]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
@pytest.mark.parametrize("victim", NAMES)
def test_a_process_that_gets(number, victim, gang, recorder):
    pid = start(gang, victim)
    survivors = others(gang, victim) if number == signal.SIGKILL else gang.processes
    outcome = gang.await_end(gang.send(pid, number), survivors)
    recorder.died(f"{number.name} of {NAMES[victim]}", outcome)
    category, said = SAID[victim, number]
    assert said in outcome.error["text"]
    assert outcome.error["cause"]["category"] == category
    if "task" in victim and number == signal.SIGKILL:
        assert KILLED.search(outcome.error["text"])


@pytest.mark.parametrize("node", [1, 0])
def test_sigkill_of_a_supervisor(node, gang, recorder):
    """Its own node says so itself; the others see that it is gone."""
    gang.start(3, 1)
    gang.await_workers()
    others = [each for each in range(3) if each != node]
    outcome = gang.await_end(gang.send(gang.supervisor(node), signal.SIGKILL), others, leaves_folders=True)
    recorder.died(f"SIGKILL of the supervisor of {'a node' if node else 'the control node'}", outcome)
    lost = "Node 0 (the control node) is lost" if node == 0 else f"{NODE_1} failed"
    assert f"{lost}: its connection " in outcome.error["text"]
    own = gang.error(node)
    assert f"Node {node} (host {HOST}) failed: its supervisor process (pid " in own["text"]
    assert own["cause"]["category"] == "killed"


def test_sigkill_of_all_that_is_ours(gang, recorder):
    """The kernel tells the agent, which stops its workers."""
    gang.start(2, 2)
    gang.await_workers()
    supervisor, between = gang.supervisor(1), gang.between(1)
    gang.send(between, signal.SIGKILL)
    outcome = gang.await_end(gang.send(supervisor, signal.SIGKILL), [0], leaves_folders=True)
    recorder.died("SIGKILL of a supervisor and its parent", outcome)
    assert f"{NODE_1} failed: its connection to the control node was closed" in outcome.error["text"]


def test_everything_is_stopped_for_longer_than_the_heartbeat_timeout(gang, recorder):
    """As by Ctrl-Z, `docker pause`, a freezer or a live migration: nobody was silent for anybody who was awake."""
    gang.start(3, settings={"heartbeat_timeout_s": HEARTBEAT_S})
    gang.await_workers()
    everything = gang.living()
    for pid in everything:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(2 * HEARTBEAT_S)
    for pid in everything:
        os.kill(pid, signal.SIGCONT)
    recorder.lasted("SIGSTOP of everything for twice the heartbeat timeout", gang.end_well())


def test_sigkill_of_a_task_whose_child_lives_on(gang, recorder):
    """A child that the step has forked, for its data say, holds open whatever the task had open."""
    gang.start(3, 1, step={1: "fork-when-told"})
    gang.await_workers()
    (gang.out / "fork").touch()
    child = gang.await_note("forked-1")
    outcome = gang.await_end(gang.send(gang.task(1), signal.SIGKILL), [0, 2], ignore=[child])
    recorder.died("SIGKILL of a task whose forked child lives on", outcome)
    assert gang.living() == {child}  # it is the step's own
    assert f"{NODE_1} failed: its task " in outcome.error["text"]
