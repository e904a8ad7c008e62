"""Processes per node, accelerators, threads: one place decides and says why."""

import os
from types import SimpleNamespace

import pytest
from metaflow.plugins.aws.aws_utils import compute_resource_attributes
from unit_helpers import write

from metaflow_extensions.torchrun.plugins.torchrun.errors import TorchrunConfigError
from metaflow_extensions.torchrun.plugins.torchrun.machine.accelerators import (
    Machine,
    Nproc,
    choose_nproc,
    requested_accelerators,
    usable_cpus,
    visible_accelerators,
)

EIGHT_GPUS = tuple("01234567")
BARE = Machine(cpus=8)
GPUS = Machine(cpus=16, accelerators=EIGHT_GPUS)
REQUESTED = Nproc(4, "@kubernetes requests gpu=4")


# --- who decides ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "requested", "machine", "value", "said"),
    [
        (5, REQUESTED, GPUS, 5, "set by run"),
        (None, REQUESTED, GPUS, 4, "@kubernetes requests gpu=4"),
        (None, None, GPUS, 8, "8 visible accelerators"),
        (None, None, BARE, 1, "no setting and no accelerator: one process"),
        ("auto", None, BARE, 8, "8 usable CPUs"),
        ("cpu", REQUESTED, GPUS, 16, "16 usable CPUs"),
        ("cpu", None, Machine(7, nodes_here=2), 3, "shared by 2 nodes"),
        (None, None, Machine(8, EIGHT_GPUS, 3, 1), 2, "8 visible accelerators shared by 3 nodes"),
        ("auto", None, Machine(8, ("0",), 2), 4, "8 usable CPUs"),
        (None, None, Machine(8, ("0",), 2), 1, "fewer accelerators (1) than nodes here (2): one process"),
    ],
)
def test_the_number_of_processes_and_where_it_comes_from(setting, requested, machine, value, said):
    chosen = choose_nproc(setting, "run", requested, machine)
    assert chosen.value == value
    assert said in chosen.why


@pytest.mark.parametrize(
    ("machine", "words"),
    [(BARE, r"run is 'gpu'.*@kubernetes\(gpu=1\)"), (Machine(8, ("0",), 2), "each of the 2 nodes here")],
)
def test_gpu_without_a_gpu_says_whose_fault_it_is_and_how_to_get_one(machine, words):
    with pytest.raises(TorchrunConfigError, match=words):
        choose_nproc("gpu", "run", None, machine)


# --- what a remote task requested ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("decorators", "value"),
    [
        ([("kubernetes", {"gpu": "2.0"})], 2),
        ([("batch", {"trainium": 16})], 32),
        ([("kubernetes", {"extended_resources": {"amd.com/gpu": "4"}})], 4),
        ([("kubernetes", {"extended_resources": {"nvidia.com/mig-1g.5gb": 3}})], 3),
        ([("kubernetes", {"extended_resources": {"aws.amazon.com/neuron": 2}})], 4),
        ([("kubernetes", {"extended_resources": {"vpc.amazonaws.com/efa": 4, "amd.com/gpu": 1}})], 1),
        ([], None),
        ([("resources", {"gpu": 4})], None),
        ([("kubernetes", {"gpu": "0"}), ("resources", {"gpu": None})], None),
        ([("batch", {"gpu": "-1"})], None),
        ([("kubernetes", {"extended_resources": None}), ("retry", {"times": 3})], None),
    ],
)
def test_requested_accelerators_are_counted(decorators, value):
    found = requested_accelerators(decorators)
    assert (found and found.value) == value


@pytest.mark.parametrize(("resources", "own"), [(None, 4), (2, "4"), ("8", 4), (2.0, None)])
def test_requested_gpus_are_merged_as_metaflow_does(resources, own):
    decorators = [SimpleNamespace(name="resources", attributes={"gpu": resources})]
    decorators.append(SimpleNamespace(name="batch", attributes={"gpu": own}))
    metaflows = compute_resource_attributes(decorators, decorators[1], {"gpu": "0"})["gpu"]
    ours = requested_accelerators([(deco.name, deco.attributes) for deco in decorators])
    assert (0 if ours is None else ours.value) == float(metaflows)


# --- looking at the machine ----------------------------------------------------------------------


@pytest.mark.parametrize("variable", ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"])
@pytest.mark.parametrize(("text", "seen"), [("-1", ()), (" 1, GPU-5f3a,-1,2", ("1", "GPU-5f3a"))])
def test_the_variable_wins_and_ends_at_the_first_invalid_entry(variable, text, seen, tmp_path):
    write(tmp_path / "dev/nvidia0", "")
    assert visible_accelerators({variable: text}, str(tmp_path)) == seen


NVIDIA = [f"dev/{name}" for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-caps/nvidia-cap1", "null")]
AMD = {
    f"sys/class/kfd/kfd/topology/nodes/{node}/gpu_id": id for node, id in enumerate(("0", "0\n", "51422\n", "27134\n"))
}


@pytest.mark.parametrize(
    ("files", "seen"),
    [(dict.fromkeys(NVIDIA, ""), ("0", "1", "2")), (AMD, ("0", "1")), ({}, ())],
    ids=["nvidia", "amd", "none"],
)
def test_gpus_are_counted_and_other_devices_are_not(files, seen, tmp_path):
    for name, text in files.items():
        write(tmp_path / name, text)
    assert visible_accelerators({}, str(tmp_path)) == seen


QUOTA_OF_4 = "400000 100000\n"
QUOTA_OF_1 = "100000 100000\n"


@pytest.mark.parametrize(
    ("own", "files", "cpus"),
    [
        (None, {}, 8),
        (None, {"cpu.max": QUOTA_OF_1}, 1),
        (None, {"cpu.max": "30000 100000\n"}, 0.3),
        # As systemd has it for CPUQuota=.
        ("0::/user.slice/my job\n", {"user.slice/my job/cpu.max": QUOTA_OF_1}, 1),
        ("0::/a\n", {"a/cpu.max": QUOTA_OF_4, "ab/cpu.max": QUOTA_OF_1, "a/b/cpu.max": QUOTA_OF_1}, 4),
        # Version 1 of cgroups.
        ("4:cpu,cpuacct:/b\n0::/a\n", {"cpu/b/cpu.cfs_quota_us": "100000\n", "cpu/b/cpu.cfs_period_us": "100000\n"}, 1),
        (None, {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        # A container's own cgroup is mounted, the path is the host's.
        ("0::/docker/5f3a\n", {"cpu.max": QUOTA_OF_1}, 1),
        ("0::/../outside\n", {"../outside/cpu.max": QUOTA_OF_1, "cpu.max": QUOTA_OF_4}, 4),
    ],
)
def test_a_quota_of_any_cgroup_around_the_process_binds(own, files, cpus, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    if own is not None:
        write(tmp_path / "proc/self/cgroup", own)
    for name, text in files.items():
        write(tmp_path / "sys/fs/cgroup" / name, text)
    assert usable_cpus(str(tmp_path)) == cpus
