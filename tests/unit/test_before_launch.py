"""What happens between a call of `run` and its launch: the look at /dev/shm, and the preflight as a launch of its own."""

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
from metaflow_extensions.torchrun.plugins.torchrun.launch.preflight import (
    preflight_spec,
    shm_bytes,
    shm_warning,
)
from metaflow_extensions.torchrun.plugins.torchrun.launch.spec import LaunchSpec, OutputRequest
from metaflow_extensions.torchrun.plugins.torchrun.machine.accelerators import Machine
from metaflow_extensions.torchrun.plugins.torchrun.settings import parse_settings

MIB = 1024 * 1024
KUBERNETES = {"METAFLOW_RUNTIME_ENVIRONMENT": "kubernetes"}


# --- /dev/shm -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "nproc", "accelerators"), [(1024 * MIB, 8, ("0",)), (64 * MIB, 1, ()), (None, 8, ("0",))]
)
def test_enough_shared_memory_or_nobody_to_share_it_is_fine(size, nproc, accelerators):
    assert shm_warning(size, nproc, accelerators, KUBERNETES) is None


@pytest.mark.parametrize(("size", "nproc", "accelerators"), [(64, 2, ()), (64, 1, ("0",)), (1023.9, 8, ("0",))])
@pytest.mark.parametrize(
    ("environ", "remedy"),
    [
        (KUBERNETES, "Write @kubernetes(shared_memory=1024) "),
        ({"METAFLOW_RUNTIME_ENVIRONMENT": "aws-batch"}, "Write @batch(shared_memory=1024) "),
        ({}, "mount -o remount,size=1G /dev/shm"),
        ({"METAFLOW_RUNTIME_ENVIRONMENT": "local"}, "docker run --shm-size=1g"),
    ],
)
def test_too_little_shared_memory_is_told_with_what_to_write(size, nproc, accelerators, environ, remedy):
    warning = shm_warning(int(size * MIB), nproc, accelerators, environ)
    assert warning.startswith(f"warning: /dev/shm has {int(size)} MiB. ")
    assert remedy in warning
    assert "\n" not in warning


def test_a_machine_without_shared_memory_is_no_error(tmp_path):
    assert shm_bytes(str(tmp_path / "none")) is None
    assert shm_bytes(str(tmp_path)) > 0


# --- the launch of its own ------------------------------------------------------------------------


def test_the_preflight_runs_where_the_script_will():
    same = {"nproc": 4, "num_nodes": 3, "node_index": 1, "python": "/usr/bin/python3", "master_port": 29500}
    same |= {"env": (("NCCL_SOCKET_IFNAME", "eth1"),), "cwd": "/somewhere"}
    own = {"options": (("role", "x"),), "shown_local_ranks": frozenset({1}), "max_restarts": 3, "min_nodes": 2}
    own |= {"outputs": OutputRequest(("model",), "/somewhere", "all")}
    spec = LaunchSpec("train", ("--lr", "1"), module=True, **same, **own)
    found = preflight_spec(spec, with_links=False)
    assert found == LaunchSpec(found.entrypoint, (), module=False, **same)
    assert preflight_spec(spec, with_links=True) == LaunchSpec(found.entrypoint, ("links",), module=False, **same)
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
        context = Context(member, "10.0.0.1", Machine(2), settings)
        self.executor = TorchrunExecutor(context)

    def launch(self, plan, member):
        self.launches.append((plan.spec, plan.policy, plan.facts))
        self.goes_on.append(plan.goes_on)
        return SimpleNamespace(run=self.end, stored={})

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


PREFLIGHT, SCRIPT = "preflight_worker.py", "train.py"


@pytest.mark.parametrize(
    ("attributes", "nproc", "scripts", "notes"),
    [
        ({}, 2, [PREFLIGHT, SCRIPT, SCRIPT], ["preflight: measures the network between 4 ranks"]),
        ({"num_nodes": 1}, 2, [PREFLIGHT, SCRIPT, SCRIPT], ["preflight: measures the network between 2 ranks"]),
        ({"num_nodes": 1}, 1, [SCRIPT, SCRIPT], ["preflight: one process in all, so there is nothing to measure"]),
        ({"preflight": False}, 2, [SCRIPT, SCRIPT], []),
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
    step.run(timeout_s=5, hang_timeout_s=3)
    (spec, policy, facts), (script, own, _) = step.launches
    assert (spec.max_restarts, policy.max_restarts, policy.timeout_s, policy.hang_timeout_s) == (0, 0, None, None)
    assert policy.preemption_signal == own.preemption_signal
    assert (script.max_restarts, own.max_restarts, own.timeout_s, own.hang_timeout_s) == (2, 2, 5, 3)
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
    assert step.scripts == [PREFLIGHT, PREFLIGHT, SCRIPT]


@pytest.mark.parametrize("error", [TorchrunPreempted("told to stop"), GangError("the nodes differ")])
def test_what_is_no_failure_of_its_own_keeps_its_words(error, make_step):
    with pytest.raises(type(error)) as caught:
        make_step(fail=error).run()
    assert caught.value is error


def test_shared_memory_is_warned_of_once_in_a_task(make_step, monkeypatch):
    step = make_step(preflight=False)
    monkeypatch.setattr(executor, "shm_bytes", lambda: 64 * MIB)
    step.run(nproc_per_node=1)
    assert step.notes == []
    step.run()
    step.run()
    assert len(step.notes) == 1
    assert step.notes[0].startswith("warning: /dev/shm has 64 MiB")
