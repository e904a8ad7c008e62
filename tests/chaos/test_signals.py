"""One process of a gang gets a signal; every process of every node must go, and all nodes must say which it was."""

from __future__ import annotations

import math
import os
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
    "guardian": "a guardian",
    "task": "a task",
    "control task": "the control task",
}
NODE_1 = f"Node 1 (host {HOST})"
RANK_2 = f"Rank 2 on node 1 (host {HOST})"
SAID = {  # who is hurt, and how: the cause's category and text
    ("worker", signal.SIGKILL): ("killed", f"{RANK_2} was killed by SIGKILL"),
    ("worker", signal.SIGTERM): ("killed", f"{RANK_2} was killed by SIGTERM"),
    ("agent", signal.SIGKILL): ("killed", f"{NODE_1} failed: its torchrun agent was killed by SIGKILL"),
    ("agent", signal.SIGTERM): ("killed", f"{NODE_1} failed: its torchrun agent got SIGTERM"),
    ("guardian", signal.SIGKILL): (
        "killed",
        f"{NODE_1} failed: its guardian process ended unexpectedly, as by SIGKILL",
    ),
    ("guardian", signal.SIGTERM): ("killed", f"{NODE_1} failed: its guardian process"),
    ("task", signal.SIGKILL): ("node_lost", f"{NODE_1} failed: its connection to the control node was closed"),
    ("task", signal.SIGTERM): ("preempted", f"{NODE_1} was preempted: its Metaflow task got SIGTERM"),
    ("control task", signal.SIGKILL): ("node_lost", "Node 0 (the control node) is lost: its connection was closed"),
    ("control task", signal.SIGTERM): (
        "preempted",
        f"Node 0 (host {HOST}) was preempted: its Metaflow task got SIGTERM",
    ),
}


def _first(value: str) -> str:
    return value if value in NAMES else ""


def start(gang: Gang, victim: str, **settings: float) -> int:
    """Start a gang, with three nodes where one can't tell afterwards; return the pid of who is hurt, on node 1."""
    nodes, nproc = (3, 1) if "task" in victim else (2, 2)
    gang.start(nodes, nproc, settings=settings)
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


STOPPED = f"was stopped by a signal (SIGSTOP or the like) and not continued for {HEARTBEAT_S} s"
SILENT = f"nothing arrived from it for {HEARTBEAT_S} s"


@pytest.mark.parametrize(
    ("victim", "category", "said"),
    [
        ("worker", "hang", f"{RANK_2} {STOPPED}"),
        ("agent", "hang", f"{NODE_1} failed: its torchrun agent {STOPPED}"),
        ("task", "node_lost", f"{NODE_1} failed: {SILENT}"),
        ("control task", "node_lost", f"Node 0 (the control node) is lost: {SILENT}"),
    ],
    ids=_first,
)
def test_sigstop(victim, category, said, gang, recorder):
    """The workers of a task that is stopped must go without it: it can't stop them, and nobody else can reach them."""
    pid = start(gang, victim, heartbeat_timeout_s=HEARTBEAT_S)
    # A task holds nothing but itself, stopped as it is; its guardian waits, to remove its folders if it is killed.
    stays = {pid, gang.guardian(rank=0 if "control" in victim else 1)} if "task" in victim else set()
    outcome = gang.await_end(gang.send(pid, signal.SIGSTOP), others(gang, victim), ignore=list(stays))
    recorder.silent(f"SIGSTOP of {NAMES[victim]}", outcome, HEARTBEAT_S)
    assert gang.living() == stays
    assert said in outcome.error["text"]
    assert outcome.error["cause"]["category"] == category


def test_a_stopped_worker_that_goes_on_in_time_is_no_failure(gang, recorder):
    pid = start(gang, "worker", heartbeat_timeout_s=HEARTBEAT_S)
    struck_at = gang.send(pid, signal.SIGSTOP)
    gang.await_age(struck_at, HEARTBEAT_S / 2)
    os.kill(pid, signal.SIGCONT)
    gang.await_age(struck_at, HEARTBEAT_S * 1.5)
    recorder.lasted("SIGSTOP of a worker for half the heartbeat timeout", gang.end_well())


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
    assert f"{NODE_1} failed: its connection to the control node was closed" in outcome.error["text"]
