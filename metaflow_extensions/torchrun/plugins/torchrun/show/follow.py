"""``torchrun show --follow``: renews the page of a gang in place until its attempt has ended."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from typing import Any

from ..compat.cli import click
from ..records.summary import Summary
from .finding import checked, find, now
from .stored_gangs import StoredGangs

_PAUSE_S = 3.0
# Go to the top left of the terminal, clear to the end of the line, clear to the end of the screen (ECMA-48).
_HOME, _END_OF_LINE, _END_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"


def wait_for_end(
    obj: Any,
    gang: str,
    attempt: int | None,
    page: Callable[[], list[str]] | None,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Show `page` until the named gangs have ended; return whether all have ended well.

    If stdout is no terminal, or `page` is None, a line is written for each change of a gang's state. Without a page it
    goes to stderr, since stdout then has JSON only.
    """
    is_terminal = page is not None and sys.stdout.isatty()
    said: dict[str, Any] = {}  # control task -> the state in its last line
    if is_terminal:
        click.clear()
    while True:
        stored = StoredGangs(obj.flow_datastore)
        outcomes = []
        for each in find(obj, stored, gang):
            which = checked(each, attempt)
            place, snapshot = each.place(which), now(stored, each, which)
            is_over = place.is_over or (snapshot is not None and snapshot.summary.is_over)
            outcomes.append(None if not is_over else snapshot is not None and place.outcome(snapshot.summary) == "done")
            state = None if snapshot is None else _state(snapshot.summary)
            if not is_terminal and said.get(each.control_task, "nothing") != state:
                said[each.control_task] = state
                sentence = "Nothing is recorded yet." if snapshot is None else place.sentence(snapshot)
                click.echo(
                    f"{time.strftime('%H:%M:%S')} {each.run}/{each.step}/{each.control_task}: {sentence}",
                    err=page is None,
                )
        if page is not None and is_terminal:
            _renew(page())
        if None not in outcomes:
            return all(outcomes)
        sleep(_PAUSE_S)


def _state(summary: Summary) -> Any:
    """Return the parts of a summary that cause a new line when they change: not the time in its sentence."""
    return summary.outcome, summary.launch, len(summary.restarts_s), summary.has_started


def _renew(lines: list[str]) -> None:
    """Overwrite the terminal with the first lines of the page, which may be longer than the terminal."""
    columns, rows = shutil.get_terminal_size()
    text = "".join(f"{line[: columns - 1]}{_END_OF_LINE}\n" for line in lines[: rows - 1])
    click.echo(f"{_HOME}{text}{_END_OF_SCREEN}", nl=False)
