"""Finds the gangs of a run, and their records, in the datastore.

It reads only the datastore, so it does not need the run's metadata. Finding a step's gangs takes two listings for any
number of nodes. The names of tasks and files are those of Metaflow 2.19.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from ..channel.registry import Registry
from ..compat.stored import Storage
from ..gang.view import GangView
from .page import Place
from .program import flow_program

# How Metaflow derives the names of other nodes' tasks from the control task's, and the node of number 0 there:
# `_local_multinode_control_task_step_func`, `KubernetesDecorator.task_pre_step`, `BatchJob.execute`, and
# `jobset_input_paths` of Argo.
_NAMES = (
    (re.compile(r"(.+)_node_(\d+)"), "{}", 0),
    (re.compile(r"worker-(.+)-(\d+)"), "control-{}-0", 1),
    (re.compile(r"(.+)-worker-(\d+)"), "{}", 1),
    (re.compile(r"(.+)-node-(\d+)"), "control-{}", 0),
)
# Files of a task's end: the task writes the first (`TaskDataStore.METADATA_DONE_SUFFIX`), the process that has started it
# writes the second (`Worker.terminate`). A file's name starts with its attempt.
_DONE, _RUNTIME = "DONE.lock", "runtime"
_ENDED, _BEGUN = (_DONE, _RUNTIME), "task_begin"
_ATTEMPT = re.compile(r"(\d+)\.(.+)")


def place_of(task: str, tasks: set[str]) -> tuple[str, int]:
    """Return the control task and the node of `task`; `tasks` are all tasks of the step."""
    for name, control, first in _NAMES:
        match = name.fullmatch(task)
        if match is not None:
            found = control.format(match[1])
            # On AWS Batch the control task's name starts with "control-", but only on a run.
            found = found if found in tasks or match[1] not in tasks else match[1]
            return found, int(match[2]) + first
    return task, 0


@dataclass(frozen=True)
class StoredGang:
    """One gang of a step: its tasks, and the names of their files, by attempt."""

    flow: str
    run: str
    step: str
    control_task: str
    tasks: dict[int, str]  # by node
    files: dict[str, dict[int, set[str]]]  # of all tasks of the step, by task and attempt

    @property
    def last_attempt(self) -> int:
        """The highest attempt with a file of any task."""
        return max((attempt for task in self.tasks.values() for attempt in self.files[task]), default=0)

    def has(self, task: str, attempt: int, name: str) -> bool:
        """Return whether a task has a file."""
        return name in self.files.get(task, {}).get(attempt, set())

    def place(self, attempt: int) -> Place:
        """Return the place of an attempt, with Metaflow's facts about it."""
        is_done = any(self.has(self.control_task, attempt, name) for name in _ENDED)
        names = (self.flow, self.run, self.step, self.control_task, self.tasks)
        return Place(*names, attempt, self.last_attempt, is_done)


class StoredGangs:
    """The gangs in a flow's datastore."""

    def __init__(self, flow_datastore: Any) -> None:
        self.datastore = flow_datastore  # metaflow.datastore.FlowDataStore
        self.storage = Storage(flow_datastore)

    @property
    def program(self) -> str:
        """The command line of this flow's commands for this datastore."""
        option = "" if self.storage.is_default else f"--datastore {self.storage.kind} "
        return f"{flow_program()} {option}torchrun"

    def steps(self, run: str) -> list[str]:
        """Return the steps of a run that have begun."""
        return sorted(name for name, _ in self.storage.names([self.storage.path(run)]))

    def gangs(self, run: str, step: str) -> list[StoredGang]:
        """Return the gangs of a step in one run, several in a foreach."""
        tasks = {name for name, _ in self.storage.names([self.storage.path(run, step)])}
        files: dict[str, dict[int, set[str]]] = {task: {} for task in tasks}
        for name, path in self.storage.names([self.storage.path(run, step, task) for task in sorted(tasks)]):
            match = _ATTEMPT.fullmatch(name)
            if match is not None:
                task = self.storage.split(path)[-2]
                files[task].setdefault(int(match[1]), set()).add(match[2])
        found: dict[str, dict[int, str]] = {}
        for task in tasks:
            control, node = place_of(task, tasks)
            found.setdefault(control, {})[node] = task
        flow = self.datastore.flow_name
        # `resume` gives clones of other nodes' tasks their names, and that of the control task a new one (2.19). A clone has
        # files of its end, but none of its start.
        found = {
            control: nodes
            for control, nodes in found.items()
            if 0 in nodes or any(_BEGUN in files[task].get(0, ()) for task in nodes.values())
        }
        return [
            StoredGang(flow, run, step, control, dict(sorted(found[control].items())), files)
            for control in sorted(found, key=lambda task: (int(task), "") if task.isdecimal() else (math.inf, task))
        ]

    def registry(self, gang: StoredGang, attempt: int) -> Registry:
        """Return what is stored of an attempt."""
        return Registry(self.datastore, gang.run, gang.step, gang.control_task, attempt)

    def view(self, gang: StoredGang, attempt: int) -> GangView | None:
        """Return the view that the control node has stored of an attempt, or None."""
        return self.registry(gang, attempt).load_view()

    def path(self, gang: StoredGang, task: str, attempt: int, name: str) -> str:
        """Return the path of a task's file."""
        return self.storage.path(gang.run, gang.step, task, f"{attempt}.{name}")
