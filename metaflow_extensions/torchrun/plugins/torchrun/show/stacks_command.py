"""``python flow.py torchrun stacks``: what every rank does now, and which are at the same place as before."""

# mypy: disable-error-code="untyped-decorator"
# Metaflow's copy of click has no types.

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from ..compat.cli import click
from ..gang.stacks import GangStacks, alike
from ..gang.wire import from_plain, to_plain
from ..machine.frames import look_first
from ..registry import Reply
from ..texts import counted, duration, moment, names
from .asking import answer_of, ask, last_reply
from .finding import CommandFailed, command, find_one
from .parts import printable

_WATCH_S = 5.0


@command("Ask all ranks of a running step what they do now, and print their stacks. Nothing is stopped.")
@click.option("--rank", type=int, default=None, help="This rank's whole stack, with the frames of libraries.")
@click.option("--watch", is_flag=True, default=False, help="Ask every few seconds, until the gang ends.")
@click.option("--json", "as_json", is_flag=True, default=False, help="Write JSON, one line for each answer.")
def stacks(obj: Any, gang: str, rank: int | None, watch: bool, as_json: bool, attempt: int | None) -> None:
    """Ask, and print the answer; with ``watch`` again and again, until the gang ends."""
    stored, found = find_one(obj, gang, attempt)
    before = last_reply(stored.registry(found), "stacks")
    answer: Reply | None = answer_of(stored, found, "stacks", {})
    with suppress(KeyboardInterrupt):  # this is how a watch ends
        while answer is not None:
            for line in _lines(answer, before, rank, watch, as_json):
                click.echo(printable(line))
            if not watch:
                return
            time.sleep(_WATCH_S)
            before, answer = answer, ask(stored, found, "stacks", {})
        click.echo(f"{found.where} has ended.")


def _lines(answer: Reply, before: Reply | None, rank: int | None, watch: bool, as_json: bool) -> Iterator[str]:
    """Return what is shown of an answer: where all ranks are, who has moved, and, unless it is watched, the stacks."""
    found = _read(answer)
    since_s = 0.0 if before is None else answer.time - before.time
    moved, same = ([], []) if before is None else _moved(found, _read(before))
    if rank not in (None, *found.ranks) and found.launch is not None:
        text = f"Rank {rank} has not answered. Ranks that have: {', '.join(map(str, found.ranks)) or 'none'}."
        if not watch:
            raise CommandFailed(text)
        yield text
    elif as_json:
        plain: dict[str, Any] = to_plain(found)
        for node in plain["nodes"].values():
            node["ranks"] = {name: each for name, each in node["ranks"].items() if rank is None or name == str(rank)}
        about = {"time": answer.time, "since_s": since_s, "other_place": moved, "same_place": same}
        yield json.dumps({**about, **plain}, allow_nan=False)
    else:
        yield f"{moment(answer.time)}  {_headline(found)}"
        yield from (f"  If the launch hangs: {each}" for each in found.collectives)
        yield from _places(found)
        for ranks, place in ((moved, "at another place than"), (same, "at the same place as")):
            if ranks:
                yield f"  {names(ranks, 'rank')} {'is' if len(ranks) == 1 else 'are'} {place} {duration(since_s)} ago"
        if rank is not None or not watch:
            yield from _stacks(found, rank)


def _read(answer: Reply) -> GangStacks:
    found: GangStacks = from_plain(GangStacks, answer.data, "the answer")
    return found


def _moved(found: GangStacks, before: GangStacks) -> tuple[list[int], list[int]]:
    """Return the ranks that have moved since an earlier answer, and those that are where they were.

    Ranks whose stacks are not known at both moments are in neither list. Stacks of another generation can't be compared.
    """
    if (found.launch, found.generation) != (before.launch, before.generation):
        return [], []
    former = {rank: each.mark for rank, each in before.ranks.items() if each.mark}
    known = {rank: each.mark for rank, each in found.ranks.items() if each.mark and rank in former}
    moved = [rank for rank, mark in known.items() if mark != former[rank]]
    return moved, [rank for rank in known if rank not in moved]


def _headline(found: GangStacks) -> str:
    if found.launch is None:
        return (
            "No worker runs now: the step's own code does, the nodes wait for each other, or all workers are about to start "
            "again. torchrun show says which."
        )
    if not found.ranks:
        return f"Launch {found.launch}: no worker runs now."
    nodes = sum(bool(each.ranks) for each in found.nodes.values())
    return f"Launch {found.launch}, {counted(len(found.ranks), 'rank')} on {counted(nodes, 'node')}:"


def _places(found: GangStacks) -> Iterator[str]:
    at: dict[str, list[int]] = {}
    for rank, each in found.ranks.items():
        at.setdefault(each.where, []).append(rank)
    for where, ranks in at.items():
        yield f"  {names(ranks, 'rank')}: {where}"
    first, why = look_first(found.ranks)
    if first and not found.collectives:
        yield f"  If the launch hangs, look at {names(first, 'rank')} first: {why}."
    for node, why in found.missing.items():
        yield f"  {names([node])} {why}"


def _stacks(found: GangStacks, rank: int | None) -> Iterator[str]:
    """Return each different stack once, with the ranks that have it: whole of one rank, else the user's own frames."""
    for (first, *others), each in alike({its: each for its, each in found.ranks.items() if rank in (None, its)}):
        if text := (rank is None and each.short) or each.text:
            node, host = next((node, here.host) for node, here in found.nodes.items() if first in here.ranks)
            more = f", and the same in {names(others, 'rank')}" if others else ""
            yield from ("", f"--- rank {first} (node {node}, host {host}){more}", *text.splitlines())
