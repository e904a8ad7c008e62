"""Finds the accelerators and CPUs of one node, and decides its number of processes.

`choose_nproc` returns that number and its reason. It gets everything as arguments, so it works on the machine that
submits a flow and again inside the task.
"""

from __future__ import annotations

import glob
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ..errors import TorchrunConfigError
from .cgroup import own_folders
from .processes import read

# AWS: "Each Trainium/Inferentia2 chip has two NeuronCores"; one worker drives one core.
NEURON_CORES_PER_DEVICE = 2

_NAME_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")  # of two the first counts
# Resource names of Kubernetes device plugins (NVIDIA, AMD, Intel); MIG slices are nvidia.com/mig-*.
_GPU_RESOURCE = re.compile(r"^(nvidia\.com/(gpu|mig-.+)|amd\.com/gpu|gpu\.intel\.com/.+|habana\.ai/gaudi)(\.shared)?$")
_NEURON_RESOURCE = {"aws.amazon.com/neuron": NEURON_CORES_PER_DEVICE, "aws.amazon.com/neuroncore": 1}


@dataclass(frozen=True)
class Nproc:
    """A decided number of processes per node, at least 1, and where it comes from, ready for the log."""

    value: int
    why: str


@dataclass(frozen=True)
class Machine:
    """The accelerators and CPUs that this node may use."""

    cpus: float  # of which a container may have less than one
    accelerators: tuple[str, ...] = ()  # as `CUDA_VISIBLE_DEVICES` names them
    nodes_here: int = 1  # how many nodes of the gang share this machine
    node_here: int = 0  # this node's place among them, from 0

    @property
    def own_accelerators(self) -> tuple[str, ...]:
        """The even share of this node: accelerators only it uses; empty when there are fewer than nodes."""
        share = len(self.accelerators) // self.nodes_here
        return self.accelerators[self.node_here * share : (self.node_here + 1) * share]

    def seen_by(self, variables: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
        """Return the accelerators that workers of this node see which have `variables` besides the task's own.

        The step's code may have changed the task's own since this was made.
        """
        if self.nodes_here > 1 and self.accelerators and "CUDA_VISIBLE_DEVICES" not in variables:
            return self.own_accelerators  # `supervisor.command` sets it so
        env = {**environ, **variables}
        return visible_accelerators(env) if any(name in env for name in _NAME_DEVICES) else self.accelerators


def choose_nproc(setting: int | str | None, source: str, requested: Nproc | None, machine: Machine) -> Nproc:
    """Decide the processes of one node. Raises TorchrunConfigError if ``"gpu"`` is asked for where there is none.
    `source` is where the user wrote `setting`. `requested` is None on a local run, or without a request.
    """
    if isinstance(setting, int):
        return Nproc(setting, f"set by {source}")
    found, own, nodes = len(machine.accelerators), len(machine.own_accelerators), machine.nodes_here
    shared = f" shared by {nodes} nodes on this machine" if nodes > 1 else ""
    accelerators = requested or (Nproc(own, f"{found} visible accelerators{shared}") if own else None)
    if setting is None:
        too_few = f"fewer accelerators ({found}) than nodes here ({nodes})" if found else "no accelerator"
        return accelerators or Nproc(1, f"no setting and {too_few}: one process")
    if setting in ("auto", "gpu") and accelerators is not None:
        return Nproc(accelerators.value, f"{source}={setting!r}: {accelerators.why}")
    if setting == "gpu":
        whose = "this machine has" if nodes == 1 else f"each of the {nodes} nodes here would get"
        raise TorchrunConfigError(
            f"{source} is 'gpu', but {whose} no visible GPU. Request GPUs (for example "
            "@kubernetes(gpu=1)), or use 'auto' or a number."
        )
    return Nproc(max(1, int(machine.cpus // nodes)), f"{source}={setting!r}: {machine.cpus:g} usable CPUs{shared}")


def requested_accelerators(decorators: Iterable[tuple[str, Mapping[str, Any]]]) -> Nproc | None:
    """Return the workers that a remote task's resources amount to; None on a local run, or without an accelerator.

    ``@resources`` is merged into ``@kubernetes`` or ``@batch`` as Metaflow does it: of two values
    the larger counts (``metaflow.plugins.aws.aws_utils.compute_resource_attributes``, 2.19).
    """
    by_name = dict(decorators)
    compute = next((name for name in ("kubernetes", "batch") if name in by_name), None)
    if compute is None:
        return None
    attributes, resources = by_name[compute], by_name.get("resources", {})
    for key, cores in (("trainium", NEURON_CORES_PER_DEVICE), ("inferentia", NEURON_CORES_PER_DEVICE), ("gpu", 1)):
        count = max(_count(attributes.get(key)), _count(resources.get(key)))
        if count > 0:
            each = f" of {cores} cores" if cores > 1 else ""
            return Nproc(count * cores, f"@{compute} requests {key}={count}{each}")
    for key, value in (attributes.get("extended_resources") or {}).items():
        cores = 1 if _GPU_RESOURCE.match(key) else _NEURON_RESOURCE.get(key, 0)
        if cores and (count := _count(value)) > 0:
            return Nproc(count * cores, f"@{compute} requests {key}={count}")
    return None


def _count(value: Any) -> int:
    """Return a number of accelerators as Metaflow takes it, which merges them as floats and writes them as text: "2.0"."""
    return int(float(value or 0))


def this_machine(nodes_here: int = 1, node_here: int = 0) -> Machine:
    """Look at the machine this process runs on; torch is not needed and not imported."""
    return Machine(usable_cpus(), visible_accelerators(os.environ), nodes_here, node_here)


def visible_accelerators(environ: Mapping[str, str], root: str = "/") -> tuple[str, ...]:
    """Return the identifiers of the GPUs a process with `environ` could use."""
    for variable in _NAME_DEVICES:
        if variable in environ:
            # As CUDA reads it: the list ends at the first entry that names no device.
            tokens = (token.strip() for token in environ[variable].split(","))
            return tuple(itertools.takewhile(lambda token: token and not token.startswith("-"), tokens))
    nvidia = glob.glob(os.path.join(root, "dev/nvidia[0-9]*"))
    amd = map(read, glob.glob(os.path.join(root, "sys/class/kfd/kfd/topology/nodes/*/gpu_id")))
    count = len(nvidia) or sum(text.strip() not in ("", "0") for text in amd)  # CPUs are listed as well, with id 0
    return tuple(str(index) for index in range(count))


def usable_cpus(root: str = "/") -> float:
    """Return the CPUs this process may use: the smallest of its affinity and its cgroups' quotas."""
    try:
        cpus: float = len(os.sched_getaffinity(0))
    except AttributeError:  # in some of conda's Pythons
        cpus = os.cpu_count() or 1
    quotas = (quota for folder in own_folders("cpu", root) for quota in _quotas(folder))
    return min([cpus, *quotas])


def _quotas(folder: str) -> Iterator[float]:
    """Yield the CPU quota of a cgroup, as version 2 writes it and as version 1 does, if there is one."""
    version_2, *version_1 = (
        read(os.path.join(folder, f"cpu.{name}")) for name in ("max", "cfs_quota_us", "cfs_period_us")
    )
    for text in (version_2, " ".join(version_1)):
        with suppress(ValueError):  # without a limit it says "max" or "-1"
            quota, period = map(int, text.split())
            if quota > 0:
                yield quota / period
