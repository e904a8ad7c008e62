"""Finds the gangs of a run in the datastore, and what it has of each.

Only the datastore is asked, so it does not matter where the run's metadata is. To see a step costs two listings,
however many nodes it has. The names of tasks and files are those of Metaflow 2.19.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from metaflow.datastore.task_datastore import TaskDataStore
from metaflow.metaflow_config import DEFAULT_DATASTORE

from ..channel.registry import Registry
from ..views.page import Facts

# How Metaflow names the task of another node after the control task's, and which node it counts as the first:
# `_local_multinode_control_task_step_func`, `KubernetesDecorator.task_pre_step`, `BatchJob.execute`, and
# `jobset_input_paths` of Argo.
_NAMES = (
    (re.compile(r"(.+)_node_(\d+)"), "{}", 0),
    (re.compile(r"worker-(.+)-(\d+)"), "control-{}-0", 1),
    (re.compile(r"(.+)-worker-(\d+)"), "{}", 1),
    (re.compile(r"(.+)-node-(\d+)"), "control-{}", 0),
)
# What is written at a task's end: by itself, or by who has started it and has seen it end (`Worker.terminate`).
_ENDED = (TaskDataStore.METADATA_DONE_SUFFIX, "runtime")
_ATTEMPT = re.compile(r"(\d+)\.(.+)")


def place_of(task: str, tasks: set[str]) -> tuple[str, int]:
    """Return the control task and the node of a task, one of those of a step."""
    for name, control, first in _NAMES:
        match = name.fullmatch(task)
        if match is not None:
            found = control.format(match[1])
            # On AWS Batch the control task's name begins with "control-", but only on a run.
            found = found if found in tasks or match[1] not in tasks else match[1]
            return found, int(match[2]) + first
    return task, 0


@dataclass(frozen=True)
class StoredGang:
    """One gang of a step: its tasks, and the names of their files, by attempt."""

    run: str
    step: str
    control_task: str
    tasks: dict[int, str]  # by node
    files: dict[str, dict[int, set[str]]]  # by task and attempt

    @property
    def last_attempt(self) -> int:
        """The highest attempt of which any task has a file."""
        return max((attempt for files in self.files.values() for attempt in files), default=0)

    def has(self, task: str, attempt: int, name: str) -> bool:
        """Tell whether a task has a file."""
        return name in self.files.get(task, {}).get(attempt, set())

    def facts(self, attempt: int) -> Facts:
        """Return what Metaflow has of an attempt."""
        is_done = any(self.has(self.control_task, attempt, name) for name in _ENDED)
        return Facts(self.run, self.step, self.control_task, self.tasks, attempt, self.last_attempt, is_done)


class StoredGangs:
    """The gangs in a flow's datastore."""

    def __init__(self, flow_datastore: Any) -> None:
        self._datastore = flow_datastore  # metaflow.datastore.FlowDataStore
        self._storage = flow_datastore._storage_impl

    @property
    def place(self) -> str:
        """Name the datastore, for messages."""
        return f"{self.kind}: {self._datastore.datastore_root}"

    @property
    def kind(self) -> str:
        """Return what ``--datastore`` calls it."""
        return str(self._storage.TYPE)

    @property
    def is_default(self) -> bool:
        """Whether it is taken where ``--datastore`` is not given."""
        return bool(self.kind == DEFAULT_DATASTORE)

    def steps(self, run: str) -> list[str]:
        """Return the steps of a run that have begun."""
        return sorted(name for name, _ in self._names([self._path(run)]))

    def gangs(self, run: str, step: str) -> list[StoredGang]:
        """Return the gangs of a step; several where it stands in a foreach."""
        tasks = {name for name, _ in self._names([self._path(run, step)])}
        files: dict[str, dict[int, set[str]]] = {task: {} for task in tasks}
        for name, path in self._names([self._path(run, step, task) for task in sorted(tasks)]):
            match = _ATTEMPT.fullmatch(name)
            if match is not None:
                task = self._storage.path_split(path)[-2]
                files[task].setdefault(int(match[1]), set()).add(match[2])
        found: dict[str, dict[int, str]] = {}
        for task in tasks:
            control, node = place_of(task, tasks)
            found.setdefault(control, {})[node] = task
        return [
            StoredGang(run, step, control, dict(sorted(nodes.items())), {task: files[task] for task in nodes.values()})
            for control, nodes in sorted(found.items(), key=lambda item: _in_order(item[0]))
        ]

    def events(self, gang: StoredGang, attempt: int) -> dict[str, Any] | None:
        """Return what the control node has stored of an attempt; None if there is nothing."""
        return Registry(self._datastore, gang.run, gang.step, gang.control_task, attempt).load_events()

    def told_by_metaflow(self, gang: StoredGang, attempt: int) -> dict[int, str]:
        """Return what Metaflow itself knows of each node's task, in a word or in the error's own."""
        return {node: self._state(gang, task, attempt) for node, task in gang.tasks.items()}

    def _state(self, gang: StoredGang, task: str, attempt: int) -> str:
        if not gang.files[task].get(attempt):
            return "has no such attempt"
        if not gang.has(task, attempt, TaskDataStore.METADATA_DONE_SUFFIX):
            return "was killed" if gang.has(task, attempt, "runtime") else "has begun; no end is known"
        stored = self._datastore.get_task_datastore(gang.run, gang.step, task, attempt=attempt, allow_not_done=True)
        if stored.get("_task_ok"):
            return "succeeded"
        error = stored.get("_exception")
        return "failed" if error is None else f"failed: {str(error).splitlines()[-1]}"

    def paths(self, gang: StoredGang, task: str, attempt: int, name: str) -> str:
        """Return where a file of a task is."""
        file = TaskDataStore.metadata_name_for_attempt(name, attempt)
        return self._path(gang.run, gang.step, task, file)

    def load(self, paths: list[str]) -> Any:
        """Return a context in which triples of a path, the local file with its content (None: missing), and more come."""
        return self._storage.load_bytes(paths)

    def _path(self, *parts: str) -> str:
        path: str = self._storage.path_join(self._datastore.flow_name, *parts)
        return path

    def _names(self, paths: list[str]) -> Iterator[tuple[str, str]]:
        for found in self._storage.list_content(paths) if paths else ():
            path = found.path.rstrip("/")
            yield self._storage.path_split(path)[-1], path


def _in_order(task: str) -> tuple[int, str]:
    """Sort numbers as numbers."""
    return (int(task), "") if task.isdecimal() else (1 << 62, task)
