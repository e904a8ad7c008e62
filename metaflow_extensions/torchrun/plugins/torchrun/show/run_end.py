"""Writes the last lines of ``flow.py run`` after a gang has failed: how it ended, and the command that shows it.

The control node logs its own end, unless it is killed. The terminal may lack the end of a remote log: on Kubernetes a
replacement pod overwrites the log of the first one (Metaflow 2.19).
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from ..compat.cli import failed_task
from .parts import printable
from .stored_gangs import StoredGangs


def last_lines(
    flow_datastore: Any, run_id: str, step: str, is_only_gang: bool, is_remote: bool, error: BaseException
) -> str:
    """Return the lines that follow Metaflow's error, if that is about the gangs of this step."""
    match = failed_task(error)
    if match is None or match["step"] != step:
        return ""
    stored = StoredGangs(flow_datastore)  # metaflow.datastore.FlowDataStore
    lines: list[str] = []
    with suppress(Exception):  # the datastore can raise anything; the command is still shown
        for gang in stored.gangs(run_id, step):
            view = stored.view(gang) if match["task"] in (None, gang.control_task) else None
            if view is not None and (is_remote or not view.is_over):  # else its error is above
                lines.append(printable(gang.sentence(view)))
    where = run_id if is_only_gang else f"{run_id}/{step}"
    lines.append(f"To see what happened on all nodes: {stored.program} show {where}")
    return "".join(f"[torchrun] {line}\n" for line in lines)
