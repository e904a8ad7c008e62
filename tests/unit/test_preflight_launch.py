"""The preflight as a launch of its own, before the first of the user's."""

import os

import pytest
from recorded_calls import recorded_calls

from metaflow_extensions.torchrun.plugins.torchrun import errors, executor
from metaflow_extensions.torchrun.plugins.torchrun.features.preflight.feature import SCRIPT, Preflight
from metaflow_extensions.torchrun.plugins.torchrun.launch.spec import LaunchSpec
from metaflow_extensions.torchrun.plugins.torchrun.node.preludes import own_launch


def test_the_preflight_runs_where_the_script_will():
    same = {"nproc": 4, "num_nodes": 3, "node_index": 1, "python": "/usr/bin/python3", "master_port": 29500}
    same |= {"env": (("NCCL_SOCKET_IFNAME", "eth1"),), "cwd": "/somewhere"}
    own = {"options": (("role", "x"),), "shown_local_ranks": frozenset({1}), "max_restarts": 3, "min_nodes": 2}
    found = own_launch(LaunchSpec("train", ("--lr", "1"), module=True, **same, **own), SCRIPT)
    assert found == LaunchSpec(SCRIPT, (), module=False, **same)
    assert os.path.isfile(SCRIPT)


@pytest.fixture
def calls(monkeypatch, tmp_path):
    found = recorded_calls(monkeypatch, tmp_path, (Preflight(),))
    monkeypatch.setattr(executor, "node_facts", lambda spec, machine: {"contents": spec.entrypoint})
    return found


def scripts(calls):
    return [os.path.basename(plan.spec.entrypoint) for plan in calls.plans]


PREFLIGHT, TRAIN = os.path.basename(SCRIPT), "train.py"


@pytest.mark.parametrize(
    ("wanted", "num_nodes", "nproc", "first", "said"),
    [
        (True, 2, 2, [PREFLIGHT], "between 4 ranks"),
        (True, 1, 2, [PREFLIGHT], "between 2 ranks"),
        (True, 1, 1, [], "nothing to measure"),
        (False, 2, 2, [], None),
    ],
    ids=["two nodes", "one node", "one rank", "not wanted"],
)
def test_it_comes_before_the_first_launch_only(wanted, num_nodes, nproc, first, said, calls):
    step, events = calls.step_of({"preflight": wanted}, num_nodes=num_nodes)
    for _ in range(2):
        step.run(TRAIN, nproc_per_node=nproc)
    assert scripts(calls) == [*first, TRAIN, TRAIN]
    goes_on = [plan.goes_on for plan in calls.plans]
    assert goes_on == [*[False] * len(first), bool(first), False], "its events are those of the call that has made it"
    lines = [event.text for event in events if event.text.startswith("preflight: ")]
    assert [said in line for line in lines] == [True] * wanted


def test_it_restarts_nothing_and_has_no_limits_of_the_script(calls):
    step, _ = calls.step_of({"preflight": True, "max_restarts": 2, "preemption_signal": "SIGUSR1"})
    step.run(TRAIN, timeout_s=5)
    own, then = calls.plans
    assert (own.spec.max_restarts, own.policy.max_restarts, own.policy.timeout_s, own.policy.features) == (
        0,
        0,
        None,
        {},
    )
    assert own.policy.preemption_signal == then.policy.preemption_signal
    assert (then.spec.max_restarts, then.policy.max_restarts, then.policy.timeout_s) == (2, 2, 5)
    assert own.facts["contents"] == then.spec.entrypoint, "nodes with another script must be refused before it"


@pytest.mark.parametrize("kind", [errors.LaunchFailed, errors.LaunchTimeout])
def test_its_failure_is_the_gangs_verdict_under_another_name_and_it_is_repeated(kind, calls):
    verdict = kind("Node 2 broke.", {"node": 2})
    verdict.events = [{"kind": "lost"}]
    calls.outcomes.append(verdict)
    step, _ = calls.step_of({"preflight": True})
    with pytest.raises(kind, match=r"^The preflight failed[^\n]*\nNode 2 broke\.") as caught:
        step.run(TRAIN)
    assert (type(caught.value), caught.value.cause, caught.value.events) == (kind, {"node": 2}, verdict.events)
    assert caught.value.__cause__ is verdict, "the member knows the gang's verdicts by identity, also when chained"
    step.run(TRAIN)
    assert scripts(calls) == [PREFLIGHT, PREFLIGHT, TRAIN]


@pytest.mark.parametrize("error", [errors.TorchrunPreempted("told to stop"), errors.GangError("the nodes differ")])
def test_what_is_no_failure_of_its_own_keeps_its_words(error, calls):
    calls.outcomes.append(error)
    step, _ = calls.step_of({"preflight": True})
    with pytest.raises(type(error)) as caught:
        step.run(TRAIN)
    assert caught.value is error
