"""What Kubernetes says of the end of each node of a remote job, or of what keeps it from starting."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..compat.jobs import KubernetesJob
from ..gang.messages import CONTROL

PATIENCE_S = 10.0  # for each request
# What a container's end is called where the reason is the program's own, or a neighbour's end.
_ORDINARY = ("Completed", "Error", None)
_TIME_IS_UP = "DeadlineExceeded"  # Metaflow (2.19) makes @timeout this limit
_WHOSE_TIME = " (the limit is the step's @timeout, and counts from the start of the pod or container)"
_STARTING = ("ContainerCreating", "PodInitializing", None)
# A pod's conditions whose reason matters, and when: no machine has room for it; it was ended for a reason of the cluster's.
_CONDITIONS = {("PodScheduled", "False"), ("DisruptionTarget", "True")}


@dataclass(frozen=True)
class End:
    """The end of one node's pod, as Kubernetes reports it."""

    node: int
    what: str  # "pod js-1-control-0-x"
    text: str  # empty if it says nothing useful
    is_ordinary: bool = False  # whether it is no more than an exit code
    has_run: bool = True  # whether its program has begun

    def line(self) -> str:
        """Return it as a line of the log."""
        return f"Kubernetes says of node {self.node}'s {self.what}: {self.text}"


def of_kubernetes(job: KubernetesJob) -> Iterator[End]:
    """Yield the report on each node, by the states of their pods."""
    pods = _pods_of(job)
    first, of_control = job.first_pod, [pod.metadata.name for pod in pods if _node_of(pod) == CONTROL]
    if first and first not in of_control:
        others = "".join(f", and pod {name} came in its place" for name in of_control)
        yield End(CONTROL, f"pod {first}", f"it was deleted or evicted{others}" if others else "")
    yield from map(_end_of_pod, sorted(pods, key=_node_of))


def pending(job: KubernetesJob) -> dict[str, End | None]:
    """Return the pods of a job by name, each with what keeps it from starting; None if nothing does."""
    ends = {pod.metadata.name: (_end_of_pod(pod), pod.status.phase) for pod in _pods_of(job)}
    return {name: end if phase == "Pending" and not end.is_ordinary else None for name, (end, phase) in ends.items()}


def _pods_of(job: KubernetesJob) -> list[Any]:
    """Return the pods of a job that are there now."""
    found = job.api.list_namespaced_pod(job.namespace, label_selector=job.selector, _request_timeout=PATIENCE_S)
    return list(found.items)


def _node_of(pod: Any) -> int:
    labels = pod.metadata.labels or {}
    if labels.get("jobset.sigs.k8s.io/replicatedjob-name") != "worker":
        return CONTROL
    return 1 + int(labels["jobset.sigs.k8s.io/job-index"])


def _end_of_pod(pod: Any) -> End:
    states = [state for each in pod.status.container_statuses or () for state in (each.state, each.last_state)]
    texts = list(dict.fromkeys(_ends_of(pod, states)))
    codes = [f"exit code {state.terminated.exit_code}" for state in states[::2] if state.terminated]
    # Where Kubernetes does not say, it has run.
    has_run = pod.status.phase != "Pending" and (
        not states or any(state.running or state.terminated for state in states)
    )
    return End(_node_of(pod), f"pod {pod.metadata.name}", "; ".join(texts or codes[:1]), not texts, has_run)


def _ends_of(pod: Any, states: list[Any]) -> Iterator[str]:
    """Yield what ended a pod or keeps it from starting, as far as it is not its program's own doing."""
    conditions = [each for each in pod.status.conditions or () if (each.type, each.status) in _CONDITIONS]
    for each in (pod.status, *conditions):
        if each.reason:
            whose = _WHOSE_TIME if each.reason == _TIME_IS_UP else ""
            yield (f"{each.reason}: {each.message}" if each.message else each.reason) + whose
    for state in states:
        if state.terminated and state.terminated.reason not in _ORDINARY:
            yield f"{state.terminated.reason} (exit code {state.terminated.exit_code})"
        if state.waiting and state.waiting.reason not in _STARTING:
            more = f": {state.waiting.message}" if state.waiting.message else ""
            yield f"it waits: {state.waiting.reason}{more}"
