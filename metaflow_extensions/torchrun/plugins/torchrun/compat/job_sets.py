"""Has Kubernetes start the pods of a gang again that end too early, all but the control node's, with which it ends.

Metaflow (``plugins/kubernetes/kubernetes_jobsets.py``, 2.19.39) makes a Job for each pod, with ``backoffLimit: 0``: the first
pod that fails ends the whole gang. With more, the Job brings that one pod again: the same node, task id and attempt. A job
set is done when all its Jobs are (``successPolicy: null``). One whose pod finds no machine, and whose node the gang does
without, would keep it open; so it is done when the control node is, which waits for all nodes that the gang has.
"""

from __future__ import annotations

import json
from functools import wraps
from typing import Any

from .renamed import known

# How often a Job brings its pod again: more often than a gang loses one node, as a rule. There must be an end, since a pod
# that dies before our code runs there comes again even when all others have ended. The pauses grow from 10 s to 6 minutes:
# three hours together. https://kubernetes.io/docs/concepts/workloads/controllers/job/
_TIMES = 30
_MODULE = "metaflow.plugins.kubernetes.kubernetes_jobsets"
_WORKER = "worker"  # as Metaflow names the Jobs of all nodes but the control node
# https://jobset.sigs.k8s.io/docs/concepts/#success-policies
_DONE_WITH_CONTROL = {"operator": "Any", "targetReplicatedJobs": ["control"]}
_steps: set[str] = set()  # as job sets name them; filled by the main thread before any job set is made


def bring_pods_again(step: str) -> None:
    """Have the job sets of a step bring their pods again."""
    jobs, job_set, of_argo = (
        known(f"{_MODULE}:{name}") for name in ("JobSetSpec", "KubernetesJobSet", "KubernetesArgoJobSet")
    )
    if not _steps:
        jobs.dump = _with_limit(jobs.dump)
        job_set.dump, of_argo.dump = _done_with_control(job_set.dump), _done_with_control(of_argo.dump)
    _steps.update((step, step.replace("_", "-")))  # Argo's is sanitized


def _with_limit(dump: Any) -> Any:
    @wraps(dump)
    def dump_with_limit(spec: Any) -> Any:
        if spec.name == _WORKER and spec._kwargs.get("step_name") in _steps:
            spec._kwargs["retries"] = _TIMES
        return dump(spec)

    return dump_with_limit


def _done_with_control(dump: Any) -> Any:
    @wraps(dump)
    def dump_with_policy(job_set: Any) -> Any:
        dumped = dump(job_set)
        if job_set.worker._kwargs.get("step_name") not in _steps:
            return dumped
        if isinstance(dumped, str):  # Argo's is YAML already, of which JSON is a part
            return dumped.replace("successPolicy: null", f"successPolicy: {json.dumps(_DONE_WITH_CONTROL)}")
        dumped["spec"]["successPolicy"] = _DONE_WITH_CONTROL
        return dumped

    return dump_with_policy
