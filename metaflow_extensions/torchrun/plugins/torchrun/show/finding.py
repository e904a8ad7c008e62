"""Finds the gang that a command's argument and options name, in the datastore."""

# mypy: disable-error-code="untyped-decorator"
# Metaflow's copy of click has no types.

from __future__ import annotations

import time
from typing import Any

from ..compat.cli import CommandException, click
from ..compat.datastore import SPIN, latest_run, open_datastore
from ..compat.graph import parallel_steps
from ..parsing import did_you_mean
from .stored_gangs import StoredGang, StoredGangs, flow_program

WHICH = (
    "RUN is the number of a run; default: the last that `run` started in this folder. Name the STEP if several steps "
    "of the run have @torchrun, and the TASK to choose one of a foreach."
)
PAUSE_S = 3.0  # between two looks of who follows a gang


class CommandFailed(CommandException):  # type: ignore[misc]  # Metaflow is not typed
    """The command is correct, and can't be done."""

    headline = "Command failed"


class NotYet(CommandException):  # type: ignore[misc]  # Metaflow is not typed
    """Nothing is there of what a command asks for, but it may come."""


def or_latest(ctx: Any, _: Any, named: str) -> str:
    """Return the gang that a command line names, else the latest run; say which. click calls it once per command."""
    if named or not (run := latest_run(ctx.obj.flow.name)):
        return named
    # Metaflow (2.19) numbers a run when all is checked, so a refused one leaves the run before as the latest. It does not
    # note those of `resume`.
    click.echo(
        f"[torchrun] Showing run {run}, the last that `run` started here. To see a resumed run, give its number.",
        err=True,
    )
    return run


def command(text: str) -> Any:
    """Return a decorator that makes a command about an attempt of a gang.

    click (7.1, in Metaflow 2.19) would cut its help in the list of all.
    """
    gang = click.argument("gang", metavar="[RUN[/STEP[/TASK]]]", default="", callback=or_latest)
    attempt = click.option("--attempt", type=int, default=None, help="Which attempt; the latest by default.")
    made = click.command(help=text, short_help=text, epilog=WHICH)
    return lambda function: made(gang(attempt(click.pass_obj(function))))


json_option = click.option("--json", "as_json", is_flag=True, default=False, help="Write JSON.")


def find_one(obj: Any, named: str, attempt: int | None) -> tuple[StoredGangs, StoredGang]:
    """Return the stored gangs, and the named gang; raise an error with the choices if several match."""
    stored, found = find(obj, named, attempt)
    if len(found) > 1:
        known = ", ".join(each.where for each in found)
        raise CommandException(f"{named} has {len(found)} gangs, and each has a rank 0. Name one of them: {known}.")
    return stored, found[0]


def find(obj: Any, named: str, attempt: int | None = None) -> tuple[StoredGangs, list[StoredGang]]:
    """Return an attempt, by default the last, of the gangs named by ``RUN``, ``RUN/STEP`` or ``RUN/STEP/TASK``.

    Raises an error with the choices. `spin` stores what it runs in a place of its own, whatever the flow's datastore is.
    """
    name, stored = obj.flow.name, StoredGangs(obj.flow_datastore)
    if not named:
        raise NotYet(f"No run of {name} was started here. Name one: {stored.program} show RUN.")
    parts = [part for part in named.split("/") if part]
    if parts[:1] == [name]:  # Metaflow's client puts the flow's name first
        parts = parts[1:]
    if not 1 <= len(parts) <= 3 or any(part.strip(".") == "" for part in parts):  # ".." is a folder
        raise CommandException(f"{named!r} is no gang: write RUN, RUN/STEP or RUN/STEP/TASK, for example 1234/train.")
    run, named_step, task = parts[0], *([*parts[1:], None, None][:2])
    steps = stored.steps(run)
    if not steps and (of_spin := open_datastore(SPIN, name)) is not None and (spun := StoredGangs(of_spin)).steps(run):
        stored, steps = spun, spun.steps(run)
    if not steps and len(parts) == 1 and run in parallel_steps(obj.graph):
        raise CommandException(f"{run} is a step. Name its run, too: {stored.program} show RUN/{run}.")
    if not steps:
        latest = latest_run(name) or ""
        hint = "" if run == latest else did_you_mean(run, [latest])
        raise (NotYet if run == latest else CommandException)(
            f"The datastore ({stored.storage.place}) has no run {run} of {name}.{hint} If the run used another datastore, "
            f"name it: {flow_program()} --datastore NAME torchrun show {named}."
        )
    step = named_step or _only_gang(obj, run, steps)
    gangs = stored.gangs(run, step)
    if not gangs:
        own = parallel_steps(obj.graph)
        hint = "" if step in own else did_you_mean(step, own)
        text = f"Run {run} has no tasks of step {step}.{hint} It has begun: {', '.join(steps)}."
        raise (NotYet if step in own else CommandException)(text)
    # A task may be that of any node, or the control task of the clone that was asked for.
    found = [gang for gang in gangs if task in (None, *gang.tasks.values(), *(gang.clone or ())[1:])]
    if not found:
        known = ", ".join(gang.control_task for gang in gangs)
        raise CommandException(
            f"Step {step} of run {run} has no task {task}. Its gangs have the control tasks {known}."
        )
    return stored, [_of_attempt(gang, attempt) for gang in found]


def await_gang(obj: Any, named: str) -> str:
    """Wait until the named gang has begun, or one of the latest run; say once what is waited for. Return its name.

    Raises what `find` raises of a gang that can't come any more.
    """
    is_told = False
    while True:
        named = named or latest_run(obj.flow.name) or ""
        try:
            find(obj, named)
            return named
        except NotYet as error:
            if not is_told:
                click.echo(f"[torchrun] {error} Waiting for it; Ctrl-C ends this.", err=True)
            is_told = True
        time.sleep(PAUSE_S)


def _only_gang(obj: Any, run: str, steps: list[str]) -> str:
    """Return the only step of a run that is a gang."""
    own = parallel_steps(obj.graph)
    if not own:
        raise CommandException("This flow has no gang. Of TorchrunSingleNodeMultiGPU, card and `logs` tell.")
    found = [name for name in own if name in steps]
    if len(found) == 1:
        return found[0]
    if found:
        raise CommandException(f"Run {run} has several gangs. Name the step: {', '.join(f'{run}/{s}' for s in found)}.")
    raise NotYet(f"No parallel step of run {run} has begun. It has: {', '.join(steps)}.")


def _of_attempt(gang: StoredGang, attempt: int | None) -> StoredGang:
    if attempt is None:
        return gang
    if not 0 <= attempt <= gang.last_attempt:
        known = "only attempt 0" if gang.last_attempt == 0 else f"attempts 0 to {gang.last_attempt}"
        raise CommandException(f"{gang.where} has {known}, not {attempt}.")
    return gang.of_attempt(attempt)
