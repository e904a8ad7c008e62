"""Reports why Kubernetes or AWS Batch says that a job has failed, in the process that looks after the job.

That process is ``flow.py kubernetes step`` or ``batch step``; `compat.jobs` finds the job. If it is not found, or the
backend does not answer, nothing is reported, and nothing else changes.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ..channel.registry import Registry
from ..compat.jobs import BatchJob, KubernetesJob, job_of
from ..errors import GangError, TorchrunPreempted
from ..gang.protocol import CONTROL
from ..records.vanished import Word, has_ended

_PATIENCE_S = 10.0  # for each request
_BATCH_LIMIT = 100  # jobs in one request of DescribeJobs
# What a container's end is called where the reason is the program's own, or a neighbour's end.
_ORDINARY = ("Completed", "Error", None)
_KILLED = 128 + signal.SIGKILL
_STARTING = ("ContainerCreating", "PodInitializing", None)


@dataclass(frozen=True)
class End:
    """The end of one node's pod or container, as the backend reports it."""

    node: int
    what: str  # "pod js-1-control-0-x", "container"
    text: str  # empty if it says nothing useful
    is_ordinary: bool = False  # whether it is no more than an exit code
    has_run: bool = True  # whether its program has begun


class Job:
    """The remote job that this process looks after, as its command line names it."""

    def __init__(self, flow_datastore: Any, step: str, arguments: Sequence[str] = sys.argv) -> None:
        self._flow_datastore, self._step = flow_datastore, step
        self._options = dict(pairwise(arguments))  # those of Metaflow's own making (`CLIArgs`, 2.19)

    def tell(self, error: BaseException) -> str:
        """Return the lines that come after the error of a job that has failed.

        They are stored beside the gang's record, where all commands find them, with the control node's end if it could
        not tell that itself.
        """
        name, ends = told(error)
        if not name:
            return ""
        options = self._options
        where = (options["--run-id"], self._step, options["--task-id"])
        registry = Registry(self._flow_datastore, *where, int(options["--retry-count"]))
        recorded = registry.await_snapshot(_PATIENCE_S)
        is_known = has_ended(recorded)
        lines = [
            f"{name} says of node {each.node}'s {each.what}: {each.text}"
            for each in ends
            if each.text and not each.is_ordinary and (is_known or each.node != CONTROL)
        ]
        texts, kind = lines, TorchrunPreempted.__name__
        if not is_known:
            gone, kind = _told_itself(registry) or _gone(ends, has_joined=recorded is not None)
            texts = [*gone, *lines]
        if texts:
            word = Word("\n".join(texts), time.time(), int(options.get("--num-parallel", "1")), kind)
            registry.save_word(word, "job", _PATIENCE_S)
        return "".join(f"[torchrun] {line}\n" for line in texts)


def _told_itself(registry: Registry) -> tuple[list[str], str] | None:
    """Return the error that the control node stored before its gang had a record, and its class."""
    record = registry.peek(_PATIENCE_S)
    if record is None or record.error is None:
        return None
    return record.error.message.splitlines(), type(record.error).__name__


def _gone(ends: Sequence[End], has_joined: bool) -> tuple[list[str], str]:
    """Return lines on how the control node ended, which could not report it itself, and the class of the error."""
    of_control = [each for each in ends if each.node == CONTROL]
    first = next((each for each in of_control if each.text), of_control[0] if of_control else None)
    who = f"The control node's {first.what if first else 'task'}"
    text = first.text.removesuffix(".") if first else ""
    if not has_joined and (first is None or not first.has_run):
        return [f"{who} did not start: {text or 'the backend has nothing of it'}."], GangError.__name__
    if not has_joined and first and first.is_ordinary and text:
        said = f"{who} failed before it had joined its gang ({text}). Its log says why."
        return [said], GangError.__name__
    if text:
        return [f"{who} ended unexpectedly: {text}."], TorchrunPreempted.__name__
    why = "it was deleted, evicted or killed, or its memory ran out"
    return [f"{who} ended unexpectedly: {why}.", TorchrunPreempted.remedy], TorchrunPreempted.__name__


def told(error: BaseException) -> tuple[str, list[End]]:
    """Return the backend's name and its report on each node; an empty name if the error holds no job."""
    job = job_of(error)
    if isinstance(job, KubernetesJob):
        return "Kubernetes", list(_of_kubernetes(job))
    return ("AWS Batch", list(_of_batch(job))) if isinstance(job, BatchJob) else ("", [])


# --- Kubernetes -----------------------------------------------------------------------------------


def _of_kubernetes(job: KubernetesJob) -> Iterator[End]:
    found = job.api.list_namespaced_pod(job.namespace, label_selector=job.selector, _request_timeout=_PATIENCE_S)
    pods = found.items
    first, of_control = job.first_pod, [pod.metadata.name for pod in pods if _node_of(pod) == CONTROL]
    if first and first not in of_control:
        others = "".join(f", and pod {name} came in its place" for name in of_control)
        yield End(CONTROL, f"pod {first}", f"it was deleted or evicted{others}" if others else "")
    for pod in sorted(pods, key=_node_of):
        texts = list(dict.fromkeys(_ends_of(pod)))
        yield End(
            _node_of(pod), f"pod {pod.metadata.name}", "; ".join(texts) or _exit_of(pod), not texts, _has_run(pod)
        )


def _node_of(pod: Any) -> int:
    labels = pod.metadata.labels or {}
    if labels.get("jobset.sigs.k8s.io/replicatedjob-name") != "worker":
        return CONTROL
    return 1 + int(labels["jobset.sigs.k8s.io/job-index"])


def _ends_of(pod: Any) -> Iterator[str]:
    """Return what ended a pod or keeps it from starting, as far as it is not its program's own doing."""
    for each in (pod.status, *(each for each in pod.status.conditions or () if each.type == "DisruptionTarget")):
        if each.reason:
            yield f"{each.reason}: {each.message}" if each.message else each.reason
    for container in pod.status.container_statuses or ():
        for state in (container.state, container.last_state):
            if state.terminated and state.terminated.reason not in _ORDINARY:
                yield f"{state.terminated.reason} (exit code {state.terminated.exit_code})"
            if state.waiting and state.waiting.reason not in _STARTING:
                yield f"it waits: {state.waiting.reason}"


def _has_run(pod: Any) -> bool:
    """Return whether a container of the pod has run; True where Kubernetes does not say."""
    states = [state for each in pod.status.container_statuses or () for state in (each.state, each.last_state)]
    return not states or any(state.running or state.terminated for state in states)


def _exit_of(pod: Any) -> str:
    ended = [each.state.terminated for each in pod.status.container_statuses or () if each.state.terminated]
    return f"exit code {ended[0].exit_code}" if ended else ""


# --- AWS Batch ------------------------------------------------------------------------------------


def _of_batch(job: BatchJob) -> Iterator[End]:
    (main,) = job.client.describe_jobs(jobs=[job.id])["jobs"]
    num_nodes = main.get("nodeProperties", {}).get("numNodes", 1)
    ids = [f"{job.id}#{node}" for node in range(num_nodes)] if num_nodes > 1 else [job.id]
    for begin in range(0, num_nodes, _BATCH_LIMIT):
        found = {
            each["jobId"]: each for each in job.client.describe_jobs(jobs=ids[begin : begin + _BATCH_LIMIT])["jobs"]
        }
        for node, name in list(enumerate(ids))[begin : begin + _BATCH_LIMIT]:
            yield _end_of(node, found.get(name, {}))


def _end_of(node: int, job: dict[str, Any]) -> End:
    container = job.get("container", {})
    code = container.get("exitCode")
    exit_code = "" if code is None else f" (exit code {code})"
    reason = container.get("reason")
    was_killed = code == _KILLED  # only a SIGKILL gives this code
    known = reason or job.get("statusReason") or ("it was killed by SIGKILL" if was_killed else "it ended")
    text = f"{known}{exit_code}" if job.get("status") == "FAILED" else ""
    return End(node, "container", text, not (reason or was_killed), code is not None or "startedAt" in job)
