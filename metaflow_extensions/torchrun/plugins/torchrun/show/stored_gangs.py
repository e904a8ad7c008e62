"""Finds the gangs of a run, and their records, in the datastore.

It reads only the datastore, so it does not need the run's metadata. Finding a step's gangs takes two listings for any
number of nodes. The names of tasks and files are those of Metaflow 2.19.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any

from ..channel.registry import Registry
from ..compat.datastore import Storage
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
_ENDED = (_DONE, _RUNTIME)
# A task cloned by `resume` (`clone_task_helper`, 2.19) has files of its end, but none of its start. It has the origin's
# artifacts (`TaskDataStore.METADATA_DATA_SUFFIX`), and no logs or records. An artifact of the control task lists the tasks
# of all nodes, each as run, step and task.
_BEGUN = "task_begin"
_OF_CLONE = {"data.json", _DONE}
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
    clone: tuple[str, str] | None = None  # run and control task of the requested clone; this gang is its origin

    def is_named(self, task: str) -> bool:
        """Return whether a task is one of this gang's, or the control task of its clone."""
        return task in self.tasks.values() or (self.clone is not None and task == self.clone[1])

    @property
    def asked_run(self) -> str:
        """The requested run, which may be a clone of this gang's run."""
        return self.run if self.clone is None else self.clone[0]

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
        return Place(*names, attempt, self.last_attempt, is_done, self.clone)


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
        """Return the gangs of a step, several in a foreach; instead of clones by `resume` their origins."""
        found = self._gangs(run, step)
        clones = {gang.control_task: tasks for gang in found if (tasks := self._origin(gang))}
        # The clones of the other nodes keep their tasks' names, with the name of a control task that this run lacks.
        cloned = {pathspec.split("/")[-1] for tasks in clones.values() for pathspec in tasks}
        return [
            self._origin_of(gang, clones[gang.control_task]) if gang.control_task in clones else gang
            for gang in found
            if gang.control_task in clones or 0 in gang.tasks or not cloned.issuperset(gang.tasks.values())
        ]

    def _origin(self, gang: StoredGang) -> list[str]:
        """Return the original tasks of a cloned gang, each as run, step and task; empty if the gang is no clone."""
        files = gang.files.get(gang.control_task, {}).get(0, set())
        if not files >= _OF_CLONE or _BEGUN in files:
            return []
        tasks = self.storage.tasks_of((gang.run, gang.step, gang.control_task))
        return [] if not tasks or tasks[0].split("/")[0] == gang.run else tasks

    def _origin_of(self, clone: StoredGang, tasks: list[str]) -> StoredGang:
        """Return the origin of a cloned gang, or the clone itself if nothing is left of the origin."""
        run, step, control_task = tasks[0].split("/")
        found = [gang for gang in self._gangs(run, step) if gang.control_task == control_task]
        return replace(found[0], clone=(clone.run, clone.control_task)) if found else clone

    def _gangs(self, run: str, step: str) -> list[StoredGang]:
        """Return the gangs of a step in one run, clones included."""
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
