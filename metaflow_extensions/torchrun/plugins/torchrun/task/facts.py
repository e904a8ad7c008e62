"""Collects the facts that a node reports before a launch; the gang compares them between nodes.

Nothing here imports torch: the task stays small, and a node where torch can't be imported still reports.
"""

from __future__ import annotations

import glob
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from ..errors import TorchNotFoundError
from ..gang.texts import counted
from ..supervisor.call import Call

_NONE = "none"
_UNKNOWN = "unknown"
_MIB = 1024 * 1024
# Docker and Kubernetes give a container 64 MiB. NCCL's buffers and the batches that a DataLoader's workers
# hand over lie there.
_ENOUGH_SHM_MIB = 1024
# METAFLOW_RUNTIME_ENVIRONMENT -> the decorator whose shared_memory, in MiB, becomes the size of /dev/shm
# (Metaflow 2.19: kubernetes_job.py, kubernetes_jobsets.py, argo_workflows.py, batch_client.py).
_SHM_DECORATORS = {"kubernetes": "kubernetes", "aws-batch": "batch"}
_DIGEST_CHARS = 16
_DIGESTED_BYTES = 16 * 1024 * 1024  # a word of a command can name a file of any size


def with_facts(call: Call) -> Call:
    """Return a call with the facts for this node's *ready*; raises TorchNotFoundError without PyTorch."""
    folder = _torch_folder()
    built_with = _read_version_file(os.path.join(folder, "version.py"))
    machine = call.machine
    seen = machine.seen_by(call.env)
    cuda = f"ROCm {built_with['hip']}" if "hip" in built_with else built_with.get("cuda")
    facts = {
        "torch": _version_of("torch") or built_with.get("__version__") or _UNKNOWN,
        "cuda": cuda or _NONE,
        "nccl": _nccl_version(cuda) or _NONE,
        "python": ".".join(platform.python_version_tuple()[:2]),
        # Not their number, which may differ. What `run` itself hides from its workers, it hides on purpose.
        "devices": device_kind(machine.seen_by({})),
        "accelerators": f"{len(seen)} {device_kind(seen)}" if seen else _NONE,
        "contents": contents_digest(call),
        **({} if call.function is None else {"function": call.function.name}),
    }
    return replace(call, facts=facts)


def _torch_folder() -> str:
    """Return where PyTorch is installed, or raise."""
    found = importlib.util.find_spec("torch")
    if found is None:
        raise TorchNotFoundError(
            f"PyTorch is not installed for {sys.executable}, which runs this step. Install it there (pip install torch), "
            "or give the step an environment that has it: @pypi(packages={'torch': '...'}), @conda, or an image."
        )
    return next(iter(found.submodule_search_locations or ()), "")


def _read_version_file(path: str) -> dict[str, str]:
    """Return the texts that torch's ``version.py`` assigns (torch 2.13: ``cuda: Optional[str] = '12.8'``)."""
    with suppress(OSError, ValueError), open(path, encoding="utf-8") as file:
        return dict(re.findall(r"""^(\w+)\s*(?::[^=\n]*)?=\s*['"]([^'"\n]*)['"]""", file.read(), re.MULTILINE))
    return {}


def _nccl_version(cuda: str | None) -> str | None:
    # The version of the package that torch's wheels for CUDA depend on. Other builds link NCCL or ship RCCL (ROCm):
    # there torch's version says which it is.
    major = (cuda or "").partition(".")[0]
    return _version_of(f"nvidia-nccl-cu{major}") if major.isdigit() else None


def _version_of(package: str) -> str | None:
    # Some images have installations without metadata.
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def device_kind(accelerators: Sequence[str], root: str = "/") -> str:
    """Return the kind of the accelerators that a node may use: ``"nvidia"``, ``"amd"`` or ``"none"``."""
    if not accelerators:
        return _NONE
    if glob.glob(os.path.join(root, "dev/nvidia[0-9]*")):
        return "nvidia"
    # Unknown: an environment variable names devices that have no such files.
    return "amd" if os.path.exists(os.path.join(root, "dev/kfd")) else _UNKNOWN


def too_few_warning(call: Call) -> str | None:
    """Return a warning for a machine with fewer accelerators than nodes, or None."""
    machine = call.machine
    found, env = len(machine.accelerators), call.env
    # On a machine of its own, the step's code has hidden them.
    if not found or machine.nodes_here == 1 or machine.seen_by(env) or "CUDA_VISIBLE_DEVICES" in env:
        return None
    return (
        f"warning: {counted(found, 'accelerator')} can't be shared out among {machine.nodes_here} nodes on this machine, "
        "so no worker sees any, and all compute on the CPU. Run fewer nodes here"
    )


def shm_bytes(path: str = "/dev/shm") -> int | None:  # noqa: S108 - it is looked at, nothing is written there
    """Return the size of the shared memory's file system, or None where there is none."""
    with suppress(OSError):
        status = os.statvfs(path)
        return status.f_blocks * status.f_frsize
    return None


def shm_warning(
    size_bytes: int | None, nproc: int, accelerators: Sequence[str], environ: Mapping[str, str]
) -> str | None:
    """Return a warning for a ``/dev/shm`` that is too small, or None; `environ` is the task's environment."""
    # One process alone, without an accelerator, shares nothing.
    if size_bytes is None or size_bytes >= _ENOUGH_SHM_MIB * _MIB or (nproc < 2 and not accelerators):
        return None
    decorator = _SHM_DECORATORS.get(environ.get("METAFLOW_RUNTIME_ENVIRONMENT", "local"))
    remedy = "Enlarge it (mount -o remount,size=1G /dev/shm; for a container, docker run --shm-size=1g)"
    if decorator:
        remedy = f"Write @{decorator}(shared_memory={_ENOUGH_SHM_MIB}) (MiB, part of the step's memory)"
    return (
        f"warning: /dev/shm has {size_bytes // _MIB} MiB. NCCL and the workers of a DataLoader exchange data there, and a "
        f"full one kills workers with SIGBUS. {remedy}."
    )


def contents_digest(call: Call) -> str:
    """Return a digest of the script's bytes; a module or a program has no file to read."""
    if call.source is None and (call.module or not call.is_python):
        return _NONE
    try:
        with open(call.source or call.entrypoint, "rb") as file:
            return hashlib.sha256(file.read(_DIGESTED_BYTES)).hexdigest()[:_DIGEST_CHARS]
    except OSError:  # its interpreter reports that
        return _UNKNOWN
