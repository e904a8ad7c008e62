"""``python flow.py torchrun stacks``: what every rank does now, and which are at the same place as before."""

# mypy: disable-error-code="untyped-decorator"
# Metaflow's copy of click has no types.

from __future__ import annotations

import getpass
import json
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ..compat.cli import CommandException, click
from ..elements.terminal import printable
from ..gang.stacks import GangStacks
from ..gang.texts import counted, duration, names
from ..gang.wire import from_plain, to_plain
from ..machine.frames import Found, look_first
from ..registry import Reply, Request
from .finding import WHICH, attempt_option, find_one, gang_argument
from .stored_gangs import StoredGang, StoredGangs

_WATCH_S = 5.0
# The control node looks for requests every 5 s in an object store (`task/gang_store`), and needs some seconds to answer.
_PATIENCE_S = 75.0
_LOOK_S, _LOOK_ON_DISK_S = 2.0, 0.2
_SEE_END_S = 10.0  # between checks whether the gang has ended; each costs several requests


class NoAnswer(CommandException):  # type: ignore[misc]  # Metaflow is not typed
    """No answer has come, though the command is correct."""

    headline = "No answer"


class AskedGang:
    """One attempt of a gang, which is asked for its stacks."""

    def __init__(self, stored: StoredGangs, gang: StoredGang, attempt: int) -> None:
        self.where = f"{gang.run}/{gang.step}/{gang.control_task}"
        self._stored, self._gang, self._attempt = stored, gang, attempt
        self._registry = stored.registry(gang, attempt)
        self._show = f"{stored.program} show {self.where}"

    def last(self) -> Reply | None:
        """Return the last answer, perhaps to another command."""
        return self._registry.load_answer()

    def _is_over(self) -> bool:
        """Return whether the attempt has ended, as far as the datastore shows."""
        gangs = self._stored.gangs(self._gang.run, self._gang.step)
        found = [each for each in gangs if each.control_task == self._gang.control_task]
        if not found or found[0].place(self._attempt).is_over:
            return True
        view = self._stored.view(found[0], self._attempt)
        return view is not None and view.is_over

    def ask(self) -> Reply | None:
        """Store a request, and return the first answer to it or to a later request of somebody else; None: it is over."""
        if self._is_over():
            return None
        before = self.last()
        self._store_request()
        look_s = _LOOK_S if self._stored.storage.kind != "local" else _LOOK_ON_DISK_S
        began = looked = time.monotonic()
        while time.monotonic() - began < _PATIENCE_S:
            time.sleep(look_s)
            answer = self.last()
            if answer is not None and (before is None or answer.request.id != before.request.id):
                return answer
            if time.monotonic() - looked > _SEE_END_S:
                if self._is_over():
                    return None
                looked = time.monotonic()
        raise NoAnswer(
            f"{self.where} has not answered within {_PATIENCE_S:g} s. Its control node answers while current.torch.run "
            "waits: it may be in code of its own, wait for a machine, or have been killed, or have a clock that is 10 "
            f"minutes from this one's. To see what is known of it: {self._show}."
        )

    def refuse(self) -> NoAnswer:
        """Return the error of a gang that has ended."""
        return NoAnswer(f"{self.where} has ended, so none of its workers runs. To see how it ended: {self._show}.")

    def _store_request(self) -> None:
        try:
            who = getpass.getuser()
        except (KeyError, OSError):  # the user has no name, as in many containers
            who = "somebody"
        made = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{who}-{uuid.uuid4().hex[:8]}"
        self._registry.save_request(Request(made, time.time(), "stacks"))


@click.command(
    help="Ask all ranks of a running step what they do now, and print their stacks. Nothing is stopped.", epilog=WHICH
)
@gang_argument
@click.option("--rank", type=int, default=None, help="This rank's whole stack, with the frames of libraries.")
@click.option("--watch", is_flag=True, default=False, help="Ask every few seconds, until the gang ends.")
@click.option("--json", "as_json", is_flag=True, default=False, help="Write JSON, one line for each answer.")
@attempt_option
@click.pass_obj
def stacks(obj: Any, gang: str, rank: int | None, watch: bool, as_json: bool, attempt: int | None) -> None:
    """Ask, and print the answer; with ``watch`` again and again, until the gang ends."""
    asked = AskedGang(*find_one(obj, gang, attempt))
    before = asked.last()
    answer = asked.ask()
    if answer is None:
        raise asked.refuse()
    while answer is not None:
        for line in _lines(Shown.of(answer, before), rank, watch, as_json):
            click.echo(printable(line))
        if not watch:
            return
        try:
            time.sleep(_WATCH_S)
            before, answer = answer, asked.ask()
        except KeyboardInterrupt:  # this is how a watch ends
            return
    click.echo(f"{asked.where} has ended.")


def _lines(shown: Shown, rank: int | None, watch: bool, as_json: bool) -> Iterator[str]:
    if rank not in (None, *shown.found.ranks) and shown.found.launch is not None:
        known = ", ".join(map(str, shown.found.ranks)) or "none"
        text = f"Rank {rank} has not answered. Ranks that have: {known}."
        if not watch:
            raise NoAnswer(text)
        yield text
    elif as_json:
        yield json.dumps(shown.data(rank), allow_nan=False)
    else:
        yield from shown.lines(rank, short=watch)


@dataclass(frozen=True)
class Shown:
    """An answer, and what has changed since the one before."""

    found: GangStacks
    at: float  # seconds since 1970
    since_s: float  # since the answer before
    moved: Sequence[int]
    same: Sequence[int]

    @staticmethod
    def of(answer: Reply, before: Reply | None) -> Shown:
        """Return what is shown of an answer; `before` may be one of an older version."""
        found: GangStacks = from_plain(GangStacks, answer.data.get("found", {}), "the answer")
        moved: list[int] = []
        same: list[int] = []
        if before is not None:
            with suppress(ValueError):
                moved, same = found.has_moved(from_plain(GangStacks, before.data.get("found", {}), "the answer"))
        return Shown(found, answer.time, 0.0 if before is None else answer.time - before.time, moved, same)

    def data(self, rank: int | None) -> dict[str, Any]:
        """Return it as plain data."""
        plain: dict[str, Any] = to_plain(self.found)
        if rank is not None:
            for node in plain["nodes"].values():
                node["ranks"] = {name: each for name, each in node["ranks"].items() if name == str(rank)}
        return {"time": self.at, "since_s": self.since_s, "other_place": self.moved, "same_place": self.same, **plain}

    def lines(self, rank: int | None, short: bool) -> list[str]:
        """Return it for a terminal: where all ranks are, who has moved, and, unless it shall be short, the stacks."""
        ranks, clock = self.found.ranks, time.strftime("%H:%M:%S", time.localtime(self.at))
        if self.found.launch is None:
            return [
                f"{clock}  No worker runs now: the step's own code does, or the nodes wait for each other. torchrun show "
                "says which."
            ]
        if not ranks and not self.found.missing:
            return [f"{clock}  Launch {self.found.launch}: no worker has started yet."]
        lines = [
            f"{clock}  Launch {self.found.launch}, {counted(len(ranks), 'rank')} on {counted(self._nodes, 'node')}:"
        ]
        lines += [f"  {text}" for text in self._places()]
        lines += [f"  {names([node])} has no answer: {why}" for node, why in self.found.missing.items()]
        lines += [f"  {text}" for text in self._movement()]
        return lines if short and rank is None else [*lines, *self._stacks(rank)]

    @property
    def _nodes(self) -> int:
        return len([each for each in self.found.nodes.values() if each.ranks])

    def _places(self) -> list[str]:
        lines = [f"{names(ranks, 'rank')}: {where}" for where, ranks in _by(self.found.ranks, "where").items()]
        first, why = look_first(self.found.ranks)
        return [*lines, f"If the launch hangs, look at {names(first, 'rank')} first: {why}."] if first else lines

    def _movement(self) -> list[str]:
        since = f"{duration(self.since_s)} ago"
        said = []
        if self.moved:
            verb = "is" if len(self.moved) == 1 else "are"
            said.append(f"{names(self.moved, 'rank')} {verb} at another place than {since}")
        if self.same:
            verb = "is" if len(self.same) == 1 else "are"
            said.append(f"{names(self.same, 'rank')} {verb} at the same place as {since}")
        return said

    def _stacks(self, rank: int | None) -> list[str]:
        """Return each different stack once, with the ranks that have it: whole of one rank, else the user's own frames."""
        chosen = {number: each for number, each in self.found.ranks.items() if rank in (None, number)}
        by_mark, lines = _by(chosen, "mark"), list[str]()
        node_of = {number: node for node, found in self.found.nodes.items() for number in found.ranks}
        for number, each in chosen.items():
            alike = by_mark[each.mark] if each.mark else [number]
            text = (rank is None and each.short) or each.text
            if alike[0] == number and text:
                node = node_of[number]
                place = f"node {node}, host {self.found.nodes[node].host}"
                more = f", and the same in {names(alike[1:], 'rank')}" if len(alike) > 1 else ""
                lines += ["", f"--- rank {number} ({place}){more}", *text.splitlines()]
        return lines


def _by(ranks: dict[int, Found], name: str) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for rank, each in ranks.items():
        found.setdefault(getattr(each, name), []).append(rank)
    return found
