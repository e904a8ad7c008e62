"""Lists and reads stored outputs, on any machine that can reach the datastore.

A result holds only the keys of lists, which are in the datastore as well. So it stays small, however many files there
are.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from .compat.datastore import DatastoreValues, values_at
from .errors import TorchrunError
from .gang.texts import counted, first_values, names, size_text
from .outputs import OutputFile, Outputs


class DatastoreOutputs(Outputs):
    """Lists and reads stored files.

    Parameters
    ----------
    datastore : mapping
        Where they are: the datastore's type, its root, and the flow.
    nodes : mapping
        For each node that has stored files: the key of its list, how many they are, and their bytes.
    """

    def __init__(self, datastore: Mapping[str, str], nodes: Mapping[int, tuple[str, int, int]]) -> None:
        self._datastore = dict(datastore)  # type, root and flow
        self._nodes = dict(nodes)  # node -> key of its list, number of files, bytes
        self._lists: dict[int, dict[str, Any]] | None = None  # by node, loaded at the first access
        self._opened: DatastoreValues | None = None

    @property
    def nodes(self) -> list[int]:
        return sorted(self._nodes)

    @property
    def size(self) -> int:
        return sum(size for _, _, size in self._nodes.values())

    @property
    def left_out(self) -> dict[str, str]:
        several = len(self._nodes) > 1
        return {
            f"node {node}: {name}" if several else name: why
            for node, content in sorted(self._load_lists().items())
            for name, why in content["left_out"].items()
        }

    def __len__(self) -> int:
        return sum(files for _, files, _ in self._nodes.values())

    def __iter__(self) -> Iterator[OutputFile]:
        found = [_file(node, row) for node, content in sorted(self._load_lists().items()) for row in content["files"]]
        return iter(sorted(found, key=lambda file: (file.name, file.node)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DatastoreOutputs) and (self._datastore, self._nodes) == (
            other._datastore,
            other._nodes,
        )

    def __repr__(self) -> str:
        of = f" of {names(self.nodes)}" if self._nodes else ""
        return f"<Outputs: {counted(len(self), 'file')}, {size_text(self.size)}{of}>"

    def open(self, name: str, node: int | None = None) -> BinaryIO:
        file = self._one(str(name), node)
        copy = tempfile.TemporaryFile(prefix="torchrun-output-")  # noqa: SIM115 - whoever has asked closes it
        try:
            copy.writelines(_contents(file, self._load))
            copy.seek(0)
        except BaseException:
            copy.close()
            raise
        return copy

    def download(self, to: str | os.PathLike[str], node: int | None = None) -> Path:
        wanted = self._without_clashes([file for file in self if node in (None, file.node)])
        folder = Path(to)
        folder.mkdir(parents=True, exist_ok=True)
        for file in wanted.values():
            _write(file, _contents(file, self._load), folder)
        return folder

    def _without_clashes(self, files: list[OutputFile]) -> dict[str, OutputFile]:
        """Return files by name; raise LookupError for those that one folder can't have."""
        wanted: dict[str, OutputFile] = {}
        differ = [file.name for file in files if wanted.setdefault(file.name, file)._content != file._content]
        folders = {str(above) for name in wanted for above in PurePosixPath(name).parents}
        for clashing, what in (
            (differ, "other content under the same name"),
            (sorted(folders.intersection(wanted)), "files under names that are folders of other nodes"),
        ):
            if clashing:
                raise LookupError(
                    f"Several nodes have stored {what}: {first_values([repr(name) for name in dict.fromkeys(clashing)])}. "
                    "Download the files of each node into a folder of its own: download(folder, node=...)."
                )
        return wanted

    def _one(self, name: str, node: int | None) -> OutputFile:
        all_files = list(self)
        found = [file for file in all_files if file.name == name and node in (None, file.node)]
        if not found:
            known = first_values(sorted({repr(file.name) for file in all_files if node in (None, file.node)}))
            where = "" if node is None else f" of node {node}"
            raise FileNotFoundError(f"There is no output{where} {name!r}; there are {known or 'none'}.")
        if any(file._content != found[0]._content for file in found):
            said = ", ".join(str(file.node) for file in found)
            raise LookupError(
                f"Nodes {said} have stored {name!r}, and they differ. Say which: open({name!r}, node=...)."
            )
        return found[0]

    # --- the datastore ----------------------------------------------------------------------------

    def _load_lists(self) -> dict[int, dict[str, Any]]:
        if self._lists is None:
            self._lists = {node: json.loads(self._load(key)) for node, (key, _, _) in self._nodes.items()}
        return self._lists

    def _load(self, key: str) -> bytes:
        """Return the data of a key, from the datastore where it was stored, or else from this machine's own datastore."""
        first: Exception | None = None
        for store in values_at(self._datastore) if self._opened is None else [self._opened]:
            try:
                ((_, data),) = store.load([key])
            except Exception as error:  # a missing object is a different error in each store (Metaflow 2.19)
                first = first or error
            else:
                self._opened = store
                return bytes(data)
        where = "the {type} datastore {root}".format_map(self._datastore)
        problem = f"{type(first).__name__}: {first}"
        raise TorchrunError(f"Outputs could not be read from {where} ({problem}). Are they still there?") from first

    def as_data(self) -> dict[str, Any]:
        return {"datastore": dict(self._datastore), "nodes": dict(self._nodes)}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(self.as_data().values())


def _file(node: int, row: Mapping[str, Any]) -> OutputFile:
    parts = tuple((key, begin, size) for key, begin, size in row["parts"])
    # Version 1 of the index has a digest, since small files shared parts; its first form does not know what is older.
    content, older = row.get("digest", parts), row.get("older", False)
    return OutputFile(row["name"], row["size"], node, row["modified"], older, row["mode"], parts, content)


def _contents(file: OutputFile, load: Callable[[str], bytes]) -> Iterator[memoryview]:
    for key, begin, size in file._parts:
        data = memoryview(load(key))[begin : begin + size]
        if len(data) != size:
            raise TorchrunError(f"The datastore has less under {key} than was stored there.")
        yield data


def _write(file: OutputFile, contents: Iterator[memoryview], folder: Path) -> None:
    """Write a file beside its place, and move it there when it is whole."""
    name = PurePosixPath(file.name)
    if name.is_absolute() or ".." in name.parts:
        raise TorchrunError(f"The list of outputs names {file.name!r}, which leads out of the folder.")
    place = folder / name
    place.parent.mkdir(parents=True, exist_ok=True)
    fd, beside = tempfile.mkstemp(prefix=".torchrun-output-", dir=place.parent)
    try:
        with open(fd, "wb") as target:
            target.writelines(contents)
        os.chmod(beside, file._mode)
        os.utime(beside, (file.modified, file.modified))
        os.replace(beside, place)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise
