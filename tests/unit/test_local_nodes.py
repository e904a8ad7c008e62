"""Which of the control task's children are its nodes' tasks, and what becomes of them; whom no task outlives."""

import asyncio
import os
import queue
import signal
import subprocess
import sys

import pytest
from limits import limit_s
from loops import Loop
from unit_helpers import HANG_S, is_running

from metaflow_extensions.torchrun.plugins.torchrun.gang.view import Presence
from metaflow_extensions.torchrun.plugins.torchrun.machine.processes import Other
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.ends import end_of
from metaflow_extensions.torchrun.plugins.torchrun.task import local_nodes
from metaflow_extensions.torchrun.plugins.torchrun.task.local_nodes import LocalNodes

RUN, CONTROL = "1700000000000001", "3"
SLEEP = "import time; print(flush=True); time.sleep(600)"


@pytest.fixture
def start():
    """Return a function that starts a child and waits until its program runs."""
    started = []

    def start(*words, code=SLEEP, **options):
        child = subprocess.Popen([sys.executable, "-I", "-S", "-c", code, *words], stdout=subprocess.PIPE, **options)
        started.append(child)
        child.stdout.readline()
        return child

    yield start
    for child in started:
        child.kill()
        child.wait()
        child.stdout.close()


def task(node, run=RUN, control=CONTROL):
    """Return the part of the command line that Metaflow 2.19 gives a node's task."""
    options = ["--run-id", run, "--task-id", f"{control}_node_{node}", "--input-paths", f"{run}/start/1"]
    return ["flow.py", "--quiet", "step", "train", *options, "--split-index", str(node), "--ubf-context", "ubf_task"]


LOOK_ALIKES = [
    ["flow.py", "card", "create", f"{RUN}/train/{CONTROL}_node_1", "--type", "default"],
    ["flow.py", "step", "train", "--run-id", RUN, "--task-id", CONTROL],  # the control task's own
    task(1, control="4"),  # another gang's
    task(1, run="1700000000000002"),
    task(9),  # a node too many
]


def ends(nodes):
    """Watch as a supervisor does, and return the queue of what is told."""
    told, loop = queue.SimpleQueue(), Loop()

    async def await_end(node, process):
        told.put((node, f"its task {await end_of(Other(process.pid, process.began))}"))

    for ended in nodes.ended().items():
        told.put(ended)
    waiting = [await_end(*each) for each in nodes.tasks().items()]
    told_of.append([asyncio.run_coroutine_threadsafe(each, loop.loop) for each in waiting])
    return told


told_of = []  # or the tasks of the loops, which asyncio holds weakly, could vanish


def test_only_a_nodes_task_is_watched_and_stopped(start, monkeypatch):
    monkeypatch.setenv("MF_PARALLEL_NODE_INDEX", "1")  # as Metaflow has it while it starts node 1
    others = [start(*words) for words in LOOK_ALIKES]
    nodes = LocalNodes(RUN, CONTROL, 3)
    first, second = start(*task(1)), start(*task(2))
    told = ends(nodes)
    for other in others[:2]:
        other.send_signal(signal.SIGTERM)
        other.wait()
    second.terminate()
    node, reason = told.get(timeout=limit_s(HANG_S))
    assert node == 2
    assert reason.startswith("its task was killed by SIGTERM")
    nodes.stop(0.3, {1: Presence.GONE, 2: Presence.GONE})
    assert told.get(timeout=limit_s(HANG_S))[0] == 1
    assert first.wait() == -signal.SIGKILL
    assert [is_running(other.pid) for other in others] == [False, False, True, True, True]


def test_a_node_below_another_child_is_not_ours(start):
    command = ["/bin/sh", "-c", "echo; sleep 600", *task(1)]
    parent = start(code=f"import subprocess; subprocess.run({command!r})", start_new_session=True)
    ended = start(code="print(flush=True)")  # the task that ends at once
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # and that nobody has reaped
    nodes = LocalNodes(RUN, CONTROL, 2)
    assert ends(nodes).get(timeout=limit_s(HANG_S)) == (1, "its task ended at once, before it joined")
    nodes.stop(0.3, {1: Presence.ABSENT})
    assert parent.poll() is None
    os.killpg(parent.pid, signal.SIGKILL)


def test_a_node_that_did_not_join_gets_sigterm_and_the_others_their_time(start, monkeypatch):
    monkeypatch.setattr(local_nodes, "_SLOW_LATECOMER_S", 0.3)
    saves = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(5)); " + SLEEP
    late = start(*task(1), code=saves)
    ending = start(*task(2), code="import time; print(flush=True); time.sleep(0.5)")
    LocalNodes(RUN, CONTROL, 3).stop(3600.0, {1: Presence.ABSENT, 2: Presence.HERE})
    assert (late.wait(), ending.wait()) == (5, 0)


def test_a_node_that_writes_its_last_lines_has_its_time_after_one_that_is_lost(start, monkeypatch):
    """The lost one may hold the turn until it is killed."""
    lost, writing = start(*task(1)), start(*task(2), code="import time; print(flush=True); time.sleep(1.5)")
    monkeypatch.setattr(local_nodes, "has_unread", lambda: is_running(writing.pid))
    LocalNodes(RUN, CONTROL, 3).stop(0.5, {1: Presence.OUT, 2: Presence.GONE})
    assert (lost.wait(), writing.wait()) == (-signal.SIGKILL, 0)
