"""Private names of Metaflow's jobs on Kubernetes: finds the one that a process looks after, and has its pods started again.

Read in ``plugins/kubernetes`` of 2.19.39.
"""

from __future__ import annotations

import json
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import wraps
from types import FrameType
from typing import Any, NamedTuple

from ..errors import chain
from .renamed import known

# --- the job that ``flow.py kubernetes step`` looks after ---------------------------------------------
# It is found in the frames of the main thread, which waits for it, or of the error that ends the process; nothing of
# Metaflow is replaced. If the job could not be made, nothing is reported about it.


class KubernetesJob(NamedTuple):
    """A job or a job set."""

    api: Any  # Kubernetes' CoreV1Api
    namespace: str
    selector: str  # finds its pods


def job_of(error: BaseException | None) -> KubernetesJob | None:
    """Return the job in whose methods the error, its cause or its context was raised."""
    return _first_job(_frames_of(error))


def running_job() -> KubernetesJob | None:
    """Return the job that the main thread waits for; any thread may call this."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return _first_job(frame for frame, _ in traceback.walk_stack(frame)) if frame is not None else None


def _first_job(frames: Iterable[FrameType]) -> KubernetesJob | None:
    owners: Iterator[Any] = (frame.f_locals.get("self") for frame in frames)
    for owner in (each for each in owners if type(each).__name__ == "Kubernetes"):
        with suppress(AttributeError):
            job = owner._job
            label = "jobset.sigs.k8s.io/jobset-name" if hasattr(job, "_jobset") else "job-name"
            api = job._client.get().CoreV1Api()
            return KubernetesJob(api, job._namespace, f"{label}={job._name}")
    return None


def _frames_of(error: BaseException | None) -> Iterator[FrameType]:
    for link in chain(error):
        yield from (frame for frame, _ in traceback.walk_tb(link.__traceback__))


# --- the job sets that this process makes -------------------------------------------------------------
# Metaflow makes a Job for each pod, with ``backoffLimit: 0``: the first pod that fails ends the whole gang. With more,
# the Job brings that one pod again: the same node, task id and attempt. The control node's is not, since with it the gang
# ends. A job set is done when all its Jobs are (``successPolicy: null``). One whose pod finds no machine, and whose node
# the gang does without, would keep it open; so it is done when the control node is, which waits for all that the gang has.

# How often a Job brings its pod again: more often than a gang loses one node, as a rule. There must be an end, since a pod
# that dies before our code runs there comes again even when all others have ended. The pauses grow from 10 s to 6 minutes:
# three hours together. https://kubernetes.io/docs/concepts/workloads/controllers/job/
_TIMES = 30
# https://jobset.sigs.k8s.io/docs/concepts/#success-policies
_DONE_WITH_CONTROL = {"operator": "Any", "targetReplicatedJobs": ["control"]}
_steps: set[str] = set()  # as job sets name them; filled by the main thread before any job set is made


def bring_pods_again(step: str) -> None:
    """Have the job sets of a step bring their pods again."""
    if not _steps:
        for name in ("KubernetesJobSet", "KubernetesArgoJobSet"):
            job_set = known(f"metaflow.plugins.kubernetes.kubernetes_jobsets:{name}")
            job_set.dump = _with_pods_again(job_set.dump)
    _steps.update((step, step.replace("_", "-")))  # Argo's is sanitized


def _with_pods_again(dump: Any) -> Any:
    @wraps(dump)
    def dump_with_pods_again(job_set: Any) -> Any:
        spec = job_set.worker._kwargs  # of all nodes but the control node
        if spec.get("step_name") not in _steps:
            return dump(job_set)
        spec["retries"] = _TIMES
        dumped = dump(job_set)
        if isinstance(dumped, str):  # Argo's is YAML already, of which JSON is a part
            return dumped.replace("successPolicy: null", f"successPolicy: {json.dumps(_DONE_WITH_CONTROL)}")
        dumped["spec"]["successPolicy"] = _DONE_WITH_CONTROL
        return dumped

    return dump_with_pods_again
