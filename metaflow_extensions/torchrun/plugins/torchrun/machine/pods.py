"""Pods: why one is pending, how old this one is, and whether it is told to stop.

While a pod is pending, the log shows the kubectl command that explains why. The reason stands in the pod's events. A task
may lack the rights to read those; the person who reads its log may have them.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress

from .processes import has_signal


def why_it_waits(node: int, environ: Mapping[str, str] = os.environ) -> str:
    """Return the command that shows why the pod of a node (not the control node) waits; empty outside of Kubernetes.

    Metaflow (2.19) calls a job set's other pods ``worker``, and node 1 is the first of them. JobSet numbers their jobs, and
    Kubernetes labels pods with the names of their jobs.
    """
    job_set = environ.get("METAFLOW_KUBERNETES_JOBSET_NAME")
    if not job_set:
        return ""
    namespace = environ.get("METAFLOW_KUBERNETES_POD_NAMESPACE", "default")
    return f"kubectl -n {namespace} describe pods -l job-name={job_set}-worker-{node - 1}"


def told_to_stop(shell: int) -> str | None:
    """Return why this pod will stop if SIGTERM is pending for its `shell`, see `task/signs`; else None."""
    if not any(has_signal(shell, pending, signal.SIGTERM) for pending in ("SigPnd", "ShdPnd")):
        return None
    return "its pod got SIGTERM (it is deleted, evicted or over its time limit, or its machine drained)"


def age_s(made_with_it: str = "/etc/hostname") -> float:
    """Return the age of this pod or container in seconds; 0 where the system does not say."""
    # containerd, CRI-O and Docker write this file anew for each pod, before its image is pulled, and mount it.
    with suppress(OSError):
        if os.path.ismount(made_with_it):  # else it is the image's
            return max(0.0, time.time() - os.stat(made_with_it).st_mtime)
    return 0.0
