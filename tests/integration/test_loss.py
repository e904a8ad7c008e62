"""A launch goes on after the loss of a node: with a spare, or with fewer nodes."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

import psutil
import pytest
from flow_runs import supervisor


@dataclass(frozen=True)
class Case:
    """What becomes of some of four nodes, of which one may be a spare."""

    spares: int = 1
    ranks: tuple[int, ...] = (1,)  # whose nodes are lost
    number: signal.Signals = signal.SIGKILL
    with_supervisor: bool = False
    do: str = "*:hold,*:wait"
    stand_in: bool = True


CASES = {
    "a spare": Case(do="*:hold,*:add-up,*:wait", stand_in=False),
    "a spare while rank 1 saves": Case(do="*:hold,1:ignore-sigterm,*:wait"),  # it lives until its grace is over
    "a spare for a task and its supervisor": Case(with_supervisor=True),
    "told to end": Case(ranks=(2,), number=signal.SIGTERM),
    "fewer": Case(spares=0, ranks=(1, 2)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_others_go_on(start_flow, name):
    """Which of the nodes is the spare is as it happens."""
    case = CASES[name]
    attrs = {"max_restarts": 3, "spare_nodes": case.spares, "min_nodes": 2, "grace_s": 5}
    flow = start_flow("--nodes", "4", attrs=attrs, do=case.do, stand_in=case.stand_in)
    began = flow.await_notes("worker-launch0-0-*", 4 - case.spares)
    node_of = {int(each["env"]["RANK"]): int(each["env"]["MF_PARALLEL_NODE_INDEX"]) for each in began}
    lost = sorted(node_of[rank] for rank in case.ranks)
    came = sorted({*range(4)} - {*node_of.values()})
    joined = sorted({*range(4)} - {*lost})
    for node in lost:
        task = psutil.Process(flow.note(f"task-{node}")["pid"])
        for process in [*([supervisor(flow, task.pid)] if case.with_supervisor else []), task]:
            process.send_signal(case.number)
    flow.await_notes("worker-launch0-[1-9]-*", len(joined))
    for generation in (1, 2):  # on a busy machine, of two nodes the second may be lost a restart later
        (flow.out / f"go-launch0-{generation}").touch()
    assert flow.wait() == 0, flow.text
    flow.await_gone()
    tasks = flow.note("end")["tasks"]
    assert [task["node"] for task in tasks] == joined
    for result in (task["results"][0] for task in tasks):
        assert (result["nodes"], result["world_size"]) == (joined, len(joined))
        for what, expected in (("left", lost), ("came", came)):
            assert sorted(node for restart in result["restarts"] for node in restart[what]) == expected
    last = len(tasks[0]["results"][0]["restarts"])
    workers = [each["env"] for each in flow.notes(f"worker-launch0-{last}-*")]
    names = ("RANK", "GROUP_RANK", "WORLD_SIZE", "GROUP_WORLD_SIZE")
    size = str(len(joined))
    assert [[env[name] for name in names] for env in workers] == [
        [str(rank), str(rank), size, size] for rank in range(len(joined))
    ]
    if not case.stand_in:
        assert flow.notes(f"added-launch0-{last}-*") == [len(joined)] * len(joined)
    assert not flow.notes("twice-*"), "no rank lives twice"
    raised = ["TorchrunPreempted"] if case.number == signal.SIGTERM else []
    assert [error["class"] for error in flow.errors()] == raised
    if case.spares:
        assert f"node {came[0]}, a spare, takes the place of node {lost[0]}" in flow.text
    else:
        assert re.search(r"the launch goes on without nodes? .*on 2 nodes", flow.text), flow.text


def test_a_node_that_ends_badly_after_its_step_fails_the_run(start_flow):
    """Also one that has taken part after another was lost, which is none's failure."""
    attrs = {"max_restarts": 1, "min_nodes": 2}
    flow = start_flow("--nodes", "3", hook="after:2:exit", attrs=attrs, do="*:wait", stand_in=True)
    flow.await_notes("worker-launch0-0-*", 3)
    psutil.Process(flow.note("task-1")["pid"]).kill()
    flow.await_notes("worker-launch0-1-*", 2)
    for generation in (0, 1):
        (flow.out / f"go-launch0-{generation}").touch()
    assert flow.wait() == 1
    assert "Subprocess failed, return code" in flow.text
    assert not (flow.out / "end").exists()
    flow.await_gone()


def test_nodes_that_are_not_needed_leave_when_the_first_launch_has_ended_well(run_flow):
    attrs = {"max_restarts": 1, "spare_nodes": 2}
    flow = run_flow("--nodes", "4", attrs=attrs, runs_=[{"entrypoint": "worker.py"}] * 2, stand_in=True)
    tasks = flow.note("end")["tasks"]
    took_part = [task["node"] for task in tasks]
    assert (len(took_part), took_part[0]) == (2, 0)
    assert [result["nodes"] for task in tasks for result in task["results"]] == [took_part] * 4
    leaving = sorted({*range(4)} - {*took_part})
    said = "node {} leaves: launch 0 has ended well without it"
    assert [flow.text.count(said.format(node)) for node in leaving] == [1, 1], flow.text
