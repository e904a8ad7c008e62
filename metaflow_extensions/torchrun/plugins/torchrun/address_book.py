"""Where the gang meets: a small record in Metaflow's datastore, beside the control task's own.

Metaflow's task metadata (`TaskDataStore.save_metadata`, 2.19) works alike on local disks, S3, Azure
and Google Cloud Storage, and its names carry the attempt, so that a retry never reads the record of
the attempt before. This is the only module that touches these internals.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from metaflow.plugins.timeout_decorator import TimeoutException

from .errors import GangError, GangStartTimeout, TorchrunError

_RECORD = "torchrun_gang.json"
_FIRST_PAUSE_S = 0.05
# How long a datastore may fail without an interruption. It has patience of its own besides (S3: 7 tries).
STORE_PATIENCE_S = 30.0
_PAUSE_LIMIT_S = 2.0  # of S3 requests, a waiting node makes one in two seconds


@dataclass(frozen=True)
class Address:
    """How to reach the control node's channel.

    Attributes
    ----------
    addresses : tuple of str
        Names and addresses to try, in order.
    port : int
        TCP port.
    token : str
        The gang's secret; whoever can read the step's datastore knows it.
    closed : bool
        Whether the control node has ended its step before this node arrived.
    error : dict or None
        Why, as `errors.to_wire` has it, if it ended with an error.
    """

    addresses: tuple[str, ...]
    port: int
    token: str
    closed: bool = False
    error: dict[str, Any] | None = None


def _address(record: dict[str, Any] | None) -> Address | None:
    return None if record is None else Address(**{**record, "addresses": tuple(record["addresses"])})


class AddressBook:
    """The address record of one attempt of one gang.

    Parameters
    ----------
    flow_datastore : metaflow.datastore.FlowDataStore
        The run's datastore.
    run_id, step_name, control_task_id : str
        Which gang.
    attempt : int
        Metaflow's retry count.
    """

    def __init__(self, flow_datastore: Any, run_id: str, step_name: str, control_task_id: str, attempt: int) -> None:
        self._where = f"{run_id}/{step_name}/{control_task_id}, attempt {attempt}"
        # Opened for reading with data of its own, a task's store looks nothing up: no requests, and no
        # complaint that the attempt is not finished.
        self._reader = flow_datastore.get_task_datastore(
            run_id, step_name, control_task_id, attempt=attempt, data_metadata={}, mode="r"
        )
        self._writer = flow_datastore.get_task_datastore(run_id, step_name, control_task_id, attempt=attempt, mode="w")

    def publish(
        self, address: Address, patience_s: float = STORE_PATIENCE_S, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        """Write the record; only the control node does.

        Raises
        ------
        GangError
            If the datastore fails `patience_s` seconds long.
        """
        self._request(lambda: self._writer.save_metadata({_RECORD: asdict(address)}), patience_s, sleep)

    def peek(self, patience_s: float = STORE_PATIENCE_S) -> Address | None:
        """Return the record if there is one.

        Raises
        ------
        GangError
            If the datastore fails `patience_s` seconds long.
        """
        return _address(self._request(self._read, patience_s, time.sleep))

    def look_up(
        self, timeout_s: float, of_s: float | None = None, sleep: Callable[[float], None] = time.sleep
    ) -> Address:
        """Return the record, waiting for it `timeout_s` seconds at most.

        Parameters
        ----------
        timeout_s : float
            What is left of the time.
        of_s : float, optional
            The time as the user has set it, for the error's text. Default: `timeout_s`.
        sleep : callable, optional
            Waits.

        Raises
        ------
        GangStartTimeout
            If it does not appear.
        GangError
            If the datastore fails all the time.
        """
        deadline = time.monotonic() + timeout_s
        pause = _FIRST_PAUSE_S
        while True:
            record = self._request(self._read, min(STORE_PATIENCE_S, deadline - time.monotonic()), sleep)
            if (address := _address(record)) is not None:
                return address
            if time.monotonic() + pause > deadline:
                raise GangStartTimeout(
                    f"Waited {timeout_s if of_s is None else of_s:g} s, but node 0 (the control node) did not arrive: it "
                    f"wrote no address for {self._where}. Look at the control task's log. "
                    "@torchrun(all_nodes_started_timeout=...) changes how long to wait."
                )
            sleep(pause)
            pause = min(pause * 2, _PAUSE_LIMIT_S)

    def _request(self, request: Callable[[], Any], patience_s: float, sleep: Callable[[float], None]) -> Any:
        """Make a request of the datastore; while it fails, make it again, `patience_s` seconds long."""
        give_up_at = time.monotonic() + patience_s
        pause = _FIRST_PAUSE_S
        while True:
            try:
                return request()
            except (TorchrunError, TimeoutException):  # raised by a signal's handler, not by the datastore
                raise
            except Exception as error:
                if time.monotonic() + pause > give_up_at:
                    raise GangError(
                        f"The nodes meet in Metaflow's datastore, but it failed for {self._where}: "
                        f"{type(error).__name__}: {error}. Check that it is up and that this task may read and write there."
                    ) from error
            sleep(pause)
            pause = min(pause * 2, _PAUSE_LIMIT_S)

    def _read(self) -> dict[str, Any] | None:
        if not self._reader.has_metadata(_RECORD):
            return None
        try:
            record: dict[str, Any] | None = self._reader.load_metadata([_RECORD])[_RECORD]
        except ValueError:
            return None  # half written: Metaflow 2.12 writes a local file in place, 2.19 renames it
        return record
