"""``python flow.py torchrun``: commands that Metaflow adds to each flow's command line (``CLIS_DESC``, 2.19)."""

# mypy: disable-error-code="untyped-decorator"
# Metaflow's copy of click has no types.

from __future__ import annotations

import io
import json
import sys
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from ..compat.cli import CommandException, click
from ..compat.graph import parallel_steps
from ..compat.renamed import check
from ..gang.view import GangView
from ..gang.wire import to_plain
from ..texts import moment, names
from .asking import answer_of
from .finding import PAUSE_S, WHICH, CommandFailed, await_gang, command, find, find_one, json_option
from .outputs_command import outputs
from .page import Place, page_of
from .parts import lines_of, printable
from .profile_command import profile
from .stacks_command import stacks
from .stored_gangs import StoredGang, StoredGangs
from .stored_logs import LogLine, StoredLogs


class _Commands(click.Group):  # type: ignore[misc]  # Metaflow is not typed
    """Turns errors of damaged records into messages."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        if isinstance(sys.stdout, io.TextIOWrapper):
            # Characters that the terminal can't show, such as an emoji in the C locale, are printed as escapes.
            sys.stdout.reconfigure(errors="backslashreplace")
        check()
        try:
            return super().invoke(ctx)
        except (ValueError, LookupError, ArithmeticError, NotADirectoryError) as error:
            raise CommandException(
                f"What is stored of this gang can't be read ({type(error).__name__}: {error}). It is damaged, or another "
                "version of metaflow-torchrun has written it. Metaflow's own `logs` shows what its tasks have written."
            ) from error


@click.group()
def cli() -> None:
    """Hold the one command that Metaflow adds from here."""


@cli.group(
    cls=_Commands, help="See the nodes and ranks of @torchrun steps: what came of them, and their logs.", epilog=WHICH
)
def torchrun() -> None:
    """Hold our commands."""


@command("Show what came of a step: why it failed, its nodes and ranks, and what happened when.")
@click.option(
    "--follow",
    is_flag=True,
    default=False,
    help="Wait for it, and tell each change until the attempt has ended; exit with 1 if it failed.",
)
@json_option
def show(obj: Any, gang: str, follow: bool, attempt: int | None, as_json: bool) -> None:
    """Show the gangs of a step."""
    is_well = True
    if follow:
        try:
            gang = await_gang(obj, gang)
            is_well = _wait_for_end(obj, gang, attempt, says_to_stderr=as_json)
        except KeyboardInterrupt:
            return
    click.echo(_pages(obj, gang, attempt, as_json))
    sys.exit(0 if is_well else 1)


def _wait_for_end(obj: Any, gang: str, attempt: int | None, says_to_stderr: bool) -> bool:
    """Write a line for each change of a named gang's state until all have ended; return whether all have ended well."""
    said: dict[str, Any] = {}  # control task -> the state in its last line
    while True:
        stored, gangs = find(obj, gang, attempt)
        ends = []
        for each in gangs:
            view = stored.view(each)
            if each.is_over or (view is not None and view.is_over):
                ends.append(view is not None and each.outcome(view) == "done")
            # What causes a new line when it changes: not the time in the sentence.
            state = view and (view.outcome, view.launch, len(view.restarts_s), view.began_s is not None)
            if said.get(each.control_task, "nothing") != state:
                said[each.control_task] = state
                sentence = "Nothing is recorded yet." if view is None else each.sentence(view)
                click.echo(printable(f"{moment(time.time())} {each.where}: {sentence}"), err=says_to_stderr)
        if len(ends) == len(gangs):
            return all(ends)
        time.sleep(PAUSE_S)


def _pages(obj: Any, named: str, attempt: int | None, as_json: bool) -> str:
    stored, gangs = find(obj, named, attempt)
    if as_json:
        run, clone = gangs[0].run, gangs[0].clone
        data = [_as_data(gang, stored.view(gang)) for gang in gangs]
        shown = {"run": clone[0] if clone else run, "step": gangs[0].step, "gangs": data}
        return json.dumps(shown, indent=2, allow_nan=False)
    names_task = len(gangs) > 1 or named.count("/") > 1
    pages = [_page(obj, stored, replace(gang, typed="show", names_task=names_task)) for gang in gangs]
    return "\n\n".join("\n".join(page) for page in pages)


def _as_data(place: Place, view: GangView | None) -> dict[str, Any]:
    """Return what ``--json`` has of a gang: where it is, its view, and what that comes to; ``docs/seeing.md`` lists it."""
    return {
        **{name: getattr(place, name) for name in ("run", "control_task", "tasks", "attempt", "last_attempt")},
        "clone": place.clone and dict(zip(("run", "control_task"), place.clone, strict=True)),
        **({} if view is None else to_plain(view)),
        "outcome": None if view is None else place.outcome(view),
        "sentence": None if view is None else place.sentence(view),
    }


@command("Show the stored logs of all nodes of a step, merged by time.")
@click.option("--rank", type=int, default=None, help="Only what this rank has written.")
@click.option(
    "--node",
    type=int,
    default=None,
    help="Only what this node and its ranks have written, and lines that name no node.",
)
@click.option(
    "--tail",
    type=click.IntRange(0),
    default=None,
    help="Only the last lines, so many of all nodes and ranks together (with --rank or --node: of that one).",
)
@click.option("--follow", is_flag=True, default=False, help="Wait for it, and go on until the attempt has ended.")
@json_option
def logs(
    obj: Any,
    gang: str,
    rank: int | None,
    node: int | None,
    tail: int | None,
    follow: bool,
    attempt: int | None,
    as_json: bool,
) -> None:
    """Show the logs of one gang."""

    def is_wanted(line: LogLine) -> bool:
        # In the common log of a local run, a line without a label is of any node.
        is_its = rank in (None, line.rank) and (node in (None, line.node) or (rank, line.node) == (None, None))
        return is_its or line.text.startswith(_TRUNCATED)  # its lines may be among those that are missing

    def printed(lines: Iterable[LogLine]) -> bool:
        """Print the lines; return whether there were any."""
        has_any = False
        for line in lines:
            at = f"{line.time[11:23]}Z" if line.time else ""
            click.echo(json.dumps(asdict(line)) if as_json else f"{at:13} {line.labelled}")
            has_any = True
        return has_any

    with suppress(KeyboardInterrupt):
        stored, found = find_one(obj, await_gang(obj, gang) if follow else gang, attempt)
        _refuse_unknown(stored.view(found), rank, node)
        kept = StoredLogs(stored, found)
        so_far = filter(is_wanted, kept.lines(is_growing=follow))
        if not printed(so_far if tail is None else deque(so_far, tail)) and tail != 0:
            click.echo("It has printed nothing that is stored." if found.is_over else _NO_LINE, err=True)
        if follow:
            printed(filter(is_wanted, kept.follow()))


_TRUNCATED = "[TRUNCATED - MAXIMUM LOG FILE SIZE REACHED]"  # Metaflow's (runtime.py, 2.19)
_NO_LINE = (
    "No such line is stored. Metaflow stores the log of a local run when its task has ended; until then its lines are in "
    "the terminal of that run. It stores remote ones every few seconds."
)


def _refuse_unknown(view: GangView | None, rank: int | None, node: int | None) -> None:
    """Raise for a rank or node that the gang does not have, as far as that is known."""
    nodes = range(0 if view is None else len(view.nodes))
    ranks = range(max((len(each.nodes) * each.nproc for each in view.placed), default=0) if view else 0)
    for kind, asked, known in (("rank", rank, ranks), ("node", node, nodes)):
        if asked is not None and known and asked not in known:
            raise CommandException(f"The gang has no {kind} {asked}. It has {names(known, kind)}.")


def _page(obj: Any, stored: StoredGangs, place: StoredGang) -> list[str]:
    if (view := stored.view(place)) is not None:
        return lines_of(page_of(view, place))
    with_gangs = parallel_steps(obj.graph)
    begun = [f"{place.run}/{name}" for name in stored.steps(place.run) if name in with_gangs]
    why = f"Step {place.step} has no @torchrun. Steps of this run that have it: {', '.join(begun) or 'none so far'}."
    if place.step in with_gangs:
        why = "Nothing is recorded of this step: its control node has not joined yet, or another version of "
        why += "metaflow-torchrun ran there."
    return [place.title, why, "", place.commands(GangView())]


@command("Have all ranks of a running step stop at the same step, if their script calls stopping(); it saves.")
def stop(obj: Any, gang: str, attempt: int | None) -> None:
    """End a launch before its time; the run goes on with what it has."""
    stored, found = find_one(obj, gang, attempt)
    told = answer_of(stored, found, "stop", {"needs_all": True}).data
    if not told.get("call"):
        raise CommandFailed(f"Nothing was stopped in {found.where}: {told['why']}.")
    click.echo(f"All ranks of {found.where} stop at call {told['call']} of stopping().")


for each in (show, logs, outputs, profile, stacks, stop):
    torchrun.add_command(each)
