"""A node is lost while its workers train, and the launch goes on: with a spare or with fewer nodes."""

from __future__ import annotations

import re
import signal
import socket
import time
from dataclasses import dataclass
from typing import Any

import psutil
import pytest
from flow_runs import FlowRun, supervisor
from gangs import Outcome

HOST = re.escape(socket.gethostname())
# Who reaps a dead task first is also who can read its signal. Without a supervisor it is the connection that ends first.
KILLED = "its task (was killed by SIGKILL|ended unexpectedly, as by SIGKILL).*"
CLOSED = "its connection to the control node was closed: its supervisor process or its machine is gone"
BECAUSE = rf"because node LOST \(host {HOST}\) failed: ({KILLED}|{CLOSED})"


@dataclass(frozen=True)
class Case:
    """A launch on three nodes and what becomes of it."""

    name: str  # in the table
    spares: int
    said: str  # a pattern, with the nodes' names LOST and SPARE
    with_supervisor: bool = False
    do: str = "*:hold,*:wait"


RESTART = rf"restart 1 of 2: all workers start again, {BECAUSE}\n"
SPARE = f"{RESTART}(.*\n)*.*node SPARE, a spare, takes the place of node LOST"
FEWER = f"{RESTART}(.*\n)*.*the launch goes on without node LOST, on 2 nodes"
SAVES = "*:hold,1:ignore-sigterm,*:wait"  # rank 1 lives until its grace is over
CASES = [
    Case("SIGKILL of a task; a spare comes", 1, SPARE),
    Case("SIGKILL of a task whose worker saves; a spare comes", 1, SPARE, do=SAVES),
    Case("SIGKILL of a task; two nodes go on", 0, FEWER),
    Case("SIGKILL of a task and its supervisor; a spare comes", 1, SPARE, True),
]


def lose(flow: FlowRun, node: int, with_supervisor: bool) -> None:
    task = psutil.Process(flow.note(f"task-{node}")["pid"])
    doomed = [supervisor(flow, task.pid)] if with_supervisor else []
    for process in [*doomed, task]:
        process.send_signal(signal.SIGKILL)


def check_result(task: dict[str, Any], nodes: list[int], lost: int, came: list[int]) -> None:
    (result,) = task["results"]
    assert (result["nodes"], result["world_size"]) == (nodes, len(nodes))
    assert [(each["left"], each["came"]) for each in result["restarts"]][-1] == ([lost], came)


def ranks(flow: FlowRun, generation: int) -> list[int]:
    pattern = f"worker-launch0-{generation}-*"
    return sorted(int(note["env"]["RANK"]) for note in flow.notes(pattern))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_launch_goes_on_after(case: Case, start_flow, recorder):
    attrs = {"max_restarts": 2, "spare_nodes": case.spares, "min_nodes": 2, "grace_s": 5}
    nodes = ("--nodes", str(3 + case.spares))
    flow = start_flow(*nodes, attrs=attrs, do=case.do, stand_in=True)
    begun_with = [int(note["env"]["MF_PARALLEL_NODE_INDEX"]) for note in flow.await_notes("worker-launch0-0-*", 3)]
    lost = sorted(begun_with)[1]
    came = [node for node in range(3 + case.spares) if node not in begun_with]
    joined = sorted({*begun_with, *came} - {lost})
    begun = time.monotonic()
    lose(flow, lost, case.with_supervisor)
    flow.await_notes("worker-launch0-1-*", len(joined))
    (flow.out / "go-launch0-1").touch()
    assert flow.wait() == 0, flow.text
    flow.await_gone()
    recorder.lasted(case.name, Outcome(time.monotonic() - begun, {}, [], 0))
    said = case.said.replace("LOST", str(lost)).replace("SPARE", "".join(map(str, came)))
    assert re.search(said, flow.text), flow.text
    tasks = flow.note("end")["tasks"]
    assert [task["node"] for task in tasks] == joined
    for task in tasks:
        check_result(task, joined, lost, came)
    assert [ranks(flow, generation) for generation in (0, 1, 2)] == [[0, 1, 2], [*range(len(joined))], []]
    assert not flow.notes("twice-*")
