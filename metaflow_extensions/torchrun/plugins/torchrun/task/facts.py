"""Collects the facts that a node reports before a launch, which the gang compares, and warns of what it finds there.

Nothing here imports torch: the task stays small, and a node where torch can't be imported still reports.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from ..errors import TorchNotFoundError
from ..parsing import is_by_shell
from ..supervisor.call import Call
from ..texts import counted

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
    seen = len(call.machine.seen_by(call.env))
    facts = {
        "torch": _torch_version(),
        "python": ".".join(platform.python_version_tuple()[:2]),
        "devices": counted(seen, "accelerator") if seen else _NONE,
        "contents": contents_digest(call),
        **({} if call.function is None else {"function": call.function.name}),
    }
    return replace(call, facts=facts)


def _torch_version() -> str:
    """Return the version out of torch's ``version.py``: with the build for CUDA or ROCm, as in ``2.13.0+cu130``."""
    found = importlib.util.find_spec("torch")
    if found is None:
        raise TorchNotFoundError(
            f"PyTorch is not installed for {sys.executable}, which runs this step. Install it there (pip install torch), "
            "or give the step an environment that has it: @pypi(packages={'torch': '...'}), @conda, or an image."
        )
    for folder in found.submodule_search_locations or ():
        with suppress(OSError, ValueError), open(os.path.join(folder, "version.py"), encoding="utf-8") as file:
            if version := re.search(r"""^__version__\s*(?::[^=\n]*)?=\s*['"]([^'"\n]*)""", file.read(), re.MULTILINE):
                return version[1]
    return _UNKNOWN


def contents_digest(call: Call) -> str:
    """Return a digest of the script's bytes; a module or a program has no file to read."""
    if call.source is None and (call.module or not call.is_python):
        return _NONE
    try:
        with open(call.source or call.entrypoint, "rb") as file:
            return hashlib.sha256(file.read(_DIGESTED_BYTES)).hexdigest()[:_DIGEST_CHARS]
    except OSError:  # its interpreter reports that
        return _UNKNOWN


# --- warnings -------------------------------------------------------------------------------------


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


def shm_warning(call: Call) -> str | None:
    """Return a warning for a ``/dev/shm`` that is too small, or None."""
    mib = _ENOUGH_SHM_MIB
    with suppress(OSError):
        status = os.statvfs("/dev/shm")  # noqa: S108 - nothing is written there
        mib = status.f_blocks * status.f_frsize // _MIB
    # One process alone, without an accelerator, shares nothing.
    if mib >= _ENOUGH_SHM_MIB or (call.nproc < 2 and not call.machine.accelerators):
        return None
    remedy = "Enlarge it (mount -o remount,size=1G /dev/shm; for a container, docker run --shm-size=1g)"
    if decorator := _SHM_DECORATORS.get(call.environ.get("METAFLOW_RUNTIME_ENVIRONMENT", "local")):
        remedy = f"Write @{decorator}(shared_memory={_ENOUGH_SHM_MIB}) (MiB, part of the step's memory)"
    return (
        f"warning: /dev/shm has {mib} MiB. NCCL and the workers of a DataLoader exchange data there, and a full one kills "
        f"workers with SIGBUS. {remedy}."
    )


def foreign_python(words: Sequence[str], env: Mapping[str, str]) -> str | None:
    """Return a warning if a command's ``python`` or ``pip`` belongs to another installation than the step's, else None."""
    text = words[2] if is_by_shell(words) else "".join(words[:1])
    name = next(iter(text.split()), "")
    found = re.fullmatch(r"(python|pip)[0-9.]*", name) and shutil.which(name, path={**os.environ, **env}.get("PATH"))
    if not found or os.path.realpath(os.path.dirname(found)) == os.path.realpath(os.path.dirname(sys.executable)):
        return None
    own = "[sys.executable, '-m', 'pip', ...]" if name.startswith("pip") else "[sys.executable, ...]"
    return f"{name} is {found}, but this step runs under {sys.executable}; to use that one, write {own}"
