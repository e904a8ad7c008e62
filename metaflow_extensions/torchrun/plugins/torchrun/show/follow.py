"""``torchrun show --follow``: a line for each change of a gang's state, until its attempt has ended."""

from __future__ import annotations

import time
from typing import Any

from ..compat.cli import click
from ..gang.view import GangView
from .finding import find
from .terminal import printable

_PAUSE_S = 3.0


def wait_for_end(obj: Any, gang: str, attempt: int | None, says_to_stderr: bool) -> bool:
    """Write a line for each change of a named gang's state until all have ended; return whether all have ended well."""
    said: dict[str, Any] = {}  # control task -> the state in its last line
    while True:
        stored, gangs = find(obj, gang, attempt)
        ends = []
        for each in gangs:
            view = stored.view(each)
            if each.is_over or (view is not None and view.is_over):
                ends.append(view is not None and each.outcome(view) == "done")
            state = None if view is None else _state(view)
            if said.get(each.control_task, "nothing") != state:
                said[each.control_task] = state
                sentence = "Nothing is recorded yet." if view is None else each.sentence(view)
                line = f"{time.strftime('%H:%M:%S')} {each.run}/{each.step}/{each.control_task}: {sentence}"
                click.echo(printable(line), err=says_to_stderr)
        if len(ends) == len(gangs):
            return all(ends)
        time.sleep(_PAUSE_S)


def _state(view: GangView) -> Any:
    """Return the parts of a view that cause a new line when they change: not the time in its sentence."""
    return view.outcome, view.launch, len(view.restarts_s), view.began_s is not None
