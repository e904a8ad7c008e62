"""Writes the last lines of ``flow.py run`` after a gang has failed: how it ended, and the command that shows it.

The control node logs its own end, unless it is killed. The terminal may lack the end of a remote log: on Kubernetes a
replacement pod overwrites the log of the first one (Metaflow 2.19).
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from ..compat.cli import failed_task
from .stored_gangs import StoredGangs
from .terminal import printable


class RunEnd:
    """The last lines about the gangs of one step, in the process of ``flow.py run``."""

    def __init__(self, flow_datastore: Any, run_id: str, step: str, is_only_gang: bool, is_remote: bool) -> None:
        self._flow_datastore = flow_datastore  # metaflow.datastore.FlowDataStore
        self._run_id, self._step, self._is_remote = str(run_id), step, is_remote
        self._where = self._run_id if is_only_gang else f"{self._run_id}/{step}"

    def tell(self, error: BaseException) -> str:
        """Return the lines that follow Metaflow's error, if that is about this step."""
        match = failed_task(error)
        if match is None or match["step"] != self._step:
            return ""
        stored = StoredGangs(self._flow_datastore)
        lines: list[str] = []
        with suppress(Exception):  # the datastore can raise anything; the command is still shown
            for gang in stored.gangs(self._run_id, self._step):
                view = stored.view(gang) if match["task"] in (None, gang.control_task) else None
                if view is not None and (self._is_remote or not view.is_over):  # else its error is above
                    lines.append(printable(gang.sentence(view)))
        lines.append(f"To see what happened on all nodes: {stored.program} show {self._where}")
        return "".join(f"[torchrun] {line}\n" for line in lines)
