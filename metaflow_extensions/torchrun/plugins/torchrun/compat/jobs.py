"""Finds Metaflow's object of the remote job in ``flow.py kubernetes step`` or ``batch step``.

Read in ``plugins/kubernetes`` and ``plugins/aws/batch`` of 2.19.39. All names are private. The job is found in the
frames of the main thread, which waits for it, or of the error that ends the process; nothing of Metaflow is replaced.
If the job could not be made, nothing is reported about it.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Iterable, Iterator
from contextlib import suppress
from types import FrameType
from typing import Any, NamedTuple

from ..errors import chain


class KubernetesJob(NamedTuple):
    """A job or a job set."""

    api: Any  # Kubernetes' CoreV1Api
    namespace: str
    selector: str  # finds its pods
    first_pod: str | None


class BatchJob(NamedTuple):
    """A job of AWS Batch, of which no more is asked."""


def job_of(error: BaseException | None) -> KubernetesJob | BatchJob | None:
    """Return the job in whose methods the error, its cause or its context was raised."""
    return _first_job(_frames_of(error))


def running_job() -> KubernetesJob | BatchJob | None:
    """Return the job that the main thread waits for; any thread may call this."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return _first_job(frame for frame, _ in traceback.walk_stack(frame)) if frame is not None else None


def _first_job(frames: Iterable[FrameType]) -> KubernetesJob | BatchJob | None:
    owners: Iterator[Any] = (frame.f_locals.get("self") for frame in frames)
    for owner in (each for each in owners if type(each).__name__ in ("Kubernetes", "Batch")):
        with suppress(AttributeError):
            if type(owner).__name__ == "Batch":
                return BatchJob()
            job = owner._job
            label = "jobset.sigs.k8s.io/jobset-name" if hasattr(job, "_jobset") else "job-name"
            api = job._client.get().CoreV1Api()
            return KubernetesJob(api, job._namespace, f"{label}={job._name}", job._pod_name)
    return None


def _frames_of(error: BaseException | None) -> Iterator[FrameType]:
    for link in chain(error):
        yield from (frame for frame, _ in traceback.walk_tb(link.__traceback__))
