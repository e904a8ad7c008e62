"""What the workers of one node were doing when the gang was found to hang, for the log and for a file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass

from ...machine.stacks import ask_workers

_MAX_LOG_CHARS = 200_000


@dataclass(frozen=True)
class Findings:
    """What was found out about the workers of one node."""

    file: str | None  # with everything. None if nothing could be written
    text: str  # its contents for the log, at most some 200 KB: of long stacks the middle is left out
    where: dict[int, str]  # for every rank one line: where its main thread was, or why that is not known


def collect(
    workers: Mapping[int, int], folder: str, keep_in: str | None, name: str, within_s: float, py_spy: str | None
) -> Findings:
    """Ask all workers at once what they do, and keep the answers where they survive the launch.

    The file lies in a fresh folder below `keep_in`, or below the system's temporary folder. The other arguments are
    those of `ask_workers`. Never raises for what workers, py-spy or the disk do.
    """
    found = ask_workers(workers, folder, within_s, py_spy)
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
