"""``python flow.py torchrun profile``: what a rank does for some seconds, as a trace of torch's profiler."""

# mypy: disable-error-code="untyped-decorator"
# Metaflow's copy of click has no types.

from __future__ import annotations

import gzip
import os
from typing import Any

from ..compat.cli import click
from ..compat.datastore import DatastoreValues
from ..texts import size_text
from .asking import answer_of
from .finding import CommandFailed, command, find_one


@command("Profile one rank of a running step for some seconds, and write the trace, which Perfetto and Chrome show.")
@click.option("--rank", type=int, required=True, help="The rank.")
@click.option("--seconds", type=click.FloatRange(0.1, 10.0), default=5.0, help="How long, at most 10; 5 by default.")
@click.option("--to", type=str, default=None, help="The file; by default trace-rankN.json.")
def profile(obj: Any, gang: str, rank: int, seconds: float, to: str | None, attempt: int | None) -> None:
    """Ask for a profile, and write it to a file."""
    path = to or f"trace-rank{rank}.json"
    folder = os.path.dirname(path) or os.curdir
    if os.path.isdir(path) or not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise CommandFailed(f"{path} can't be written: name a file in a folder that is there, and yours.")
    stored, found = find_one(obj, gang, attempt)
    click.echo(
        f"Profiling rank {rank} of {found.where} for {seconds:g} s; then torch needs some time for the trace.", err=True
    )
    told = answer_of(stored, found, "profile", {"rank": rank, "seconds": seconds}).data
    if not told.get("parts"):
        raise CommandFailed(f"There is no profile of rank {rank} in {found.where}: {told['why']}.")
    pieces = dict(DatastoreValues(stored.datastore).load(told["parts"]))
    data = gzip.decompress(b"".join(pieces[key] for key in told["parts"]))
    with open(path, "wb") as file:
        file.write(data)
    click.echo(f"{path} ({size_text(len(data))}): open it at https://ui.perfetto.dev or in chrome://tracing.")
