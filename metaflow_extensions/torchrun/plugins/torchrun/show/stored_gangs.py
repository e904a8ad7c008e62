"""Finds the gangs of a run, and their records, in the datastore.

It reads only the datastore, so it does not need the run's metadata. Finding a step's gangs takes two listings for any
number of nodes. The names of tasks and files are those of Metaflow 2.19.
"""

from __future__ import annotations

import math
import re
import shlex
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from ..compat.cli import failed_task
from ..compat.datastore import Storage
from ..gang.view import GangView
from ..registry import Registry
from .page import Place
from .parts import printable

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
_DONE = "DONE.lock"
_ENDED = (_DONE, "runtime")
# A task cloned by `resume` (`clone_task_helper`, 2.19) has files of its end, but none of its start. It has the origin's
# artifacts (`TaskDataStore.METADATA_DATA_SUFFIX`), and no logs or records. An artifact of the control task lists the tasks
# of all nodes, each as run, step and task.
_BEGUN = "task_begin"
_OF_CLONE = {"data.json", _DONE}
_ATTEMPT = re.compile(r"(\d+)\.(.+)")


def flow_program() -> str:
    """Return how the flow is called, with its file as it was typed: the folder may be another.

    Metaflow (2.19) gives a task the same name; in a container the file lies in the current folder.
    """
    return f"python {shlex.quote(sys.argv[0])}"


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
class StoredGang(Place):
    """One attempt of a gang, with the files of its step's tasks; of a clone by `resume` it is the origin."""

    files: dict[str, dict[int, set[str]]] = field(default_factory=dict)  # their names, by task and attempt

    def has(self, task: str, name: str) -> bool:
        """Return whether a task has a file of this attempt."""
        return name in self.files[task].get(self.attempt, ())

    def of_attempt(self, attempt: int) -> StoredGang:
        """Return another attempt of the gang."""
        files = self.files.get(self.control_task, {}).get(attempt, set())
        return replace(self, attempt=attempt, is_done=not files.isdisjoint(_ENDED))


class StoredGangs:
    """The gangs in a flow's datastore."""

    def __init__(self, flow_datastore: Any) -> None:
        self.datastore = flow_datastore  # metaflow.datastore.FlowDataStore
        self.storage = Storage(flow_datastore)
        option = "" if self.storage.is_default else f"--datastore {self.storage.kind} "
        # The command line of this flow's commands for this datastore.
        self.program = f"{flow_program()} {option}torchrun"

    def steps(self, run: str) -> list[str]:
        """Return the steps of a run that have begun."""
        return sorted(name for name, _ in self.storage.names([self.storage.path(run)]))

    def gangs(self, run: str, step: str) -> list[StoredGang]:
        """Return the last attempts of a step's gangs, several in a foreach; instead of clones by `resume` their origins."""
        found = [(gang, self._origin(gang)) for gang in self._gangs(run, step)]
        has_clones = any(origin for _, origin in found)
        # The clones of other nodes keep their tasks' names, with the name of a control task that this run lacks.
        return [origin or gang for gang, origin in found if 0 in gang.tasks or not has_clones]

    def again(self, gang: StoredGang) -> StoredGang:
        """Return a gang's attempt with the files that it has now."""
        found = [each for each in self.gangs(gang.run, gang.step) if each.control_task == gang.control_task]
        return found[0].of_attempt(gang.attempt) if found else gang

    def _origin(self, gang: StoredGang) -> StoredGang | None:
        """Return the origin of a cloned gang; None if the gang is no clone, or if nothing is left of the origin."""
        files = gang.files.get(gang.control_task, {}).get(0, set())
        if not files >= _OF_CLONE or _BEGUN in files:
            return None
        for task in self.storage.tasks_of((gang.run, gang.step, gang.control_task))[:1]:
            run, step, control_task = task.split("/")
            for origin in self._gangs(run, step) if run != gang.run else ():
                if origin.control_task == control_task:
                    return replace(origin, clone=(gang.run, gang.control_task))
        return None

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
        gangs = []
        for control in sorted(found, key=lambda task: (int(task), "") if task.isdecimal() else (math.inf, task)):
            own = dict(sorted(found[control].items()))
            last = max((attempt for task in own.values() for attempt in files[task]), default=0)
            place = self.datastore.flow_name, run, step, control, own
            gangs.append(StoredGang(*place, last_attempt=last, program=self.program, files=files).of_attempt(last))
        return gangs

    def registry(self, gang: StoredGang) -> Registry:
        """Return what is stored of an attempt."""
        return Registry(self.datastore, gang.run, gang.step, gang.control_task, gang.attempt)

    def view(self, gang: StoredGang) -> GangView | None:
        """Return the view that the control node has stored of an attempt, or None; of one that may run as of now."""
        view = self.registry(gang).load_view()
        return view if view is None or gang.is_over or not view.began else view.at(time.time() - view.began)

    def path(self, gang: StoredGang, task: str, name: str) -> str:
        """Return the path of a task's file."""
        return self.storage.path(gang.run, gang.step, task, f"{gang.attempt}.{name}")


def last_lines(
    flow_datastore: Any, run_id: str, step: str, is_only_gang: bool, is_remote: bool, error: BaseException
) -> str:
    """Return what ``flow.py run`` writes last, if its error is about the gangs of this step: their end, and a command.

    The control node logs its own end, unless it is killed. The terminal may lack the end of a remote log: on Kubernetes a
    replacement pod overwrites the log of the first one (Metaflow 2.19).
    """
    match, is_interrupted = failed_task(error), isinstance(error, KeyboardInterrupt)
    if not is_interrupted and (match is None or match["step"] != step):
        return ""
    stored = StoredGangs(flow_datastore)
    lines: list[str] = []
    with suppress(Exception):  # the datastore can raise anything; the command is still shown
        gangs = stored.gangs(run_id, step)
        if is_interrupted and not gangs:
            return ""
        for gang in gangs:
            view = stored.view(gang) if match is not None and match["task"] in (None, gang.control_task) else None
            if view is not None and (is_remote or not view.is_over):  # else its error is above
                lines.append(printable(gang.sentence(view)))
    where = run_id if is_only_gang else f"{run_id}/{step}"
    lines.append(f"To see what happened on all nodes: {stored.program} show {where}")
    return "".join(f"[torchrun] {line}\n" for line in lines)
