"""What the control node leaves in Metaflow's datastore: its address record, and what has happened to the gang.

Both are metadata of the control node's task (`TaskDataStore.save_metadata`, Metaflow 2.19). That works alike
on local disks, S3, Azure and Google Cloud Storage, and its names carry the attempt, so that a retry never reads what
the attempt before has left. This is the only module that touches these internals.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from metaflow.plugins.timeout_decorator import TimeoutException

from ..errors import GangError, GangStartTimeout, TorchrunError
from ..gang.policy import growing_pauses
from ..gang.wire import from_plain, to_plain

_RECORD = "torchrun_gang.json"
_EVENTS = "torchrun_events.json"
# Of a member that finds no record. Where all nodes start at once, it is there by then, and the second look is the last.
_FIRST_PAUSE_S = 0.2
# How long a datastore may fail without an interruption. It has patience of its own besides (S3: 7 tries).
STORE_PATIENCE_S = 30.0


@dataclass(frozen=True)
class AddressRecord:
    """How to reach the control node."""

    addresses: tuple[str, ...]  # names and addresses to try, in order
    port: int
    token: str  # the gang's secret; whoever can read the step's datastore knows it
    closed: bool = False  # whether the control node has ended its step before this node arrived
    error: TorchrunError | None = None  # why, if it ended with an error


class Registry:
    """Keeps both for one attempt of one gang, in the run's `FlowDataStore`."""

    def __init__(self, flow_datastore: Any, run_id: str, step_name: str, control_task_id: str, attempt: int) -> None:
        self._where = f"{run_id}/{step_name}/{control_task_id}, attempt {attempt}"
        # Opened for reading with data of its own, a task's store looks nothing up: no requests, and no
        # complaint that the attempt is not finished.
        self._reader = flow_datastore.get_task_datastore(
            run_id, step_name, control_task_id, attempt=attempt, data_metadata={}, mode="r"
        )
        self._writer = flow_datastore.get_task_datastore(run_id, step_name, control_task_id, attempt=attempt, mode="w")

    def publish(self, record: AddressRecord, patience_s: float = STORE_PATIENCE_S) -> None:
        """Write the record; raise GangError if the datastore fails `patience_s` seconds long."""
        self._request(lambda: self._writer.save_metadata({_RECORD: to_plain(record)}), patience_s)

    def peek(self, patience_s: float) -> AddressRecord | None:
        """Return the record if there is one; raise GangError if the datastore fails `patience_s` seconds long."""
        found: AddressRecord | None = self._request(self._read, patience_s)
        return found

    def save_events(self, events: dict[str, Any], patience_s: float) -> None:
        """Write what has happened; raise GangError if the datastore fails `patience_s` seconds long."""
        self._request(lambda: self._writer.save_metadata({_EVENTS: events}), patience_s)

    def load_events(self) -> dict[str, Any] | None:
        """Return what `save_events` wrote last; None if there is nothing. Raises what the datastore raises."""
        found: dict[str, Any] | None = self._load(_EVENTS)
        return found

    def look_up(
        self, timeout_s: float, of_s: float | None = None, sleep: Callable[[float], None] = time.sleep
    ) -> AddressRecord:
        """Return the record, waiting `timeout_s` seconds at most; `of_s` is the user's whole timeout, for the error."""
        deadline = time.monotonic() + timeout_s
        for pause_s in growing_pauses(_FIRST_PAUSE_S):
            record = self.peek(min(STORE_PATIENCE_S, deadline - time.monotonic()))
            if record is not None:
                return record
            if time.monotonic() + pause_s > deadline:
                break
            sleep(pause_s)
        raise GangStartTimeout(
            f"Waited {timeout_s if of_s is None else of_s:g} s, but node 0 (the control node) did not arrive: it "
            f"wrote no address for {self._where}. Look at the control task's log. "
            "@torchrun(all_nodes_started_timeout=...) changes how long to wait."
        )

    def _request(self, request: Callable[[], Any], patience_s: float) -> Any:
        """Make a request of the datastore; while it fails, make it again, `patience_s` seconds long."""
        give_up_at = time.monotonic() + patience_s
        for pause_s in growing_pauses():
            try:
                return request()
            except (TorchrunError, TimeoutException):  # raised by a signal's handler, not by the datastore
                raise
            except Exception as error:
                if time.monotonic() + pause_s > give_up_at:
                    raise GangError(
                        f"The nodes meet in Metaflow's datastore, but it failed for {self._where}: "
                        f"{type(error).__name__}: {error}. Check that it is up and that this task may read and write there."
                    ) from error
            time.sleep(pause_s)
        raise AssertionError("the pauses never end")

    def _read(self) -> AddressRecord | None:
        found = self._load(_RECORD)
        record: AddressRecord | None = None if found is None else from_plain(AddressRecord, found, "the address record")
        return record

    def _load(self, name: str) -> Any:
        try:
            return self._reader.load_metadata([name])[name]  # None if it is not there; no need to look first
        except ValueError:
            return None  # half written: Metaflow 2.12 writes a local file in place, 2.19 renames it
