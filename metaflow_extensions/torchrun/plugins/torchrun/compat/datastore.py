"""Private names of Metaflow's datastore: a flow's values, a task's records, files and logs.

Read in ``metaflow/datastore``, ``mflog`` and ``plugins/datastores`` of 2.13 and 2.19.39. Metaflow loads our commands, and
so this module, for every flow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from .renamed import convenience, known

LOG_SOURCES = known("metaflow.mflog:LOG_SOURCES")
LINE_PARSER = known("metaflow.mflog.mflog:LINE_PARSER")
DEFAULT_DATASTORE = known("metaflow.metaflow_config:DEFAULT_DATASTORE")
SPIN = "spin"  # the kind of the datastore of what `spin` runs: .metaflow_spin in this folder or above (from 2.19)


def open_datastore(kind: str | None, flow_name: str, root: str | None = None) -> Any:
    """Return a flow's datastore of a kind, in `root` or where this machine has its own; None if there is none."""
    from metaflow.datastore import FlowDataStore
    from metaflow.plugins import DATASTORES

    storage = next((each for each in DATASTORES if kind == each.TYPE), None)
    if storage is not None and root is None:
        root = storage.get_datastore_root_from_config(lambda *_, **__: None, create_on_absent=False)
    return FlowDataStore(flow_name, storage_impl=storage, ds_root=root) if root else None


# --- values, by their content -------------------------------------------------------------------------


class DatastoreValues:
    """The content-addressed part of a flow's datastore, which also holds the artifacts."""

    def __init__(self, flow_datastore: Any) -> None:
        self._store = flow_datastore  # metaflow.datastore.FlowDataStore
        kind, root = flow_datastore.TYPE, flow_datastore.datastore_root
        self.where = f"the {kind} datastore {root}"
        self.folder: str | None = root if kind == "local" else None
        self.address: Mapping[str, str] = {"type": kind, "root": root, "flow": flow_datastore.flow_name}

    def save(self, data: bytes) -> str:
        """Store `data` and return its key, which is the same for the same data."""
        ((_, key),) = self._store.save_data([data], len_hint=1)
        return str(key)

    def load(self, keys: Sequence[str]) -> Iterator[tuple[str, bytes]]:
        """Yield each of `keys` with the data under it; takes many, because some stores load many at once."""
        yield from self._store.load_data(list(keys))


def datastore_here() -> Any:
    """Return the flow's datastore of this process's command; None where no flow runs, and in other threads of a task."""
    from metaflow._vendor import click

    command = click.get_current_context(silent=True)
    return getattr(command and command.obj, "flow_datastore", None)


def values_of_running_flow() -> DatastoreValues | None:
    """Return the store of values of the running flow, in any thread; None if no flow runs, as in a notebook's cell."""
    # Imported here: `metaflow develop stubs` (2.19) would else end with this module's `current`, and lack current.torch.
    from metaflow import current
    from metaflow.datastore import FlowDataStore

    # Metaflow's command line has set it for the process (``cli.start``).
    is_known = FlowDataStore.default_storage_impl is not None and current.get("task_id") is not None
    return DatastoreValues(FlowDataStore(current.flow_name)) if is_known else None


# --- what a task stores -------------------------------------------------------------------------------


def metadata_of(
    flow_datastore: Any, run_id: str, step: str, task_id: str, attempt: int
) -> tuple[Callable[[list[str]], dict[str, Any]], Callable[[dict[str, Any]], None]]:
    """Return functions that load and save metadata of one attempt of a task, by name; they raise the store's errors.

    The reader is opened with an empty `data_metadata`. So it makes no requests when it is opened, and does not
    refuse an attempt that is not finished.
    """
    task_datastore = partial(flow_datastore.get_task_datastore, run_id, step, task_id, attempt=attempt)
    reader, writer = task_datastore(data_metadata={}, mode="r"), task_datastore(mode="w")
    return reader.load_metadata, writer.save_metadata


def metadata_type(flow_datastore: Any) -> str | None:
    """Return the type of a flow's metadata provider, for example "local"; None without one."""
    kind: str | None = getattr(flow_datastore.metadata, "TYPE", None)
    return kind


def watch_storing(task_datastore: Any, around: Callable[..., Any]) -> None:
    """Replace each method that stores a task's results by `around`.

    It gets whether the method is the last one, which writes the mark of a complete attempt, the method and its arguments.
    """
    for name in ("persist", "save_metadata", "done"):
        setattr(task_datastore, name, partial(around, name == "done", getattr(task_datastore, name)))


def save_log(flow_datastore: Any, task: tuple[str, str, str, int], files: Mapping[str, Path]) -> None:
    """Upload the log of a task (run, step, task, attempt): the file of each stream."""
    from metaflow.mflog import TASK_LOG_SOURCE

    with convenience("the early upload of this task's log"):
        *where, attempt = task
        store = flow_datastore.get_task_datastore(*where, attempt=attempt, mode="w")
        store.save_logs(TASK_LOG_SOURCE, dict(files))


# --- what commands and cards read ---------------------------------------------------------------------


class Storage:
    """The files of a flow's datastore."""

    def __init__(self, flow_datastore: Any) -> None:
        self._datastore = flow_datastore  # metaflow.datastore.FlowDataStore
        self._storage = flow_datastore._storage_impl
        self.kind = str(self._storage.TYPE)  # as in ``--datastore``
        self.is_default = self.kind in (DEFAULT_DATASTORE, SPIN)  # where our commands look without ``--datastore``
        self.place = f"{self.kind}: {flow_datastore.datastore_root}"  # for messages

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


def datastore_of_card(flow_name: str, facts: Mapping[str, str]) -> Any:
    """Return the flow's datastore that the metadata of a card's task names, else that of the card's command; or None.

    A killed pod leaves no local metadata, because a pod stores it at its end.
    """
    from metaflow.datastore import FlowDataStore

    if (found := open_datastore(facts.get("ds-type"), flow_name, facts.get("ds-root"))) is not None:
        return found
    of_command = datastore_here()
    # A new object: the root of the command's own is now that of the cards (`card` in ``card_cli.py``).
    return of_command and FlowDataStore(flow_name, storage_impl=type(of_command._storage_impl))
