"""The stored files of a launch, as a user gets them. `datastore_outputs` lists and reads them."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO


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
    older : bool
        Whether it was there before the launch began, so that it may be of an earlier one.
    """

    name: str
    size: int
    node: int
    modified: float
    older: bool = field(default=False, repr=False)
    _mode: int = field(default=0o644, repr=False)
    _parts: tuple[tuple[str, int, int], ...] = field(default=(), repr=False)  # key in the datastore, begin there, size
    _content: object = field(default=(), repr=False)  # the same for files that are the same


class Outputs(ABC):
    """The files that a launch has stored in Metaflow's datastore, listed and read from there.

    It is small and can be stored as an artifact. Iterating gives an `OutputFile` for each, by name and node; `len` is
    their number, and ``name in outputs`` tells whether one is there.
    """

    @property
    @abstractmethod
    def nodes(self) -> list[int]:
        """The nodes whose files these are."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Bytes of all files."""

    @property
    @abstractmethod
    def left_out(self) -> dict[str, str]:
        """The reason why a file was not stored, by name; with several nodes, the node stands before the name."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[OutputFile]: ...

    @abstractmethod
    def as_data(self) -> dict[str, Any]:
        """Return plain data, which are the arguments for an object that is equal."""

    def __contains__(self, name: object) -> bool:
        return any(file.name == name for file in self)

    @abstractmethod
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

    @abstractmethod
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
            If files of several nodes have the same name and differ, or one's file is a folder of another; then nothing
            is written.
        TorchrunError
            If the datastore does not have them any more.
        """
