"""The stored files of a launch, as a user lists and reads them, on any machine that can reach the datastore.

A result holds only the keys of lists, which are in the datastore as well. So it stays small, however many files there
are.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from .compat.datastore import DatastoreValues, open_datastore
from .errors import TorchrunError
from .texts import counted, first_values, names, size_text


@dataclass(frozen=True)
class OutputFile:
    """One stored file.

    Attributes
    ----------
    name : str
        Its path, relative to the workers' working directory.
    size : int
        Bytes.
    node : int
        The node that has stored it.
    modified : float
        When its content was written, in seconds since 1970.
    """

    name: str
    size: int
    node: int
    modified: float
    _parts: tuple[str, ...] = field(default=(), repr=False)  # keys in the datastore: the same for the same content
    _mode: int = field(default=0o644, repr=False)


@dataclass(frozen=True, repr=False)
class Outputs:
    """The files that a launch has stored in Metaflow's datastore, listed and read from there.

    It is small and can be stored as an artifact. Iterating gives an `OutputFile` for each, by name and node; `len` is
    their number, and ``name in outputs`` tells whether one is there.
    """

    _datastore: Mapping[str, str]  # type, root and flow
    _nodes: Mapping[int, tuple[str, int, int]]  # node -> key of its list, number of files, bytes

    @property
    def nodes(self) -> list[int]:
        """The nodes whose files these are."""
        return sorted(self._nodes)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(size for _, _, size in self._nodes.values())

    @property
    def left_out(self) -> dict[str, str]:
        """The reason why a file was not stored, by name; with several nodes, the node stands before the name."""
        several = len(self._nodes) > 1
        return {
            f"node {node}: {name}" if several else name: why
            for node, content in self._lists.items()
            for name, why in content["left_out"].items()
        }

    def __len__(self) -> int:
        return sum(files for _, files, _ in self._nodes.values())

    def __iter__(self) -> Iterator[OutputFile]:
        found = [
            OutputFile(row["name"], row["size"], node, row["modified"], tuple(row["parts"]), row["mode"])
            for node, content in self._lists.items()
            for row in content["files"]
        ]
        return iter(sorted(found, key=lambda file: (file.name, file.node)))

    def __repr__(self) -> str:
        of = f" of {names(self.nodes)}" if self._nodes else ""
        return f"<Outputs: {counted(len(self), 'file')}, {size_text(self.size)}{of}>"

    def __contains__(self, name: object) -> bool:
        return any(file.name == name for file in self)

    def open(self, name: str, node: int | None = None) -> BinaryIO:
        """Fetch a stored file into a temporary one, and open that to read its bytes.

        It lies where Python puts temporary files (``TMPDIR``), and goes when it is closed.

        Parameters
        ----------
        name : str
            Its path, relative to the workers' working directory.
        node : int, optional
            The node that has stored it, where several have one of this name with other content.

        Returns
        -------
        BinaryIO
            A file that can be read and searched (``seek``).

        Raises
        ------
        FileNotFoundError
            If there is no such file.
        LookupError
            If several nodes have stored one, and they differ.
        TorchrunError
            If the datastore does not have it any more.
        """
        file = self._files(node, str(name)).get(str(name))
        if file is None:
            known = first_values(sorted({repr(each.name) for each in self if node in (None, each.node)}))
            where = "" if node is None else f" of node {node}"
            raise FileNotFoundError(f"There is no output{where} {name!r}; there are {known or 'none'}.")
        copy = tempfile.TemporaryFile(prefix="torchrun-output-")  # noqa: SIM115 - whoever has asked closes it
        copy.writelines(map(self._load, file._parts))
        copy.seek(0)
        return copy

    def download(self, to: str | os.PathLike[str], node: int | None = None) -> Path:
        """Write all files below a folder, under their names, and return that folder.

        A file that is there is replaced. What else is there stays.

        Parameters
        ----------
        to : str or os.PathLike
            The folder; it is made if it is not there.
        node : int, optional
            Only the files of this node. By default those of all, in one tree.

        Returns
        -------
        pathlib.Path
            `to`.

        Raises
        ------
        LookupError
            If files of several nodes have the same name and differ; then nothing is written.
        TorchrunError
            If the datastore does not have them any more.
        """
        wanted, folder = self._files(node), Path(to)
        folder.mkdir(parents=True, exist_ok=True)
        for name, file in wanted.items():
            place = folder / name
            place.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".torchrun-output-", dir=place.parent) as beside:
                whole = Path(beside, "file")  # moved to its place when it is that
                with open(whole, "wb") as target:
                    target.writelines(map(self._load, file._parts))
                os.chmod(whole, file._mode)
                os.utime(whole, (file.modified, file.modified))
                os.replace(whole, place)
        return folder

    def _files(self, node: int | None, name: str | None = None) -> dict[str, OutputFile]:
        """Return the files of a node or of all, by name; raise LookupError for those that differ between nodes."""
        found: dict[str, OutputFile] = {}
        files = [file for file in self if node in (None, file.node) and name in (None, file.name)]
        differ = [repr(file.name) for file in files if found.setdefault(file.name, file)._parts != file._parts]
        if differ:
            raise LookupError(
                f"{names(self.nodes).capitalize()} have stored other content under the same name: "
                f"{first_values(list(dict.fromkeys(differ)))}. Say whose you want, as in open(name, node=...), and download "
                "the files of each node into a folder of its own: download(folder, node=...)."
            )
        return found

    # --- the datastore ----------------------------------------------------------------------------

    @cached_property
    def _lists(self) -> dict[int, dict[str, Any]]:
        return {node: json.loads(self._load(self._nodes[node][0])) for node in self.nodes}

    @cached_property
    def _store(self) -> DatastoreValues:
        kind, root, flow = (self._datastore[name] for name in ("type", "root", "flow"))
        return DatastoreValues(open_datastore(kind, flow, root))

    def _load(self, key: str) -> bytes:
        """Return the data of a key."""
        try:
            ((_, data),) = self._store.load([key])
            return bytes(data)
        except Exception as error:  # a missing object is a different error in each store (Metaflow 2.19)
            problem = f"{type(error).__name__}: {error}"
            raise TorchrunError(
                f"Outputs could not be read from {self._store.where} ({problem}). Are they still there?"
            ) from error

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self._datastore), dict(self._nodes))
