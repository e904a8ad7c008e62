"""Has Kubernetes start the pods of a gang again that end too early, all but the control node's.

Metaflow (``plugins/kubernetes/kubernetes_jobsets.py``, 2.19.39) makes a Job for each pod, with ``backoffLimit: 0``: the first
pod that fails ends the whole gang. With more, the Job brings that one pod again: the same node, task id and attempt.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from .renamed import known

# How often a Job brings its pod again: more often than a gang loses one node, as a rule. There must be an end, since a pod
# that dies before our code runs there comes again even when all others have ended. The pauses grow from 10 s to 6 minutes:
# three hours together. https://kubernetes.io/docs/concepts/workloads/controllers/job/
_TIMES = 30
_WORKER = "worker"  # as Metaflow names the Jobs of all nodes but the control node
_steps: set[str] = set()  # as job sets name them; filled by the main thread before any job set is made


def bring_pods_again(step: str) -> None:
    """Have the job sets of a step bring their pods again."""
    spec: Any = known("metaflow.plugins.kubernetes.kubernetes_jobsets:JobSetSpec")
    if not _steps:
        spec.dump = _with_limit(spec.dump)
    _steps.update((step, step.replace("_", "-")))  # Argo's is sanitized


def _with_limit(dump: Any) -> Any:
    @wraps(dump)
    def dump_with_limit(spec: Any) -> Any:
        if spec.name == _WORKER and spec._kwargs.get("step_name") in _steps:
            spec._kwargs["retries"] = _TIMES
        return dump(spec)

    return dump_with_limit
