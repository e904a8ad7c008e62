"""Collects the stacks of one node's workers in a hang, for the log and for a file."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass

from ...machine.stacks import Question

_MAX_LOG_CHARS = 200_000
_POLL_S = 0.05


@dataclass(frozen=True)
class Findings:
    """The stacks of the workers of one node."""

    file: str | None  # has all stacks; None if it could not be written
    text: str  # the contents for the log, at most about 200 KB: long stacks lack their end
    where: dict[int, str]  # rank -> the place of its main thread in one line, or why it is unknown


async def collect(workers: Mapping[int, int], keep_in: str | None, name: str, within_s: float) -> Findings:
    """Collect the stacks of all workers at once, and keep them in a file that survives the launch.

    The file is in a new folder below `keep_in`, or below the system's temporary folder. `workers` has a pid for each
    global rank. Errors of workers or the disk are not raised.
    """
    question = Question(workers, within_s)
    while (found := question.poll()) is None:
        await asyncio.sleep(_POLL_S)
    share = _MAX_LOG_CHARS // max(1, len(found))
    heads = {rank: f"--- rank {rank}, pid {workers[rank]}: {each.where}\n" for rank, each in found.items()}
    file = _keep("\n".join(f"{heads[rank]}{each.text}\n" for rank, each in found.items()), keep_in, name)
    text = "\n".join(f"{heads[rank]}{each.shortened(share)}\n" for rank, each in found.items())
    return Findings(file, text, {rank: each.where for rank, each in found.items()})


def _keep(text: str, keep_in: str | None, name: str) -> str | None:
    try:
        if keep_in is not None:
            os.makedirs(keep_in, exist_ok=True)
        path = os.path.join(tempfile.mkdtemp(prefix=f"torchrun-hang-{name}-", dir=keep_in), "stacks.txt")
        with open(path, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{text}\n")
    except OSError:  # no such place, or the disk is full
        return None
    return path
