"""What is checked before the user's script starts: this node's shared memory, and the gang's network.

The network is measured by ``worker/preflight_worker.py``, as a launch of its own. Here is what that launch is, and
how its failure is told.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from ..errors import LaunchFailed
from ..gang.cause import retold
from .command import SCRIPTS
from .spec import LaunchSpec

_SCRIPT = os.path.join(SCRIPTS, "preflight_worker.py")
_MIB = 1024 * 1024
# Docker and Kubernetes give a container 64 MiB. NCCL's buffers and the batches that a DataLoader's workers
# hand over lie there.
_ENOUGH_SHM_MIB = 1024
# METAFLOW_RUNTIME_ENVIRONMENT -> the decorator whose shared_memory, in MiB, becomes the size of /dev/shm
# (Metaflow 2.19: kubernetes_job.py, kubernetes_jobsets.py, argo_workflows.py, batch_client.py).
_SHM_DECORATORS = {"kubernetes": "kubernetes", "aws-batch": "batch"}


def preflight_spec(spec: LaunchSpec, with_links: bool) -> LaunchSpec:
    """Return the launch that measures the network for `spec`: with the same nodes, processes, port and variables."""
    args = ("links",) if with_links else ()
    own = replace(spec, entrypoint=_SCRIPT, args=args, module=False, options=(), shown_local_ranks=None)
    # All nodes take part and rank by their index, whatever torchrun's own elasticity is to do later.
    return replace(own, max_restarts=0, min_nodes=None, outputs=None)


def as_preflight(error: LaunchFailed) -> LaunchFailed:
    """Return the failure of that launch with words that say what it was; cause and events stay."""
    what = "The preflight failed (@torchrun(preflight=...)); the script was not started on any node."
    return retold(error, type(error), f"{what}\n")


def shm_bytes(path: str = "/dev/shm") -> int | None:  # noqa: S108 - it is looked at, nothing is written there
    """Return the size of the shared memory's file system, or None where there is none."""
    with suppress(OSError):
        status = os.statvfs(path)
        return status.f_blocks * status.f_frsize
    return None


def shm_warning(
    size_bytes: int | None, nproc: int, accelerators: Sequence[str], environ: Mapping[str, str]
) -> str | None:
    """Return what to say of a ``/dev/shm`` that is too small, or None; `environ`, the task's, says where it runs."""
    # One process alone, without an accelerator, shares nothing.
    if size_bytes is None or size_bytes >= _ENOUGH_SHM_MIB * _MIB or (nproc < 2 and not accelerators):
        return None
    decorator = _SHM_DECORATORS.get(environ.get("METAFLOW_RUNTIME_ENVIRONMENT", "local"))
    remedy = (
        f"Write @{decorator}(shared_memory={_ENOUGH_SHM_MIB}) (MiB, part of the step's memory)"
        if decorator
        else "Enlarge it (mount -o remount,size=1G /dev/shm; for a container, docker run --shm-size=1g)"
    )
    return (
        f"warning: /dev/shm has {size_bytes // _MIB} MiB. NCCL and the workers of a DataLoader exchange data there, and a "
        f"full one kills workers with SIGBUS. {remedy}."
    )
