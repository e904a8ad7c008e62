"""Private names with which other processes read a task's stored files, logs and artifacts.

Read in ``metaflow/datastore``, ``mflog`` and ``plugins/datastores`` of 2.13 and 2.19.39. Commands and cards use them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .renamed import known

# Metaflow loads our commands, and so this module, for every flow.
LOG_SOURCES = known("metaflow.mflog:LOG_SOURCES")
LINE_PARSER = known("metaflow.mflog.mflog:LINE_PARSER")
DEFAULT_DATASTORE = known("metaflow.metaflow_config:DEFAULT_DATASTORE")
_SPIN = "spin"  # the kind of the datastore of what `spin` runs (from 2.19)


class Storage:
    """The files of a flow's datastore."""

    def __init__(self, flow_datastore: Any) -> None:
        self._datastore = flow_datastore  # metaflow.datastore.FlowDataStore
        self._storage = flow_datastore._storage_impl

    @property
    def kind(self) -> str:
        """Its name in ``--datastore``."""
        return str(self._storage.TYPE)

    @property
    def is_default(self) -> bool:
        """Whether our commands look there without ``--datastore``."""
        return self.kind in (DEFAULT_DATASTORE, _SPIN)

    @property
    def place(self) -> str:
        """Name the datastore, for messages."""
        return f"{self.kind}: {self._datastore.datastore_root}"

    def path(self, *parts: str) -> str:
        """Return the path of a file or folder of the flow."""
        path: str = self._storage.path_join(self._datastore.flow_name, *parts)
        return path

    def split(self, path: str) -> list[str]:
        """Return the parts of a path."""
        return list(self._storage.path_split(path))

    def names(self, folders: list[str]) -> Iterator[tuple[str, str]]:
        """Yield name and path of everything in some folders."""
        for found in self._storage.list_content(folders) if folders else ():
            path = found.path.rstrip("/")
            yield self.split(path)[-1], path

    def load(self, paths: list[str]) -> Any:
        """Return a context that yields tuples: a path, the local file with its content (None: missing), and more."""
        return self._storage.load_bytes(paths)

    def tasks_of(self, task: tuple[str, str, str]) -> list[str]:
        """Return the tasks of all nodes, each as run, step and task, from a control task (run, step, task)."""
        stored = self._datastore.get_task_datastore(*task, attempt=0)
        return list(stored.get("_control_mapper_tasks") or ())


def latest_run(flow_name: str) -> str | None:
    """Return the run that was started last in this folder; `resume` does not count (``metaflow.util``, 2.19)."""
    from metaflow.util import get_latest_run_id

    run_id: str | None = get_latest_run_id(lambda *_, **__: None, flow_name)
    return run_id


def datastore_of_spin(flow_name: str) -> Any:
    """Return the datastore of what `spin` runs (.metaflow_spin in this folder or above); None if there is none.

    Before 2.19 Metaflow has no `spin`.
    """
    from metaflow.datastore import FlowDataStore
    from metaflow.plugins import DATASTORES

    storage = next((each for each in DATASTORES if each.TYPE == _SPIN), None)
    root = storage and storage.get_datastore_root_from_config(lambda *_, **__: None, create_on_absent=False)
    return FlowDataStore(flow_name, storage_impl=storage, ds_root=root) if root else None


def datastore_of_card(flow_name: str, facts: Mapping[str, str]) -> Any:
    """Return the flow's datastore that the metadata of a card's task names, else that of the card's command; or None.

    A killed pod leaves no local metadata, because a pod stores it at its end.
    """
    from metaflow._vendor import click
    from metaflow.datastore import FlowDataStore
    from metaflow.plugins import DATASTORES

    storage = next((each for each in DATASTORES if facts.get("ds-type") == each.TYPE), None)
    if storage is not None:
        return FlowDataStore(flow_name, storage_impl=storage, ds_root=facts.get("ds-root"))
    command = click.get_current_context(silent=True)
    of_command = getattr(command and command.obj, "flow_datastore", None)
    # A new object: the root of the command's own is now that of the cards (`card` in ``card_cli.py``).
    return of_command and FlowDataStore(flow_name, storage_impl=type(of_command._storage_impl))


def last_attempt(flow_datastore: Any, task: tuple[str, str, str]) -> int | None:
    """Return the last attempt of a task (run, step, task); None if none has begun."""
    from metaflow.datastore.exceptions import DataException

    try:
        attempt: int = flow_datastore.get_task_datastore(*task, allow_not_done=True).attempt
    except DataException:
        return None
    return attempt
