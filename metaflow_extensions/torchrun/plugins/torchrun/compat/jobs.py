"""Finds Metaflow's object of the remote job in ``flow.py kubernetes step`` or ``batch step``.

Read in ``plugins/kubernetes`` and ``plugins/aws/batch`` of 2.19.39. All names are private. The job is found in the
frames of the error that ends the process; nothing of Metaflow is replaced. If a name is missing, or if the job could
not be made, nothing is reported about it.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from ..errors import chain


class KubernetesJob(NamedTuple):
    """A job or a job set."""

    api: Any  # Kubernetes' CoreV1Api
    namespace: str
    selector: str  # finds its pods
    first_pod: str | None


class BatchJob(NamedTuple):
    """A job of AWS Batch."""

    client: Any  # boto3's
    id: str


def job_of(error: BaseException | None) -> KubernetesJob | BatchJob | None:
    """Return the job in whose methods the error, its cause or its context was raised."""
    for owner in _owners(error):
        with suppress(AttributeError):
            if type(owner).__name__ == "Batch":
                return BatchJob(owner.job._client, owner.job._id)
            job = owner._job
            label = "jobset.sigs.k8s.io/jobset-name" if hasattr(job, "_jobset") else "job-name"
            api = job._client.get().CoreV1Api()
            return KubernetesJob(api, job._namespace, f"{label}={job._name}", job._pod_name)
    return None


def _owners(error: BaseException | None) -> Iterator[Any]:
    for link in chain(error):
        for frame, _ in traceback.walk_tb(link.__traceback__):
            if type(frame.f_locals.get("self")).__name__ in ("Kubernetes", "Batch"):
                yield frame.f_locals["self"]
