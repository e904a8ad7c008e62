"""Where to look for a node that does not come, on Kubernetes: what holds up a pod stands in its events.

A task can't ask the cluster for them: its pod's account need not have the rights. Who reads its log may have them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping


def why_it_waits(node: int, environ: Mapping[str, str] = os.environ) -> str:
    """Return the command that tells why the pod of a node other than the control node waits; empty elsewhere.

    Metaflow (2.19) calls a job set's other pods ``worker``, and node 1 is the first of them. JobSet numbers their jobs, and
    Kubernetes labels pods with the names of their jobs.
    """
    job_set = environ.get("METAFLOW_KUBERNETES_JOBSET_NAME")
    if not job_set:
        return ""
    namespace = environ.get("METAFLOW_KUBERNETES_POD_NAMESPACE", "default")
    return f"kubectl -n {namespace} describe pods -l job-name={job_set}-worker-{node - 1}"
