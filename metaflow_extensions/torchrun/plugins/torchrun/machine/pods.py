"""Pods: why one is pending, and whether this one is told to stop.

While a pod is pending, the log shows the kubectl command that explains why. The reason stands in the pod's events. A task
may lack the rights to read those; the person who reads its log may have them.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping

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
