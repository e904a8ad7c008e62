"""Which rank misses which collective: what torch's flight recorders of all ranks say, compared. Pure.

Each node reduces what its ranks have recorded to `Calls`. The control node looks in each process group at the first
collective that has not ended, not at the last one: NCCL's are called far ahead. Where facts are missing, less is said.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from ..machine.frames import Found
from ..texts import names, shortened

_BEFORE = 4  # so many collectives before the first that has not ended are kept: some ranks may have ended them
_MAX_RECORDS, _MAX_MEMBERS = 200, 512  # of a node's message
_MAX_SAID = 3
_TYPES = {"Float": "float32", "Double": "float64", "Half": "float16", "Long": "int64", "Int": "int32", "Byte": "uint8"}
# All ranks give as much to these; of others, ranks may give different sizes.
_OF_ONE_SIZE = {"all_reduce", "broadcast", "reduce", "all_gather_single", "reduce_scatter_single"}
_WITH_ROOT = {"broadcast", "reduce", "gather", "scatter"}


@dataclass(frozen=True)
class Calls:
    """The collectives of one process group that some ranks have called; all of them the same ones."""

    group: str  # recorder and name, such as ``"gloo:0"``: a group may have one for CPUs and one for GPUs
    description: str
    size: int  # 0: its ranks are not known
    members: tuple[int, ...]  # its global ranks; empty where they are the first ones of all
    last: int  # the number of the last call; 0: none
    waits: int  # the number of the first that has not ended; 0: all have
    called: tuple[tuple[int, str, str], ...]  # number, operation and size of `waits` and of some before
    ranks: tuple[int, ...] = ()


def reduced(dumps: Mapping[int, Mapping[str, Any]], groups: Mapping[int, Sequence[Mapping[str, Any]]]) -> list[Calls]:
    """Return what the ranks of a node have called; what waits comes first, if there is too much.

    `dumps`: rank -> recorder -> what torch's recorder has answered; `groups`: rank -> what the worker has recorded.
    """
    ranks_of: dict[Calls, list[int]] = defaultdict(list)
    for rank, of_recorders in dumps.items():
        for recorder, dump in of_recorders.items():
            for calls in _of_rank(recorder, dump.get("entries", []), groups.get(rank, ())):
                ranks_of[calls].append(rank)
    found = [replace(calls, ranks=tuple(ranks)) for calls, ranks in ranks_of.items()]
    return sorted(found, key=lambda calls: not calls.waits)[:_MAX_RECORDS]


def _of_rank(recorder: str, entries: Sequence[Any], groups: Sequence[Mapping[str, Any]]) -> Iterator[Calls]:
    ranks = {(each["name"], each["desc"]): each["ranks"] for each in groups}
    times_made = Counter((each["name"], each["desc"]) for each in groups)
    # The recorder keeps the last ones only. Of a group without any, the rank may have called none, or long ago.
    is_whole = not entries or entries[0]["record_id"] == 0
    by_group: dict[tuple[str, str], list[Any]] = {each: [] for each in ranks if is_whole}
    for entry in entries:
        if not entry["is_p2p"]:
            by_group.setdefault(tuple(entry["process_group"]), []).append(entry)
    for key, its in by_group.items():
        # Of operations in one call (NCCL, "coalesced") the last entry alone tells whether they have ended.
        calls = [list(some) for _, some in groupby(its, lambda entry: entry["collective_seq_id"])]
        # Those of gloo never become "completed" (torch 2.13).
        have_ended = [some[-1]["retired"] or some[-1]["state"] == "completed" for some in calls]
        first = have_ended.index(False) if False in have_ended else len(calls)
        # Destroyed and made anew, a group has the same name and counts from 1 again, perhaps not on all ranks.
        is_new = times_made[key] > 1 or len({entry["pg_id"] for entry in its}) > 1
        if is_new or (not is_whole and first == 0):  # the first that waits may have been one before
            continue
        shown = tuple(_described(some[0]) for some in calls[max(0, first - _BEFORE) : first + 1])
        last = calls[-1][0]["collective_seq_id"] if calls else 0
        members = tuple(sorted(ranks.get(key, ())))
        are_first, size = members == tuple(range(len(members))), len(members)
        if not are_first and size > _MAX_MEMBERS:
            size, members = 0, ()
        waits = shown[-1][0] if first < len(calls) else 0
        yield Calls(f"{recorder}:{key[0]}", key[1], size, () if are_first else members, last, waits, shown)


def _described(entry: Mapping[str, Any]) -> tuple[int, str, str]:
    """Return number, operation and size of a call."""
    count = f"{sum(math.prod(sizes) for sizes in entry['input_sizes']):,}".replace(",", " ")
    types = " and ".join(sorted({_TYPES.get(each, each.lower()) for each in entry["input_dtypes"]}))
    return entry["collective_seq_id"], entry["profiling_name"].partition(":")[2], f"{count} x {types}" if types else ""


def compare(calls: Iterable[Calls], silent: Mapping[int, str], found: Mapping[int, Found]) -> list[str]:
    """Return sentences about the groups in which ranks wait; none where nothing can be said for sure.

    `silent`: rank -> how it comes that its recorder has told nothing; `found`: where all ranks are.
    """
    groups: dict[Any, dict[int, Calls]] = defaultdict(dict)
    for each in calls:
        groups[each.group, each.description, each.size, each.members].update(dict.fromkeys(each.ranks, each))
    held = [its for its in groups.values() if any(each.waits for each in its.values())]
    waiting = {rank for its in held for rank, each in its.items() if each.waits}
    # Small groups say more. A rank that is missing in one may itself wait in another: it all began with who waits nowhere.
    findings = [_Group(its, silent, found).finding() for its in sorted(held, key=len)]
    told = [text for text, about in findings if text and not waiting.intersection(about)]
    return (told or [text for text, _ in findings if text])[:_MAX_SAID]


class _Group:
    """A group in which ranks wait for a collective: the first of those that have not ended on all ranks."""

    def __init__(self, calls: Mapping[int, Calls], silent: Mapping[int, str], found: Mapping[int, Found]) -> None:
        self._calls, self._silent, self._found = calls, silent, found
        some = next(iter(calls.values()))
        self._number = min(each.waits for each in calls.values() if each.waits)
        self._inside = [rank for rank, each in sorted(calls.items()) if each.waits == self._number]
        self._members = list(some.members or range(some.size))
        self._name = some.description
        if self._name != "default_pg":  # torch's description of the group of all ranks
            name = some.group.partition(":")[2] if self._name == "undefined" else self._name
            self._name = f"{name} of ranks {shortened(self._members)}" if self._members else name

    def finding(self) -> tuple[str, Sequence[int]]:
        """Return what can be said, and for which ranks the others wait; "" if too little is known, or if it goes on."""
        behind = [rank for rank in self._members if rank in self._calls and self._calls[rank].last < self._number]
        unknown = [rank for rank in self._members if rank not in self._calls]
        called: dict[tuple[str, str], list[int]] = defaultdict(list)
        for rank, each in sorted(self._calls.items()):
            for operation, size in (what for number, *what in each.called if number == self._number):
                called[operation, size if operation in _OF_ONE_SIZE else ""].append(rank)
        _, operation, size = self._calls[self._inside[0]].called[-1]
        what = f"{operation} no. {self._number} of group {self._name}{f' ({size})' if size else ''}"
        if len(called) > 1:
            return self._differ(called), ()
        if behind:
            who = f"{names(behind, 'Rank')} {'has' if len(behind) == 1 else 'have'} not called {what}"
            at = self._at(behind, "; it is at " if len(behind) == 1 else "; they are at ")
            return f"{who}{at}. {self._wait('it')}", behind
        if unknown and self._silent.keys().isdisjoint(unknown):  # they could not be asked: nobody is to blame for that
            return "", ()
        if unknown:
            whys: dict[str, list[int]] = defaultdict(list)
            for rank in unknown:
                whys[self._silent.get(rank, "told nothing")].append(rank)
            told = " ".join(f"{names(its, 'Rank')} {why}." for why, its in whys.items())
            return f"{told} {self._wait(what)}", unknown
        if self._inside == self._members:
            text = f"All {len(self._members)} ranks have called {what}, and it ends on none of them"
            same = "do all name the same src or dst? If so, " if operation in _WITH_ROOT else ""
            return f"{text}{self._at(self._inside, ', at ')}: {same}look at the network or at a GPU.", ()
        return "", ()

    def _differ(self, called: Mapping[tuple[str, str], Sequence[int]]) -> str:
        each_calls = [
            f"{names(ranks, 'rank')} {operation}{f' ({size})' if size else ''}{self._at(ranks, ', at ')}"
            for (operation, size), ranks in sorted(called.items(), key=lambda item: len(item[1]))
        ]
        what = "collective" if len({operation for operation, _ in called}) > 1 else "size"
        text = f"Ranks of group {self._name} differ in the {what} that they have called as no. {self._number}"
        return f"{text}: {'; '.join(each_calls)}."

    def _wait(self, what: str) -> str:
        one, who = len(self._inside) == 1, names(self._inside, "Rank")
        if all(self._found[rank].waits for rank in self._inside if rank in self._found):
            return f"{who} {'waits' if one else 'wait'} in {what}{self._at(self._inside, ', at ')}."
        return f"{who} {'has' if one else 'have'} called {what}."

    def _at(self, ranks: Sequence[int], before: str) -> str:
        """Return the place of these ranks' main threads, if all are at one that is known."""
        found = [self._found.get(rank) for rank in ranks]
        places = {each.where.partition(" in ")[0] if each is not None and each.mark else "" for each in found}
        return f"{before}{places.pop()}" if len(places) == 1 and "" not in places else ""
