"""``python flow.py torchrun stacks``: what every rank of a gang does now, and which ranks have moved since the last time."""

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
from ...records.requests import Answer, Asking, GangCommand
from .told import GangStacks, RankStacks

_WATCH_S = 5.0


def ask_gang(gang: Asking, options: Mapping[str, Any]) -> Iterator[str]:
    """Ask, and yield the answer as lines; with ``watch`` again and again, until the gang ends."""
    before = gang.last()
    while True:
        answer = gang.ask({"native": options["native"]})
        shown = Shown.of(answer, before)
        if options["json"]:
            yield json.dumps(shown.data(options["rank"]), allow_nan=False)
        else:
            yield from shown.lines(options["rank"], short=options["watch"])
        if not options["watch"]:
            return
        before = answer
        time.sleep(_WATCH_S)
        if gang.is_over():
            yield f"{gang.where} has ended."
            return


COMMAND = GangCommand(
    "stacks",
    "Ask a gang that runs what every rank does now, and print the stacks. Nothing is stopped.",
    {
        "rank": (int, "Only this rank's stacks."),
        "watch": (None, "Ask every few seconds, until the gang ends."),
        "native": (None, "With the frames of C and C++, by py-spy, which stops each worker for a second or more."),
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
        return {"time": self.at, "since_s": self.since_s, "moved": self.moved, "not_moved": self.same, **plain}

    def lines(self, rank: int | None, short: bool) -> list[str]:
        """Return it for a terminal: where all ranks are, who has moved, and, unless it shall be short, the stacks."""
        ranks, clock = self.found.ranks, time.strftime("%H:%M:%S", time.localtime(self.at))
        if self.found.launch is None:
            return [
                f"{clock}  No worker runs: the step's code is outside of current.torch.run, or between two launches."
            ]
        if rank is not None and rank not in ranks:
            raise TorchrunError(f"Rank {rank} has not answered. Ranks that have: {names(sorted(ranks), 'rank')}.")
        lines = [
            f"{clock}  Launch {self.found.launch}, {counted(len(ranks), 'rank')} on {counted(self._nodes, 'node')}:"
        ]
        lines += [f"  {text}" for text in self._places()]
        lines += [f"  {names([node])} has no answer: {why}" for node, why in self.found.missing.items()]
        lines += [f"  {text}" for text in self._movement()]
        return lines if short and rank is None else [*lines, *self._stacks(rank)]

    @property
    def _nodes(self) -> int:
        return len(self.found.nodes) + len(self.found.missing)

    def _places(self) -> list[str]:
        return [f"{names(ranks, 'rank')}: {where}" for where, ranks in _by(self.found.ranks, "where").items()]

    def _movement(self) -> list[str]:
        since = f"since {duration(self.since_s)} ago"
        said = []
        if self.moved:
            said.append(f"{names(self.moved, 'rank')} {'has' if len(self.moved) == 1 else 'have'} moved {since}")
        if self.same:
            verb = "has" if len(self.same) == 1 else "have"
            said.append(f"{names(self.same, 'rank')} {verb} not moved {since}: slow, stuck, or in a long call")
        return said

    def _stacks(self, rank: int | None) -> list[str]:
        """Return each different stack once, with the ranks that have it."""
        chosen = {number: each for number, each in self.found.ranks.items() if rank in (None, number)}
        lines = []
        for number, each in chosen.items():
            alike = [other for other, its in chosen.items() if each.mark and its.mark == each.mark] or [number]
            if alike[0] == number and each.text:
                node = self.found.node_of(number)
                place = f"node {node}, host {self.found.nodes[node].host}"
                more = f", and the same in {names(alike[1:], 'rank')}" if len(alike) > 1 else ""
                lines += ["", f"--- rank {number} ({place}){more}", *each.text.splitlines()]
        return lines


def _by(ranks: dict[int, RankStacks], name: str) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for rank, each in ranks.items():
        found.setdefault(getattr(each, name), []).append(rank)
    return found
