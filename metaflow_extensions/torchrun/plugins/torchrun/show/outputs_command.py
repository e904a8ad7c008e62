"""``python flow.py torchrun outputs``: lists or downloads the files that a launch has stored."""

# mypy: disable-error-code="untyped-decorator"
# Metaflow's copy of click has no types.

from __future__ import annotations

from typing import Any

from ..compat.cli import click
from ..compat.datastore import DatastoreValues
from ..outputs import Outputs
from ..texts import size_text
from .finding import CommandFailed, command, find_one
from .parts import printable, table


@command("List the files that run(outputs=...) has stored, also when it has failed, or download them.")
@click.option("--to", type=str, default=None, help="Write the files below this folder.")
@click.option(
    "--launch",
    type=int,
    default=None,
    help="The number of the call of run, from 0; by default the last that has stored a file.",
)
@click.option("--node", type=int, default=None, help="Only the files of this node.")
def outputs(obj: Any, gang: str, to: str | None, launch: int | None, node: int | None, attempt: int | None) -> None:
    """List the files of a launch as lines of a table, or write them below a folder."""
    gangs, found = find_one(obj, gang, attempt)
    view = gangs.view(found)
    launches = {} if view is None else view.outputs
    if not launches:
        raise CommandFailed(
            "No launch of this gang has stored outputs. current.torch.run(outputs=[...]) names the files to store; they are "
            "stored when all workers have ended."
        )
    if launch is None:
        with_files = [number for number, nodes in launches.items() if any(each["files"] for each in nodes.values())]
        launch = max(with_files or launches)
    if launch not in launches:
        known = ", ".join(map(str, launches))
        raise CommandFailed(f"Launch {launch} has stored no outputs. Launches that have: {known}.")
    nodes = {each: (row["key"], row["files"], row["size"]) for each, row in launches[launch].items()}
    if node not in (None, *nodes):
        known = ", ".join(map(str, sorted(nodes)))
        raise CommandFailed(f"Node {node} has stored no outputs. Nodes that have: {known}.")
    stored = Outputs(DatastoreValues(gangs.datastore).address, nodes if node is None else {node: nodes[node]})
    try:
        if to is not None:
            click.echo(f"The files are in {printable(str(stored.download(to)))}.")
            return
        rows = [(str(file.node), size_text(file.size), printable(file.name)) for file in stored]
    except (LookupError, OSError) as error:
        raise CommandFailed(str(error)) from error
    lines = table(("node", "size", "name"), rows, right=("node", "size")) if rows else ["No file is stored."]
    click.echo("\n".join([*lines, *(f"Left out: {printable(name)} {why}" for name, why in stored.left_out.items())]))
