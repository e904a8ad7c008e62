"""What happens between a call of `run` and its launch: the look at /dev/shm, and the preflight as a launch of its own."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from unit_helpers import write

from metaflow_extensions.torchrun.plugins.torchrun import executor
from metaflow_extensions.torchrun.plugins.torchrun.devices import Machine
from metaflow_extensions.torchrun.plugins.torchrun.errors import (
    GangError,
    LaunchFailed,
    LaunchTimeout,
    TorchrunConfigError,
    TorchrunPreempted,
)
from metaflow_extensions.torchrun.plugins.torchrun.executor import Context, TorchrunExecutor
from metaflow_extensions.torchrun.plugins.torchrun.launch_spec import LaunchSpec
from metaflow_extensions.torchrun.plugins.torchrun.preflight import (
    as_preflight,
    preflight_spec,
    shm_bytes,
    shm_warning,
)
from metaflow_extensions.torchrun.plugins.torchrun.settings import parse_settings

MIB = 1024 * 1024
KUBERNETES = {"METAFLOW_RUNTIME_ENVIRONMENT": "kubernetes"}
BATCH = {"METAFLOW_RUNTIME_ENVIRONMENT": "aws-batch"}


# --- /dev/shm -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "nproc", "accelerators"),
    [
        (1024 * MIB, 8, ("0",)),  # what shared_memory=1024 makes
        (64 * MIB, 1, ()),
        (None, 8, ("0",)),
    ],
)
def test_enough_shared_memory_or_nobody_to_share_it_is_fine(size, nproc, accelerators):
    assert shm_warning(size, nproc, accelerators, KUBERNETES) is None


@pytest.mark.parametrize(("nproc", "accelerators"), [(2, ()), (1, ("0",)), (8, ("0",))])
@pytest.mark.parametrize(
    ("environ", "remedy"),
    [
        (KUBERNETES, "Write @kubernetes(shared_memory=1024) "),
        (BATCH, "Write @batch(shared_memory=1024) "),
        ({}, "mount -o remount,size=1G /dev/shm"),
        ({"METAFLOW_RUNTIME_ENVIRONMENT": "local"}, "docker run --shm-size=1g"),
    ],
)
def test_too_little_shared_memory_is_told_with_what_to_write(nproc, accelerators, environ, remedy):
    warning = shm_warning(64 * MIB, nproc, accelerators, environ)
    assert warning.startswith("warning: /dev/shm has 64 MiB. ")
    assert remedy in warning
    assert "\n" not in warning


def test_just_under_a_gibibyte_is_too_little():
    assert shm_warning(1024 * MIB - 1, 2, (), {}).startswith("warning: /dev/shm has 1023 MiB. ")


def test_a_machine_without_shared_memory_is_no_error(tmp_path):
    assert shm_bytes(str(tmp_path / "none")) is None
    assert shm_bytes(str(tmp_path)) > 0


# --- the attribute --------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [True, 1, "true", "True", "1", " TRUE "])
def test_preflight_is_on(given):
    assert parse_settings({"preflight": given}, "train").preflight is True


@pytest.mark.parametrize("given", [False, 0, None, "false", "False", "0", "none", ""])
def test_preflight_is_off(given):
    assert parse_settings({"preflight": given}, "train").preflight is False


@pytest.mark.parametrize("given", ["ja", 2, "10", 1.5, [True]])
def test_preflight_is_neither(given):
    with pytest.raises(TorchrunConfigError, match=r"Step train: @torchrun\(preflight=...\) is .*True or False"):
        parse_settings({"preflight": given}, "train")


# --- the launch of its own ------------------------------------------------------------------------


def test_the_preflight_runs_where_the_script_will():
    own = LaunchSpec(
        entrypoint="train",
        args=("--lr", "1"),
        module=True,
        nproc=4,
        num_nodes=3,
        node_index=1,
        python="/usr/bin/python3",
        options=(("no-python", None), ("role", "x")),
        shown_local_ranks=frozenset({1}),
        master_port=29500,
        max_restarts=3,
        min_nodes=2,
        env=(("NCCL_SOCKET_IFNAME", "eth1"),),
        cwd="/somewhere",
    )
    found = preflight_spec(own)
    assert (found.nproc, found.num_nodes, found.node_index, found.python) == (4, 3, 1, "/usr/bin/python3")
    assert (found.master_port, found.env, found.cwd) == (29500, own.env, "/somewhere")
    assert (found.args, found.module, found.options, found.max_restarts) == ((), False, (), 0)
    assert (found.shown_local_ranks, found.min_nodes) == (None, None)
    assert Path(found.entrypoint).name == "preflight_worker.py"
    assert Path(found.entrypoint).is_file()


@pytest.mark.parametrize("kind", [LaunchFailed, LaunchTimeout])
def test_a_failed_preflight_is_called_one_and_keeps_class_and_cause(kind):
    error = as_preflight(kind("Node 2 broke.", {"node": 2}))
    assert type(error) is kind
    assert error.message.startswith("The preflight failed (@torchrun(preflight=True)); the script was not started")
    assert error.message.endswith("\nNode 2 broke.")
    assert error.cause == {"node": 2}


class Stage:
    """A node whose launches are only noted, or fail as the test says."""

    def __init__(self, tmp_path, monkeypatch, num_nodes=2, preflight=True, fail=None):
        self.launches = []
        self.events = []
        self.fail = fail
        self.script = str(write(tmp_path / "train.py", "pass"))
        monkeypatch.setattr(executor, "Supervisor", self.launch)
        monkeypatch.setattr(executor, "node_facts", lambda spec, machine: {"contents": spec.entrypoint})
        monkeypatch.setattr(executor, "_warned", set())
        seat = SimpleNamespace(num_nodes=num_nodes, node=0, refuse_in_child=lambda: None)
        settings = parse_settings({"preflight": preflight, "max_restarts": 2, "preemption_signal": "SIGUSR1"}, "train")
        context = Context(seat, "10.0.0.1", Machine(2), settings, emit=self.events.append)
        self.executor = TorchrunExecutor(context)

    def launch(self, spec, seat, main_addr, machine, policy, grace_s, silence_s, facts, write, call=None):
        self.launches.append((spec, policy, facts))
        return SimpleNamespace(run=self.end, deposits={})

    def end(self):
        if self.fail is not None:
            raise self.fail
        return len(self.launches)

    def run(self, **options):
        return self.executor.run(self.script, **{"nproc_per_node": 2, **options})

    @property
    def scripts(self):
        return [spec.entrypoint.rpartition("/")[2] for spec, _, _ in self.launches]

    @property
    def notes(self):
        return [event.text for event in self.events if event.kind == "note"]


def test_it_comes_before_the_first_launch_only(tmp_path, monkeypatch):
    stage = Stage(tmp_path, monkeypatch)
    assert stage.run() == 2
    assert stage.run() == 3
    assert stage.scripts == ["preflight_worker.py", "train.py", "train.py"]
    assert sum("preflight: measures the network between 4 ranks" in note for note in stage.notes) == 1


def test_without_the_attribute_there_is_none(tmp_path, monkeypatch):
    stage = Stage(tmp_path, monkeypatch, preflight=False)
    stage.run()
    assert stage.scripts == ["train.py"]


def test_it_restarts_nothing_and_has_no_limits_of_the_script(tmp_path, monkeypatch):
    stage = Stage(tmp_path, monkeypatch)
    stage.run(timeout_s=5, hang_timeout_s=3)
    (spec, policy, facts), (script, own, _) = stage.launches
    assert (spec.max_restarts, policy.max_restarts, policy.timeout_s, policy.hang_timeout_s) == (0, 0, None, None)
    assert policy.preemption_signal == own.preemption_signal
    assert (script.max_restarts, own.max_restarts, own.timeout_s, own.hang_timeout_s) == (2, 2, 5, 3)
    assert facts["contents"] == stage.script, "nodes with another script must be refused before it"


def test_one_process_in_all_has_nothing_to_measure(tmp_path, monkeypatch):
    stage = Stage(tmp_path, monkeypatch, num_nodes=1)
    stage.run(nproc_per_node=1)
    assert stage.scripts == ["train.py"]
    assert stage.notes == ["preflight: one process in all, so there is nothing to measure"]


def test_one_node_of_several_processes_is_measured(tmp_path, monkeypatch):
    stage = Stage(tmp_path, monkeypatch, num_nodes=1)
    stage.run()
    assert stage.scripts == ["preflight_worker.py", "train.py"]


def test_its_failure_is_the_gangs_verdict_under_another_name(tmp_path, monkeypatch):
    verdict = LaunchFailed("Node 2 broke.", {"node": 2})
    stage = Stage(tmp_path, monkeypatch, fail=verdict)
    with pytest.raises(LaunchFailed, match=r"The preflight failed[^\n]*\nNode 2 broke\.") as caught:
        stage.run()
    assert caught.value.__cause__ is verdict, "the membership knows the gang's verdicts by identity, also when chained"
    assert stage.scripts == ["preflight_worker.py"]


@pytest.mark.parametrize("error", [TorchrunPreempted("told to stop"), GangError("the nodes differ")])
def test_what_is_no_failure_of_its_own_keeps_its_words(error, tmp_path, monkeypatch):
    stage = Stage(tmp_path, monkeypatch, fail=error)
    with pytest.raises(type(error)) as caught:
        stage.run()
    assert caught.value is error


def test_a_step_that_goes_on_after_a_failed_preflight_gets_another(tmp_path, monkeypatch):
    stage = Stage(tmp_path, monkeypatch, fail=LaunchFailed("Node 2 broke."))
    with pytest.raises(LaunchFailed):
        stage.run()
    stage.fail = None
    stage.run()
    assert stage.scripts == ["preflight_worker.py", "preflight_worker.py", "train.py"]


def test_shared_memory_is_warned_of_once_in_a_task(tmp_path, monkeypatch):
    stage = Stage(tmp_path, monkeypatch, preflight=False)
    monkeypatch.setattr(executor, "shm_bytes", lambda: 64 * MIB)
    stage.run(nproc_per_node=1)
    assert stage.notes == []
    stage.run()
    stage.run()
    assert len(stage.notes) == 1
    assert stage.notes[0].startswith("warning: /dev/shm has 64 MiB")
