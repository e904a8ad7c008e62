"""``python flow.py torchrun stacks``: asks a gang that runs what every rank does, and prints the answer."""

# mypy: disable-error-code="untyped-decorator"
# Metaflow's copy of click has no types.

from __future__ import annotations

import getpass
import json
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ...channel.registry import Registry
from ...compat.cli import CommandException, click
from ...gang.texts import counted, duration, names
from ...gang.wire import to_plain
from ...records.requests import Answer, Request
from ...show.as_text import printable
from ...show.finding import attempt_option, find_one, gang_argument, json_option
from ...show.stored_gangs import StoredGangs
from .told import GangStacks, RankStacks

# The control node looks for requests twice a minute where a look is a request to an object store. Then the workers
# answer, with native frames within 19 s.
_PATIENCE_S = 75.0
_LOOK_S = 2.0
_LOOK_LOCAL_S = 0.2
_SEE_END_S = 10.0  # between looks whether the gang has ended, which cost several requests
_WATCH_S = 5.0


@click.command(help="Ask a gang that runs what every rank does now, and print the stacks. Nothing is stopped.")
@gang_argument
@click.option("--rank", type=int, default=None, help="Only this rank's stacks.")
@click.option("--watch", is_flag=True, default=False, help="Ask every few seconds, until the gang ends.")
@click.option("--native", is_flag=True, default=False, help="With C++ frames: py-spy stops each worker for seconds.")
@attempt_option
@json_option
@click.pass_obj
def stacks(
    obj: Any, gang: str, rank: int | None, watch: bool, native: bool, attempt: int | None, as_json: bool
) -> None:
    """Print what the ranks of one gang are doing."""
    asked = _Asked.find(obj, gang, attempt)
    asked.refuse_if_over()
    before = asked.registry.load_answer()
    with suppress(KeyboardInterrupt):
        while True:
            answer = _ask(asked, native, before)
            shown = _Shown.of(answer, before)
            lines = [json.dumps(shown.data(rank), allow_nan=False)] if as_json else shown.lines(rank, short=watch)
            click.echo("\n".join(lines))
            if not watch:
                return
            before = answer
            time.sleep(_WATCH_S)
            if asked.is_over():
                click.echo(f"{asked.where} has ended.", err=True)
                return


# --- asking -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Asked:
    """The attempt of a gang that is asked."""

    stored: StoredGangs
    registry: Registry
    named: tuple[str, str, str]  # run, step and control task
    attempt: int

    @staticmethod
    def find(obj: Any, named: str, attempt: int | None) -> _Asked:
        """Return the one that is meant, or say which gangs there are."""
        stored, gang, which = find_one(obj, named, attempt)
        where = (gang.run, gang.step, gang.control_task)
        return _Asked(stored, Registry(obj.flow_datastore, *where, which), where, which)

    @property
    def where(self) -> str:
        """The gang as commands name it."""
        return "/".join(self.named)

    def is_over(self) -> bool:
        """Tell whether the attempt has ended, as far as the datastore knows."""
        run, step, control_task = self.named
        for gang in self.stored.gangs(run, step):
            if gang.control_task == control_task:
                snapshot = self.stored.snapshot(gang, self.attempt)
                return gang.place(self.attempt).is_over or (snapshot is not None and snapshot.summary.is_over)
        return True

    def refuse_if_over(self) -> None:
        """Raise an error where nobody is left to answer."""
        if self.is_over():
            show = f"{self.stored.program} show {self.where}"
            raise CommandException(f"{self.where} has ended, so none of its workers runs. To see how it ended: {show}.")


def _ask(asked: _Asked, native: bool, before: Answer | None) -> Answer:
    """Store a request, and return the first answer that is newer than `before`.

    It may be the answer to what somebody else has asked at the same time: all ask the same.
    """
    request = Request(_id(), time.time(), "stacks", {"native": native})
    asked.registry.save_request(request)
    look_s = _LOOK_LOCAL_S if asked.stored.storage.kind == "local" else _LOOK_S
    began = looked = time.monotonic()
    while time.monotonic() - began < _PATIENCE_S:
        time.sleep(look_s)
        answer = asked.registry.load_answer()
        if answer is not None and (before is None or answer.id != before.id):
            return answer
        if time.monotonic() - looked > _SEE_END_S:
            asked.refuse_if_over()
            looked = time.monotonic()
    raise CommandException(
        f"{asked.where} has not answered within {_PATIENCE_S:g} s. Its control node answers while its step runs: "
        "it may wait for a machine, or have been killed, or run a version of metaflow-torchrun that can't answer. "
        f"To see what is known of it: {asked.stored.program} show {asked.where}."
    )


def _id() -> str:
    try:
        who = getpass.getuser()
    except (KeyError, OSError):  # no such user in the system, as in many containers
        who = "somebody"
    return f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{who}-{uuid.uuid4().hex[:8]}"


# --- showing ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Shown:
    """An answer, and what has changed since the one before."""

    found: GangStacks
    at: float  # seconds since 1970
    since_s: float  # since the answer before
    moved: Sequence[int]
    same: Sequence[int]

    @staticmethod
    def of(answer: Answer, before: Answer | None) -> _Shown:
        """Return what is shown of an answer; `before` may be one of an older version."""
        found = GangStacks.read(answer.data.get("found", {}))
        moved: list[int] = []
        same: list[int] = []
        if before is not None:
            with suppress(ValueError):
                moved, same = found.has_moved(GangStacks.read(before.data.get("found", {})))
        return _Shown(found, answer.time, 0.0 if before is None else answer.time - before.time, moved, same)

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
            raise CommandException(f"Rank {rank} has not answered. Ranks that have: {names(sorted(ranks), 'rank')}.")
        lines = [
            f"{clock}  Launch {self.found.launch}, {counted(len(ranks), 'rank')} on {counted(self._nodes, 'node')}:"
        ]
        lines += [f"  {text}" for text in self._places()]
        lines += [f"  {names([node])} has no answer: {printable(why)}" for node, why in self.found.missing.items()]
        lines += [f"  {text}" for text in self._movement()]
        return lines if short and rank is None else [*lines, *self._stacks(rank)]

    @property
    def _nodes(self) -> int:
        return len(self.found.nodes) + len(self.found.missing)

    def _places(self) -> list[str]:
        return [
            f"{names(ranks, 'rank')}: {printable(where)}" for where, ranks in _by(self.found.ranks, "where").items()
        ]

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
                lines += ["", f"--- rank {number} ({place}){more}", *printable(each.text).splitlines()]
        return lines


def _by(ranks: dict[int, RankStacks], name: str) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for rank, each in ranks.items():
        found.setdefault(getattr(each, name), []).append(rank)
    return found
