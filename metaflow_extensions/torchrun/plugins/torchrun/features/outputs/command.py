"""``python flow.py torchrun outputs``: lists or downloads the files that a launch has stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...datastore_outputs import DatastoreOutputs
from ...elements.terminal import printable, table
from ...errors import TorchrunError
from ...gang.texts import size_text
from ...outputs import OutputFile, Outputs
from ...records.requests import Asked, GangCommand


def list_or_download(gang: Asked, options: Mapping[str, Any]) -> Iterator[str]:
    """List the files of a launch as lines of a table, or write them below the folder ``to``."""
    launches = gang.kept() or {}
    stored = outputs_of({int(number): nodes for number, nodes in launches.items()}, options["launch"], gang.datastore)
    node, folder = options["node"], options["to"]
    if node not in (None, *stored.nodes):
        known = ", ".join(map(str, stored.nodes))
        raise TorchrunError(f"Node {node} has stored no outputs. Nodes that have: {known}.")
    try:
        if folder is not None:
            yield f"The files are in {stored.download(folder, node)}."
            return
        rows = [_row(file) for file in stored if node in (None, file.node)]
        left_out = stored.left_out
    except (LookupError, OSError) as error:
        raise TorchrunError(str(error)) from error
    yield from table(("node", "size", "name"), rows, right=("node", "size")) if rows else ["No file is stored."]
    for name, why in left_out.items():
        yield f"Left out: {printable(name)} {why}"


def _row(file: OutputFile) -> list[str]:
    older = "  (older than the launch)" if file.older else ""
    return [str(file.node), size_text(file.size), printable(file.name) + older]


def outputs_of(launches: Mapping[int, Mapping[str, Any]], launch: int | None, datastore: Mapping[str, str]) -> Outputs:
    """Return what a launch of a gang has stored; by default of the last launch that has stored a file.

    `launches` is what the keeper of outputs has recorded, by launch and node. Raises TorchrunError if there is nothing.
    """
    if launch is None:
        with_files = [number for number, nodes in launches.items() if any(each["files"] for each in nodes.values())]
        launch = max(with_files or launches, default=None)
    if launch is None or not launches:
        raise TorchrunError(
            "No launch of this gang has stored outputs. current.torch.run(outputs=[...]) names the files to store; they are "
            "stored when all workers have ended."
        )
    if launch not in launches:
        known = ", ".join(map(str, launches))
        raise TorchrunError(f"Launch {launch} has stored no outputs. Launches that have: {known}.")
    nodes = {int(node): (each["key"], each["files"], each["size"]) for node, each in launches[launch].items()}
    return DatastoreOutputs(datastore, nodes)


COMMAND = GangCommand(
    "outputs",
    "List the files that run(outputs=...) has stored, also when it has failed, or download them.",
    {
        "to": (str, "Write the files below this folder."),
        "launch": (int, "The number of the call of run, from 0; by default the last that has stored a file."),
        "node": (int, "Only the files of this node."),
    },
    list_or_download,
    is_of_kept=True,
)
