"""Tells what Kubernetes says of the pods of a remote job, where the job is looked after: ``flow.py kubernetes step``.

While a pod waits, that is what keeps it from starting: when the gang has given up, the pod is gone, and its reason with it.
When the job has failed, that is how its control node has ended. `compat.jobs` finds the job. If it is not found, or
Kubernetes does not answer, nothing is said, and nothing else changes.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ..compat.jobs import KubernetesJob, job_of, running_job
from ..errors import GangError, TorchrunError, TorchrunPreempted
from ..gang.messages import CONTROL
from ..gang.view import Word
from ..registry import Registry
from ..task.console import write

_PATIENCE_S = 10.0  # for each request
_EVERY_S = 15.0  # between two looks

# What a container's end is called where the reason is the program's own, or a neighbour's end.
_ORDINARY = ("Completed", "Error", None)
_TIME_IS_UP = "DeadlineExceeded"  # Metaflow (2.19) makes @timeout this limit
_WHOSE_TIME = " (the limit is the step's @timeout, and counts from the start of the pod or container)"
_STARTING = ("ContainerCreating", "PodInitializing", None)
# A pod's conditions whose reason matters, and when: no machine has room for it; it was ended for a reason of the cluster's.
_CONDITIONS = {("PodScheduled", "False"), ("DisruptionTarget", "True")}


class Job:
    """The remote job that this process looks after, as its command line names it."""

    def __init__(self, flow_datastore: Any, step: str, arguments: Sequence[str] = sys.argv) -> None:
        self._flow_datastore, self._step = flow_datastore, step
        self._options = dict(pairwise(arguments))  # those of Metaflow's own making (`CLIArgs`, 2.19)
        # The pods that can't start, also those that have vanished; replaced as a whole, since two threads use it.
        self._waits: dict[str, PodEnd] = {}
        self._said: set[str] = set()

    # --- while it runs ------------------------------------------------------------------------------

    def watch(self) -> None:
        """Print what keeps pods from starting, until the process ends, in a daemon thread."""
        threading.Thread(target=self._watch, name="torchrun-pods", daemon=True).start()

    def _watch(self) -> None:
        while True:
            time.sleep(_EVERY_S)
            with suppress(Exception):  # the API server may refuse, or Metaflow's names may have changed
                write("stderr", self.look())

    def look(self) -> str:
        """Ask once; return the lines on pods that wait for the second time. Many wait for a moment."""
        job = running_job()
        if job is None:
            return ""
        here = {pod.metadata.name: _end_of_pod(pod) for pod in _pods_of(job)}
        waits = {name: end for name, end in here.items() if not end.has_run and not end.is_ordinary}
        stay = [name for name in waits if name in self._waits and name not in self._said]
        self._said.update(stay)
        self._waits = {name: end for name, end in self._waits.items() if name not in here} | waits
        return "".join(f"[torchrun] {waits[name].line()}\n" for name in stay)

    # --- when it has failed -------------------------------------------------------------------------

    def tell(self, error: BaseException) -> str:
        """Return the lines that come after the error of a job that has failed.

        They are stored beside the gang's record, where all commands find them, with the control node's end if it could
        not tell that itself.
        """
        job = job_of(error)
        if job is None:
            return ""
        ends = [_end_of_pod(pod) for pod in sorted(_pods_of(job), key=_node_of)]
        ends += [each for each in self._waits.values() if not any(end.text and end.node == each.node for end in ends)]
        options = self._options
        where = (options["--run-id"], self._step, options["--task-id"])
        registry = Registry(self._flow_datastore, *where, int(options["--retry-count"]))
        recorded = registry.load_view()
        is_known = recorded is not None and recorded.is_over
        told = [each for each in ends if each.text and not each.is_ordinary and (is_known or each.node != CONTROL)]
        lines, kind = [each.line() for each in told], TorchrunPreempted.__name__
        if not is_known:
            gone = _gone(ends, recorded is not None)
            lines, kind = [*gone.message.splitlines(), *lines], type(gone).__name__
        if lines:
            word = Word("\n".join(lines), time.time(), int(options.get("--num-parallel", "1")), kind)
            registry.save_word(word, "job")
        return "".join(f"[torchrun] {line}\n" for line in lines)


def _gone(ends: Sequence[PodEnd], has_joined: bool) -> TorchrunError:
    """Return how the control node ended, which could not report it itself."""
    first = next((each for each in ends if each.node == CONTROL), PodEnd(CONTROL, "task", ""))
    who, text = f"The control node's {first.what}", first.text.removesuffix(".")
    if not has_joined and not first.has_run:
        return GangError(f"{who} did not start: {text or 'Kubernetes has nothing of it'}.")
    if not has_joined and first.is_ordinary and text:
        return GangError(f"{who} failed before it had joined its gang ({text}). Its log says why.")
    why = text or "it was deleted, evicted or killed, or its memory ran out"
    return TorchrunPreempted(f"{who} ended unexpectedly: {why}." + ("" if text else f"\n{TorchrunPreempted.remedy}"))


# --- what Kubernetes says of a pod ------------------------------------------------------------------


@dataclass(frozen=True)
class PodEnd:
    """The end of one node's pod, as Kubernetes reports it."""

    node: int
    what: str  # "pod js-1-control-0-x"
    text: str  # empty if it says nothing useful
    is_ordinary: bool = False  # whether it is no more than an exit code
    has_run: bool = True  # whether its program has begun

    def line(self) -> str:
        """Return it as a line of the log."""
        return f"Kubernetes says of node {self.node}'s {self.what}: {self.text}"


def _pods_of(job: KubernetesJob) -> list[Any]:
    """Return the pods of a job that are there now."""
    found = job.api.list_namespaced_pod(job.namespace, label_selector=job.selector, _request_timeout=_PATIENCE_S)
    return list(found.items)


def _node_of(pod: Any) -> int:
    labels = pod.metadata.labels or {}
    if labels.get("jobset.sigs.k8s.io/replicatedjob-name") != "worker":
        return CONTROL
    return 1 + int(labels["jobset.sigs.k8s.io/job-index"])


def _end_of_pod(pod: Any) -> PodEnd:
    states = [state for each in pod.status.container_statuses or () for state in (each.state, each.last_state)]
    texts = list(dict.fromkeys(_ends_of(pod, states)))
    codes = [f"exit code {state.terminated.exit_code}" for state in states[::2] if state.terminated]
    has_run, name = pod.status.phase != "Pending", pod.metadata.name
    return PodEnd(_node_of(pod), f"pod {name}", "; ".join(texts or codes[:1]), not texts, has_run)


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
