"""Collects the stacks of one node's workers in a hang, for the log and for a file."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from textwrap import indent

from ...gang.hangs import alike
from ...gang.texts import names
from ...machine.aside import Aside
from ...machine.frames import Found
from ...machine.stacks import Question

# Of the stacks that a node sends; JSON may double a text (`node.watchers.MAX_TOLD_BYTES`).
_MAX_CHARS = 200_000
_POLL_S = 0.05
_WRITE_S = 1.5  # of the 4 s that DIAGNOSTICS_S has for this and the source lines


@dataclass(frozen=True)
class Findings:
    """The stacks of the workers of one node."""

    file: str | None  # has all stacks; None if it could not be written
    text: str  # for the log: the user's own frames, equal ones once
    ranks: dict[int, Found]  # of equal stacks, only the first has its text; long ones lack their end


async def collect(workers: Mapping[int, int], name: str, within_s: float) -> Findings:
    """Collect the stacks of all workers at once, and keep them in a file that survives the launch.

    The file is in a new folder below the system's temporary folder. `workers` has a pid for each global rank. Errors of
    workers or the disk are not raised.
    """
    question = Question(workers, within_s)
    while (found := question.poll()) is None:
        await asyncio.sleep(_POLL_S)
    whole = (f"--- rank {rank}, pid {workers[rank]}: {each.where}\n{each.text}\n" for rank, each in found.items())
    file = None
    with suppress(TimeoutError):
        file = await Aside().within(_WRITE_S, _keep, "\n".join(whole), name)
    groups = alike(found)
    text = "\n".join(
        f"--- {names(group.ranks, 'rank')}: {group.found.where}\n{indent(group.found.short, '  ')}" for group in groups
    )
    return Findings(file, text, _each_once(found, _MAX_CHARS // max(1, len(groups))))


def _each_once(found: Mapping[int, Found], limit: int) -> dict[int, Found]:
    """Return the same, in which only the first of equal stacks has its text, of at most so many characters."""
    firsts = {group.ranks[0] for group in alike(dict(found))}
    return {
        rank: each.bounded(limit) if rank in firsts else replace(each, text="", line="", short="")
        for rank, each in found.items()
    }


def _keep(text: str, name: str) -> str | None:
    try:
        path = os.path.join(tempfile.mkdtemp(prefix=f"torchrun-hang-{name}-"), "stacks.txt")
        with open(path, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{text}\n")
    except OSError:  # no such place, or the disk is full
        return None
    return path
