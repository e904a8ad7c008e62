"""``python flow.py torchrun stacks``: what every rank does now, and which are at the same place as before."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ...errors import TorchrunError
from ...gang.texts import counted, duration, names
from ...gang.wire import to_plain
from ...machine.frames import Found, look_first
from ...records.requests import Answer, Asked, GangCommand, GangHasEnded
from .told import GangStacks

_WATCH_S = 5.0


def ask_gang(gang: Asked, options: Mapping[str, Any]) -> Iterator[str]:
    """Ask, and yield the answer as lines; with ``watch`` again and again, until the gang ends."""
    before = gang.last()
    answer = gang.ask({})
    yield from _lines(answer, before, options)
    while options["watch"]:
        try:
            time.sleep(_WATCH_S)
            before, answer = answer, gang.ask({})
        except KeyboardInterrupt:  # this is how a watch ends
            return
        except GangHasEnded:
            yield f"{gang.where} has ended."
            return
        yield from _lines(answer, before, options)


def _lines(answer: Answer, before: Answer | None, options: Mapping[str, Any]) -> Iterator[str]:
    shown = Shown.of(answer, before)
    if options["rank"] not in (None, *shown.found.ranks) and shown.found.launch is not None:
        known = ", ".join(map(str, shown.found.ranks)) or "none"
        error = TorchrunError(f"Rank {options['rank']} has not answered. Ranks that have: {known}.")
        if not options["watch"]:
            raise error
        yield str(error)
    elif options["json"]:
        yield json.dumps(shown.data(options["rank"]), allow_nan=False)
    else:
        yield from shown.lines(options["rank"], short=options["watch"])


COMMAND = GangCommand(
    "stacks",
    "Ask all ranks of a running step what they do now, and print their stacks. Nothing is stopped.",
    {
        "rank": (int, "This rank's whole stack, with the frames of libraries."),
        "watch": (None, "Ask every few seconds, until the gang ends."),
        "json": (None, "Write JSON, one line for each answer."),
    },
    ask_gang,
)


@dataclass(frozen=True)
class Shown:
    """An answer, and what has changed since the one before."""

    found: GangStacks
    at: float  # seconds since 1970
    since_s: float  # since the answer before
    moved: Sequence[int]
    same: Sequence[int]

    @staticmethod
    def of(answer: Answer, before: Answer | None) -> Shown:
        """Return what is shown of an answer; `before` may be one of an older version."""
        found = GangStacks.read(answer.data.get("found", {}))
        moved: list[int] = []
        same: list[int] = []
        if before is not None:
            with suppress(ValueError):
                moved, same = found.has_moved(GangStacks.read(before.data.get("found", {})))
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
        for number, each in chosen.items():
            alike = by_mark[each.mark] if each.mark else [number]
            text = (rank is None and each.short) or each.text  # older versions have stored no short ones
            if alike[0] == number and text:
                node = self.found.node_of(number)
                place = f"node {node}, host {self.found.nodes[node].host}"
                more = f", and the same in {names(alike[1:], 'rank')}" if len(alike) > 1 else ""
                lines += ["", f"--- rank {number} ({place}){more}", *text.splitlines()]
        return lines


def _by(ranks: dict[int, Found], name: str) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for rank, each in ranks.items():
        found.setdefault(getattr(each, name), []).append(rank)
    return found
