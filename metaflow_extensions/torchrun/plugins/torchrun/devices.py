"""How many processes a node runs, which accelerators it sees, how many threads a worker gets.

One function, `choose_nproc`, decides the processes per node and says why. Everything it needs is
handed to it, so that it can be asked on the laptop that submits a flow and again inside the task.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from .cgroup import own_folders, read
from .errors import TorchrunConfigError

NPROC_WORDS = ("auto", "cpu", "gpu")

# AWS: "Each Trainium/Inferentia2 chip has two NeuronCores"; one worker drives one core.
NEURON_CORES_PER_DEVICE = 2

_REMOTE_DECORATORS = ("kubernetes", "batch")
# Resource names of Kubernetes device plugins (NVIDIA, AMD, Intel); MIG slices are nvidia.com/mig-*.
_GPU_RESOURCE = re.compile(r"^(nvidia\.com/(gpu|mig-.+)|amd\.com/gpu|gpu\.intel\.com/.+|habana\.ai/gaudi)(\.shared)?$")
_NEURON_RESOURCE = {"aws.amazon.com/neuron": NEURON_CORES_PER_DEVICE, "aws.amazon.com/neuroncore": 1}


@dataclass(frozen=True)
class Nproc:
    """A decided number of processes per node, and the reason to show.

    Attributes
    ----------
    value : int
        Processes per node, at least 1.
    why : str
        Where the number comes from, ready for the log.
    """

    value: int
    why: str


@dataclass(frozen=True)
class Machine:
    """What this node may use.

    Attributes
    ----------
    cpus : int
        Usable CPUs of the machine, at least 1.
    accelerators : tuple of str
        Identifiers of the machine's visible accelerators, as `CUDA_VISIBLE_DEVICES` writes them.
    nodes_here : int
        How many nodes of the gang share this machine, at least 1.
    node_here : int
        This node's place among them, from 0.
    """

    cpus: int
    accelerators: tuple[str, ...] = ()
    nodes_here: int = 1
    node_here: int = 0

    @property
    def own_accelerators(self) -> tuple[str, ...]:
        """The even share of this node: accelerators only it uses; empty when there are fewer than nodes."""
        share = len(self.accelerators) // self.nodes_here
        return self.accelerators[self.node_here * share : (self.node_here + 1) * share]


def parse_nproc(value: Any, setting: str) -> int | str | None:
    """Return a processes-per-node setting as an int or one of `NPROC_WORDS`; None stays None.

    Parameters
    ----------
    value : int, str or None
        As the user wrote it; ``--with torchrun:nproc_per_node=2`` sends strings.
    setting : str
        How to name the setting in an error.

    Raises
    ------
    TorchrunConfigError
        If it is neither a whole number of at least 1 nor one of the words.
    """
    if value is None:
        return None
    if isinstance(value, str) and value.strip().lower() in NPROC_WORDS:
        return value.strip().lower()
    number = parse_int(value)
    if number is None or number < 1:
        raise TorchrunConfigError(
            f"{setting} is {value!r}, but it must be a whole number of at least 1 or one of "
            f"{', '.join(map(repr, NPROC_WORDS))}."
        )
    return number


def parse_int(value: Any) -> int | None:
    """Return `value` as an int if it is a whole number or the text of one, else None."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and re.fullmatch(r"\s*[+-]?\d+\s*", value):
        return int(value)
    return None


def choose_nproc(settings: Sequence[tuple[str, int | str | None]], requested: Nproc | None, machine: Machine) -> Nproc:
    """Decide the processes of one node.

    Parameters
    ----------
    settings : sequence of (str, int or str or None)
        The user's settings, strongest first: each with its name and its parsed value.
    requested : Nproc, optional
        What the resources requested for a remote task amount to; None on a local run or when
        they name no accelerator.
    machine : Machine
        What this node may use.

    Raises
    ------
    TorchrunConfigError
        If ``"gpu"`` is asked for where there is none.
    """
    for name, value in settings:
        if isinstance(value, int):
            return Nproc(value, f"set by {name}")
        if value is not None:
            return _from_word(value, name, requested, machine)
    if requested is not None:
        return requested
    return _from_accelerators(machine) or Nproc(1, f"no setting and {_too_few(machine)}: one process")


def _from_word(word: str, name: str, requested: Nproc | None, machine: Machine) -> Nproc:
    accelerators = requested or _from_accelerators(machine)
    if word in ("auto", "gpu") and accelerators is not None:
        return Nproc(accelerators.value, f"{name}={word!r}: {accelerators.why}")
    if word == "gpu":
        raise TorchrunConfigError(
            f"{name} is 'gpu', but {_whose(machine)} no visible GPU. Request GPUs (for example "
            "@kubernetes(gpu=1)), or use 'auto' or a number."
        )
    cpus = max(1, machine.cpus // machine.nodes_here)
    return Nproc(cpus, f"{name}={word!r}: {machine.cpus} usable CPUs{_shared(machine)}")


def _from_accelerators(machine: Machine) -> Nproc | None:
    own = machine.own_accelerators
    if not own:
        return None
    return Nproc(len(own), f"{len(machine.accelerators)} visible accelerators{_shared(machine)}")


def _too_few(machine: Machine) -> str:
    found = len(machine.accelerators)
    return f"fewer accelerators ({found}) than nodes here ({machine.nodes_here})" if found else "no accelerator"


def _whose(machine: Machine) -> str:
    return "this machine has" if machine.nodes_here == 1 else f"each of the {machine.nodes_here} nodes here would get"


def _shared(machine: Machine) -> str:
    return f" shared by {machine.nodes_here} nodes on this machine" if machine.nodes_here > 1 else ""


def requested_accelerators(decorators: Iterable[tuple[str, Mapping[str, Any]]]) -> Nproc | None:
    """Return the workers that the resources requested for a remote task amount to.

    ``@resources`` is merged into ``@kubernetes`` or ``@batch`` as Metaflow does it: of two values
    the larger counts (``metaflow.plugins.aws.aws_utils.compute_resource_attributes``, 2.19).

    Parameters
    ----------
    decorators : iterable of (str, mapping)
        Name and attributes of the step's decorators.

    Returns
    -------
    Nproc or None
        None when the step does not run remotely or requests no accelerator.

    Raises
    ------
    TorchrunConfigError
        If a requested count is no whole number.
    """
    by_name = dict(decorators)
    compute = next((name for name in _REMOTE_DECORATORS if name in by_name), None)
    if compute is None:
        return None
    attributes, resources = by_name[compute], by_name.get("resources", {})
    for key, cores in (("trainium", NEURON_CORES_PER_DEVICE), ("inferentia", NEURON_CORES_PER_DEVICE), ("gpu", 1)):
        count = max(_count(attributes.get(key), compute, key), _count(resources.get(key), "resources", key))
        if count:
            each = f" of {cores} cores" if cores > 1 else ""
            return Nproc(count * cores, f"@{compute} requests {key}={count}{each}")
    return _from_extended_resources(attributes.get("extended_resources"), compute)


def _from_extended_resources(extended: Any, compute: str) -> Nproc | None:
    for key, value in extended.items() if isinstance(extended, Mapping) else ():
        cores = 1 if _GPU_RESOURCE.match(key) else _NEURON_RESOURCE.get(key, 0)
        count = _count(value, compute, f"extended_resources[{key!r}]") if cores else 0
        if count:
            return Nproc(count * cores, f"@{compute} requests {key}={count}")
    return None


def _count(value: Any, decorator: str, key: str) -> int:
    if value is None or value == "":
        return 0
    number = parse_int(value)
    if number is None and isinstance(value, str):
        # Metaflow merges counts as floats and writes them back as text: "2.0".
        with suppress(ValueError):
            number = parse_int(float(value))
    if number is None or number < 0:
        raise TorchrunConfigError(f"@{decorator}({key}={value!r}): the number of accelerators must be a whole number.")
    return number


def this_machine(nodes_here: int = 1, node_here: int = 0) -> Machine:
    """Look at the machine this process runs on; torch is not needed and not imported."""
    return Machine(usable_cpus(), visible_accelerators(os.environ), nodes_here, node_here)


def visible_accelerators(environ: Mapping[str, str], root: str = "/") -> tuple[str, ...]:
    """Return the identifiers of the GPUs a process with `environ` could use.

    ``CUDA_VISIBLE_DEVICES`` (or ROCm's ``HIP_VISIBLE_DEVICES``) wins where it is set; otherwise the
    device files count: ``/dev/nvidia0``, …, or the GPUs in the topology of ``/dev/kfd`` (AMD).
    """
    for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        if variable in environ:
            # As CUDA reads it: the list ends at the first entry that names no device.
            tokens = (token.strip() for token in environ[variable].split(","))
            valid: list[str] = []
            for token in tokens:
                if not token or token.startswith("-"):
                    break
                valid.append(token)
            return tuple(valid)
    nvidia = [p for p in glob.glob(os.path.join(root, "dev/nvidia*")) if re.fullmatch(r".*/nvidia\d+", p)]
    if nvidia:
        return tuple(str(index) for index in range(len(nvidia)))
    return tuple(str(index) for index in range(_amd_gpus(root)))


def _amd_gpus(root: str) -> int:
    count = 0
    for path in glob.glob(os.path.join(root, "sys/class/kfd/kfd/topology/nodes/*/gpu_id")):
        with suppress(OSError), open(path, encoding="ascii") as file:
            count += file.read().strip() not in ("", "0")  # CPUs are listed as well, with id 0
    return count


def usable_cpus(root: str = "/") -> int:
    """Return the CPUs this process may use: the smallest of its affinity and its cgroups' quotas."""
    try:
        cpus = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        cpus = os.cpu_count() or 1
    quota = _cgroup_cpus(root)
    return max(1, cpus if quota is None else min(cpus, int(quota)))


def _cgroup_cpus(root: str) -> float | None:
    """Return the smallest CPU quota of this process's cgroups in CPUs, or None."""
    return min((quota for folder in own_folders("cpu", root) for quota in _quotas(folder)), default=None)


def _quotas(folder: str) -> Iterator[float]:
    """Yield the CPU quota of a cgroup, as version 2 writes it and as version 1 does, if there is one."""
    version_2, *version_1 = (
        read(os.path.join(folder, f"cpu.{name}")) for name in ("max", "cfs_quota_us", "cfs_period_us")
    )
    for text in (version_2, " ".join(version_1)):
        with suppress(ValueError, ZeroDivisionError):  # without a limit it says "max" or "-1"
            quota, period = map(int, text.split())
            if quota > 0:
                yield quota / period


def omp_threads(machine: Machine, nproc: int) -> int:
    """Return the threads each worker gets: ``max(1, usable CPUs // processes on this machine)``."""
    return max(1, machine.cpus // (nproc * machine.nodes_here))
