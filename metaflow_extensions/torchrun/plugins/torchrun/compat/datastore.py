"""Private names of Metaflow's datastore, for storing a task's data: ``metaflow/datastore``, read in 2.13 and 2.19.39.

`DatastoreValues` stores values by their content, `metadata_of` stores data of one attempt of a task.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any

from .renamed import convenience


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

    def trouble(self) -> str | None:
        """Return the error of the S3 client's last try, if the client is trying again.

        It tries for over an hour without a message: botocore in its own threads (``Endpoint._send_request``,
        1.44), and Metaflow around it (``S3._one_boto_op``). The error is a local variable of the functions
        that wait, so their frames are searched.
        """
        for innermost in sys._current_frames().values():
            frame: FrameType | None = innermost
            while frame is not None:
                name, known = frame.f_code.co_name, frame.f_locals
                if name == "_one_boto_op" and known.get("error"):
                    return str(known["error"])
                if name == "_send_request" and known.get("attempts", 0) > 1:
                    return _answer(known.get("success_response"), known.get("exception"))
                frame = frame.f_back
        return None


def values_of_running_flow() -> DatastoreValues | None:
    """Return the store of values of the running flow; None if no flow runs, as in a notebook's cell."""
    # Imported here: `metaflow develop stubs` (2.19) would else end with this module's `current`, and lack current.torch.
    from metaflow import current
    from metaflow.datastore import FlowDataStore

    # Metaflow's command line has set it for the process (``cli.start``).
    is_known = FlowDataStore.default_storage_impl is not None and current.get("task_id") is not None
    return DatastoreValues(FlowDataStore(current.flow_name)) if is_known else None


def values_at(address: Mapping[str, str]) -> Iterator[DatastoreValues]:
    """Yield stores to load values from: the address itself, then this machine's own datastore of that type."""
    from metaflow.datastore import FlowDataStore
    from metaflow.plugins import DATASTORES

    kind, root, flow = (address[name] for name in ("type", "root", "flow"))
    storage = next(each for each in DATASTORES if kind == each.TYPE)
    yield DatastoreValues(FlowDataStore(flow, storage_impl=storage, ds_root=root))
    here = storage.get_datastore_root_from_config(lambda *_: None, create_on_absent=False)
    if here not in (None, root):  # this machine has the folder at another path
        yield DatastoreValues(FlowDataStore(flow, storage_impl=storage, ds_root=here))


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


def save_log(flow_datastore: Any, task: tuple[str, str, str, int], data: Mapping[str, Any]) -> None:
    """Upload the log of a task (run, step, task, attempt): for each stream its bytes, or, if it is large, a path."""
    from metaflow.mflog import TASK_LOG_SOURCE

    with convenience("the early upload of this task's log"):
        *where, attempt = task
        store = flow_datastore.get_task_datastore(*where, attempt=attempt, mode="w")
        store.save_logs(TASK_LOG_SOURCE, data)


def _answer(response: Any, exception: Any) -> str | None:
    """Return the error in a response of botocore."""
    if exception is not None:
        return f"{type(exception).__name__}: {exception}"
    with suppress(TypeError, IndexError, KeyError):
        return "{Code}: {Message}".format_map(response[1]["Error"])
    return None
