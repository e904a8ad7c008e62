"""Reports that the control node of a remote job is gone, and what Kubernetes says of its pods, where the job is looked after.

That process is ``flow.py kubernetes step``; `compat.jobs` finds the job. If it is not found, or Kubernetes does not
answer, nothing is reported, and nothing else changes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from ..channel.registry import Registry
from ..compat.jobs import job_of
from ..errors import GangError, TorchrunPreempted
from ..gang.messages import CONTROL
from ..gang.view import Word
from .job_ends import PATIENCE_S, End, of_kubernetes
from .pending_pods import PendingPods


class Job:
    """The remote job that this process looks after, as its command line names it."""

    def __init__(self, flow_datastore: Any, step: str, arguments: Sequence[str] = sys.argv) -> None:
        self._flow_datastore, self._step = flow_datastore, step
        self._options = dict(pairwise(arguments))  # those of Metaflow's own making (`CLIArgs`, 2.19)
        self._pending = PendingPods()

    def watch(self) -> None:
        """Print what keeps pods from starting, while they wait."""
        self._pending.watch()

    def tell(self, error: BaseException) -> str:
        """Return the lines that come after the error of a job that has failed.

        They are stored beside the gang's record, where all commands find them, with the control node's end if it could
        not tell that itself.
        """
        job = job_of(error)
        if job is None:
            return ""
        ends = list(of_kubernetes(job))
        known = {each.node for each in ends if each.text}
        ends += [each for each in self._pending.ends if each.node not in known]
        options = self._options
        where = (options["--run-id"], self._step, options["--task-id"])
        registry = Registry(self._flow_datastore, *where, int(options["--retry-count"]))
        recorded = registry.await_view(PATIENCE_S)
        is_known = recorded is not None and recorded.is_over
        lines = [
            each.line() for each in ends if each.text and not each.is_ordinary and (is_known or each.node != CONTROL)
        ]
        texts, kind = lines, TorchrunPreempted.__name__
        if not is_known:
            gone, kind = _told_itself(registry) or _gone(ends, recorded is not None)
            texts = [*gone, *lines]
        if texts:
            word = Word("\n".join(texts), time.time(), int(options.get("--num-parallel", "1")), kind)
            registry.save_word(word, "job", PATIENCE_S)
        return "".join(f"[torchrun] {line}\n" for line in texts)


def _told_itself(registry: Registry) -> tuple[list[str], str] | None:
    """Return the error that the control node stored before its gang had a record, and its class."""
    record = registry.peek(PATIENCE_S)
    if record is None or record.error is None:
        return None
    return record.error.message.splitlines(), type(record.error).__name__


def _gone(ends: Sequence[End], has_joined: bool) -> tuple[list[str], str]:
    """Return lines on how the control node ended, which could not report it itself, and the class of the error."""
    of_control = [each for each in ends if each.node == CONTROL]
    first = next((each for each in of_control if each.text), of_control[0] if of_control else None)
    who = f"The control node's {first.what if first else 'task'}"
    text = first.text.removesuffix(".") if first else ""
    if not has_joined and not (first and first.has_run):
        return [f"{who} did not start: {text or 'Kubernetes has nothing of it'}."], GangError.__name__
    if not has_joined and first and first.is_ordinary and text:
        return [f"{who} failed before it had joined its gang ({text}). Its log says why."], GangError.__name__
    if text:
        return [f"{who} ended unexpectedly: {text}."], TorchrunPreempted.__name__
    why = "it was deleted, evicted or killed, or its memory ran out"
    return [f"{who} ended unexpectedly: {why}.", TorchrunPreempted.remedy], TorchrunPreempted.__name__
