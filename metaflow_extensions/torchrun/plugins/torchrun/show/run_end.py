"""The last lines of the process that runs a flow, after a gang has failed: the command that shows it, and its records.

The control node logs its own end. It can't if it is killed, and the terminal may lack the end of a remote
log: on Kubernetes a replaced pod writes its log over the first one's (Metaflow 2.19).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from ..compat.cli import failed_task
from ..gang.texts import names
from .parts.terminal import printable
from .stored_gangs import StoredGang, StoredGangs

_NODES = 8  # most other nodes whose ends are shown: each costs requests


class RunEnd:
    """Writes the last lines for the gangs of one step, in the process of ``flow.py run``."""

    def __init__(self, flow_datastore: Any, run_id: str, step: str, is_only_gang: bool, is_remote: bool) -> None:
        self._flow_datastore = flow_datastore  # metaflow.datastore.FlowDataStore
        self._run_id, self._step, self._is_remote = str(run_id), step, is_remote
        self._where = self._run_id if is_only_gang else f"{self._run_id}/{step}"

    def tell(self, error: BaseException) -> str:
        """Return the lines that come after Metaflow's own, if it says that this step has failed."""
        match = failed_task(error)
        if match is None or match["step"] != self._step:
            return ""
        stored = StoredGangs(self._flow_datastore)
        lines: list[str] = []
        with suppress(Exception):  # the datastore can raise anything; the command is shown all the same
            for gang in stored.gangs(self._run_id, self._step):
                if match["task"] in (None, gang.control_task):
                    lines += self._known(stored, gang)
        lines.append(f"To see what happened on all nodes: {stored.program} show {self._where}")
        return "".join(f"[torchrun] {line}\n" for line in lines)

    def _known(self, stored: StoredGangs, gang: StoredGang) -> Iterator[str]:
        attempt = gang.last_attempt
        place, snapshot = gang.place(attempt), stored.snapshot(gang, attempt)
        is_cut = snapshot is None
        if snapshot is not None:
            if not self._is_remote and snapshot.summary.is_over:
                return  # its error is above
            snapshot = place.now(snapshot, time.time())
            is_cut = place.outcome(snapshot.summary) == "ended"
            yield printable(place.sentence(snapshot))
        if is_cut:
            for node, state in stored.told_by_metaflow(gang, attempt, _NODES).items():
                yield f"Metaflow says of {names([node])}: it {state}"
