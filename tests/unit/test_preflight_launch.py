"""The preflight as a launch of its own, before the first of the user's."""

import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from unit_helpers import write

from metaflow_extensions.torchrun.plugins.torchrun import executor
from metaflow_extensions.torchrun.plugins.torchrun.errors import (
    GangError,
    LaunchFailed,
    LaunchTimeout,
    TorchrunPreempted,
)
from metaflow_extensions.torchrun.plugins.torchrun.executor import Context, TorchrunExecutor
from metaflow_extensions.torchrun.plugins.torchrun.features.preflight.feature import SCRIPT, Preflight
from metaflow_extensions.torchrun.plugins.torchrun.launch.spec import LaunchSpec
from metaflow_extensions.torchrun.plugins.torchrun.machine.accelerators import Machine
from metaflow_extensions.torchrun.plugins.torchrun.node.preludes import own_launch
from metaflow_extensions.torchrun.plugins.torchrun.settings import parse_settings

# --- the launch of its own ------------------------------------------------------------------------


def test_the_preflight_runs_where_the_script_will():
    same = {"nproc": 4, "num_nodes": 3, "node_index": 1, "python": "/usr/bin/python3", "master_port": 29500}
    same |= {"env": (("NCCL_SOCKET_IFNAME", "eth1"),), "cwd": "/somewhere"}
    own = {"options": (("role", "x"),), "shown_local_ranks": frozenset({1}), "max_restarts": 3, "min_nodes": 2}
    spec = LaunchSpec("train", ("--lr", "1"), module=True, **same, **own)
    found = own_launch(spec, SCRIPT)
    assert found == LaunchSpec(found.entrypoint, (), module=False, **same)
    assert Path(found.entrypoint).name == "preflight_worker.py"
    assert Path(found.entrypoint).is_file()


class Step:
    """A node's step whose launches are only noted, or fail as the test says."""

    def __init__(self, tmp_path, monkeypatch, num_nodes=2, preflight=True, fail=None):
        self.launches, self.goes_on = [], []
        self.events = []
        self.fail = fail
        self.script = str(write(tmp_path / "train.py", "pass"))
        monkeypatch.setattr(executor, "Supervisor", self.launch)
        monkeypatch.setattr(executor, "node_facts", lambda spec, machine: {"contents": spec.entrypoint})
        monkeypatch.setattr(executor, "_warned", set())
        member = SimpleNamespace(num_nodes=num_nodes, node=0, refuse_in_child=lambda: None, emit=self.events.append)
        settings = parse_settings({"preflight": preflight, "max_restarts": 2, "preemption_signal": "SIGUSR1"}, "train")
        context = Context(member, "10.0.0.1", Machine(2), settings, features=(Preflight(),))
        self.executor = TorchrunExecutor(context)

    def launch(self, plan, member):
        self.launches.append((plan.spec, plan.policy, plan.facts))
        self.goes_on.append(plan.goes_on)
        return SimpleNamespace(run=self.end, told={})

    def end(self):
        if self.fail is not None:
            raise self.fail
        return len(self.launches)

    def run(self, **options):
        return self.executor.run(self.script, **{"nproc_per_node": 2, **options})

    @property
    def scripts(self):
        return [os.path.basename(spec.entrypoint) for spec, _, _ in self.launches]

    @property
    def notes(self):
        return [event.text for event in self.events if event.kind == "note"]


@pytest.fixture
def make_step(tmp_path, monkeypatch):
    return partial(Step, tmp_path, monkeypatch)


PREFLIGHT, TRAIN = "preflight_worker.py", "train.py"


@pytest.mark.parametrize(
    ("attributes", "nproc", "scripts", "notes"),
    [
        ({}, 2, [PREFLIGHT, TRAIN, TRAIN], ["preflight: measures the network between 4 ranks"]),
        ({"num_nodes": 1}, 2, [PREFLIGHT, TRAIN, TRAIN], ["preflight: measures the network between 2 ranks"]),
        ({"num_nodes": 1}, 1, [TRAIN, TRAIN], ["preflight: one process in all, so there is nothing to measure"]),
        ({"preflight": False}, 2, [TRAIN, TRAIN], []),
    ],
)
def test_it_comes_before_the_first_launch_only(attributes, nproc, scripts, notes, make_step):
    step = make_step(**attributes)
    assert [step.run(nproc_per_node=nproc) for _ in range(2)] == [len(scripts) - 1, len(scripts)]
    assert step.scripts == scripts
    before = [script == PREFLIGHT for script in scripts]
    assert step.goes_on == [False, *before[:-1]], "its events are those of the call that has made it"
    said = [note for note in step.notes if note.startswith("preflight")]
    assert [note[: len(text)] for note, text in zip(said, notes, strict=True)] == notes


def test_it_restarts_nothing_and_has_no_limits_of_the_script(make_step):
    step = make_step()
    step.run(timeout_s=5)
    (spec, policy, facts), (script, own, _) = step.launches
    assert (spec.max_restarts, policy.max_restarts, policy.timeout_s, policy.features) == (0, 0, None, {})
    assert policy.preemption_signal == own.preemption_signal
    assert (script.max_restarts, own.max_restarts, own.timeout_s) == (2, 2, 5)
    assert facts["contents"] == step.script, "nodes with another script must be refused before it"


@pytest.mark.parametrize("kind", [LaunchFailed, LaunchTimeout])
def test_its_failure_is_the_gangs_verdict_under_another_name_and_it_is_repeated(kind, make_step):
    verdict = kind("Node 2 broke.", {"node": 2})
    verdict.events = [{"kind": "lost"}]
    step = make_step(fail=verdict)
    called = (
        r"^The preflight failed \(@torchrun\(preflight=\.\.\.\)\); the script was not started[^\n]*\nNode 2 broke\."
    )
    with pytest.raises(kind, match=called) as caught:
        step.run()
    assert (type(caught.value), caught.value.cause, caught.value.events) == (kind, {"node": 2}, verdict.events)
    assert caught.value.__cause__ is verdict, "the member knows the gang's verdicts by identity, also when chained"
    step.fail = None
    step.run()
    assert step.scripts == [PREFLIGHT, PREFLIGHT, TRAIN]


@pytest.mark.parametrize("error", [TorchrunPreempted("told to stop"), GangError("the nodes differ")])
def test_what_is_no_failure_of_its_own_keeps_its_words(error, make_step):
    with pytest.raises(type(error)) as caught:
        make_step(fail=error).run()
    assert caught.value is error
