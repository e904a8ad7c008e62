"""``torchrun show --follow``: renews the page of a gang in place until its attempt has ended."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from typing import Any

from ..compat.cli import click
from ..elements.terminal import printable
from ..gang.view import GangView
from .finding import checked, find, now

_PAUSE_S = 3.0
# Go to the top left of the terminal, clear to the end of the line, clear to the end of the screen (ECMA-48).
_HOME, _END_OF_LINE, _END_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"


def wait_for_end(
    obj: Any,
    gang: str,
    attempt: int | None,
    page: Callable[[], list[str]] | None,
    sleep: Callable[[float], None] = time.sleep,
) -> list[tuple[bool, str]]:
    """Show `page` until the named gangs have ended; return of each whether it has ended well, and what came of it.

    If stdout is no terminal, or `page` is None, a line is written for each change of a gang's state. Without a page it
    goes to stderr, since stdout then has JSON only.
    """
    is_terminal = page is not None and sys.stdout.isatty()
    said: dict[str, Any] = {}  # control task -> the state in its last line
    if is_terminal:
        click.clear()
    while True:
        stored, gangs = find(obj, gang)
        ends = []
        for each in gangs:
            which = checked(each, attempt)
            place, view = each.place(which), now(stored, each, which)
            is_over = place.is_over or (view is not None and view.is_over)
            is_well = view is not None and place.outcome(view) == "done"
            sentence = "Nothing is recorded yet." if view is None else place.sentence(view)
            line = f"{each.run}/{each.step}/{each.control_task}: {sentence}"
            ends.append((is_well, line) if is_over else None)
            state = None if view is None else _state(view)
            if not is_terminal and said.get(each.control_task, "nothing") != state:
                said[each.control_task] = state
                click.echo(f"{time.strftime('%H:%M:%S')} {printable(line)}", err=page is None)
        if page is not None and is_terminal:
            renew(page())
        found = [end for end in ends if end is not None]
        if len(found) == len(ends):
            return found
        sleep(_PAUSE_S)


def _state(view: GangView) -> Any:
    """Return the parts of a view that cause a new line when they change: not the time in its sentence."""
    return view.outcome, view.launch, len(view.restarts_s), view.began_s is not None


def tell_again(lines: list[str], ends: list[tuple[bool, str]]) -> None:
    """Write what came of the gangs below a page that is longer than the terminal: its first lines have scrolled away."""
    if sys.stdout.isatty() and len(lines) >= shutil.get_terminal_size().lines:
        failed = [line for is_well, line in ends if not is_well]
        click.echo("\n".join(["", *map(printable, failed or [line for _, line in ends])]))


def renew(lines: list[str]) -> None:
    """Overwrite the terminal with the first lines of the page, which may be longer than the terminal.

    Long lines are wrapped: the end of the first ones often has the cause of a failure.
    """
    columns, rows = shutil.get_terminal_size()
    width = max(1, columns - 1)
    wrapped = [line[at : at + width] for line in lines for at in range(0, max(1, len(line)), width)]
    text = "".join(f"{line}{_END_OF_LINE}\n" for line in wrapped[: rows - 1])
    click.echo(f"{_HOME}{text}{_END_OF_SCREEN}", nl=False)
