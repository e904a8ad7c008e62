"""What a step's own code does, outside of `run`: it ends too early or too late, forks, and sets signals."""

from __future__ import annotations

import signal
import socket
from contextlib import suppress
from os import kill

HOST = socket.gethostname()


def test_a_control_node_that_calls_run_less_often(gang, recorder):
    told = ["env", "METAFLOW_TORCHRUN_DEBUG=1"]  # or a node does not say that it calls run
    gang.start(3, launches={0: 0, 1: 1, 2: 1}, wrap={1: told, 2: told})
    gang.await_steps()
    gang.await_that(lambda: all("processes per node" in gang.log(node) for node in (1, 2)), "the others' calls of run")
    outcome = gang.await_end(gang.end_steps(), gang.processes)
    recorder.died("the control node calls run less often than the others", outcome)
    assert "the step's code has already ended on node 0. Every node must call" in outcome.error["text"]


def test_a_failure_after_the_steps_code(gang, recorder):
    gang.start(launches=0, fails_late=[1])
    gang.await_steps()
    gang.end_steps()
    gang.await_that(lambda: gang.error(1), "the failure")
    outcome = gang.await_end(gang.note("node-1.json")["failed_at"], [0])
    recorder.died("a task fails after its step's code", outcome)
    assert f"Node 1 (host {HOST}) failed with ValueError: the results can't be stored" in outcome.error["text"]


def test_a_task_whose_child_lives_on(gang, recorder):
    """The control node's step sleeps meanwhile, has used a pool, and has set SIGTERM back to its default."""
    gang.start(launches=0, own_code=dict.fromkeys(range(2), "use processes"))
    gang.await_steps()
    children = [gang.note(f"step-{node}.json")["child"] for node in range(2)]
    struck_at = gang.send(gang.task(1), signal.SIGKILL)
    outcome = gang.await_end(struck_at, [0], ignore=children)
    for child in children:
        with suppress(ProcessLookupError):
            kill(child, signal.SIGKILL)
    recorder.died("SIGKILL of a task with a forked child; the other's step sleeps and ignores SIGTERM", outcome)
    assert f"Node 1 (host {HOST}) failed: its connection to the control node was closed" in outcome.error["text"]
