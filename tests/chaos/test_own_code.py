"""What a step's own code does, outside of `run`: it ends too early or too late, forks, and sets signals."""

from __future__ import annotations

import math
import signal
import socket
import time
from contextlib import suppress
from os import kill

from limits import limit_s

HOST = socket.gethostname()
HEARTBEAT_S = math.ceil(limit_s(2))


def test_a_control_node_that_calls_run_less_often(gang, recorder):
    told = ["env", "METAFLOW_TORCHRUN_DEBUG=1"]  # or a node does not say that it calls run
    gang.start(3, launches={0: 0, 1: 1, 2: 1}, wrap={1: told, 2: told})
    gang.await_steps()
    gang.await_that(lambda: all("processes per node" in gang.log(node) for node in (1, 2)), "the others' calls of run")
    outcome = gang.await_end(gang.end_steps(), gang.processes)
    recorder.died("the control node calls run less often than the others", outcome)
    assert "the step's code has already ended on node 0. Every node must call" in outcome.error["text"]


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
    assert f"Node 1 (host {HOST}) failed: its task " in outcome.error["text"]


def test_one_call_that_keeps_the_interpreter_for_longer_than_a_node_may_be_silent(gang, recorder):
    """As unpickling, sorting, or a regular expression can: on both nodes, before a launch and between two."""
    gang.start(
        launches=2, own_code=dict.fromkeys(range(2), "one long call"), settings={"heartbeat_timeout_s": HEARTBEAT_S}
    )
    gang.await_steps()
    assert all(gang.note(f"step-{node}.json")["seconds"] > 2 * HEARTBEAT_S for node in range(2))
    gang.begin_launch(1)
    recorder.lasted("calls that keep the interpreter for twice the heartbeat timeout", gang.end_well())


def test_a_failure_elsewhere_meets_a_node_in_such_a_call(gang, recorder):
    """All others end at once; the node in the call when the call returns."""
    gang.start(3, launches=0, own_code={0: "wait", 1: "a call of 15 s", 2: "wait"})
    gang.await_steps()
    gang.await_note("calls-1.json")
    gang.await_age(time.monotonic(), 0.5)
    struck_at = gang.send(gang.task(2), signal.SIGKILL)
    gang.await_that(lambda: gang.error(0), "the error of node 0")
    assert gang.error(1) is None, "its call has not returned"
    outcome = gang.await_end(struck_at, [0, 1])
    recorder.silent("SIGKILL of a task while another keeps its interpreter for 15 s", outcome, 15)
    assert f"Node 2 (host {HOST}) failed: its task " in outcome.error["text"]
