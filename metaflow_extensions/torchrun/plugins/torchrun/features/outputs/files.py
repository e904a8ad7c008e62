"""The files that the patterns of ``run(outputs=...)`` name, and what can't be stored of it.

A link is taken for what it leads to, as long as that lies in the working directory, or in what a pattern names outright.
Everything else that is no file is left out, and said.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_KINDS = {
    stat.S_IFSOCK: "is a socket",
    stat.S_IFIFO: "is a named pipe",
    stat.S_IFCHR: "is a device",
    stat.S_IFBLK: "is a device",
}
_Folder = tuple[int, int]
"""Device and inode of a folder, by which it is known whatever path leads to it."""


@dataclass(frozen=True)
class Found:
    """One file."""

    name: str  # relative to the folder that was searched
    path: str
    size: int
    modified: float  # when its content was written, as it says itself; in seconds since 1970
    changed: float  # when the file system saw the last change of it
    mode: int  # its permissions


@dataclass
class Listing:
    """What the patterns name."""

    files: list[Found] = field(default_factory=list)  # sorted by name, each once
    left_out: dict[str, str] = field(default_factory=dict)  # name -> why, as in "is a socket"
    remarks: list[str] = field(default_factory=list)  # what else the user should know


def find(root: str, patterns: Sequence[str], apart: str | None = None) -> Listing:
    """Search `root`, a folder; the folder `apart` is none of the outputs wherever it lies."""
    search = _Search(root, apart)
    for pattern in patterns:
        search.take(pattern)
    listing = search.listing
    listing.files.sort(key=lambda file: file.name)
    return listing


class _Search:
    def __init__(self, root: str, apart: str | None) -> None:
        self.listing = Listing()
        self._root = root
        self._inside = [os.path.realpath(root)]  # where links may lead
        self._apart = None if apart is None else os.path.realpath(apart)
        self._apart_id = _id_of(os.stat(apart)) if apart is not None and os.path.exists(apart) else None
        self._known: set[str] = set()

    def take(self, pattern: str) -> None:
        """Add what a pattern names: a path that is there, or else what fits."""
        if os.path.lexists(os.path.join(self._root, pattern)):
            self._allow(pattern)
            names = [pattern]
        else:
            names = [name for name in self._matches(pattern) if not self._is_apart(self._real(name))]
        if not names:
            self.listing.remarks.append(f"warning: {pattern!r} of run(outputs=...) matches nothing in {self._root}")
        for name in names:
            self._add("" if name == os.curdir else name)

    def _matches(self, pattern: str) -> list[str]:
        try:
            return sorted(os.path.relpath(path, self._root) for path in Path(self._root).glob(pattern))
        except OSError as error:  # a folder that is gone meanwhile; those without permission are passed over
            self.listing.left_out[pattern] = f"can't be searched: {error}"
            return []

    def _allow(self, name: str) -> None:
        """Follow what the user names outright wherever it leads, but say so."""
        real = self._real(name)
        if not self._is_inside(real):
            self._inside.append(real)
            self.listing.remarks.append(f"{name!r} of run(outputs=...) leads to {real}, out of the working directory")

    def _real(self, name: str) -> str:
        return os.path.realpath(os.path.join(self._root, name))

    def _is_inside(self, real: str) -> bool:
        return any(_lies_in(real, folder) for folder in self._inside)

    def _is_apart(self, real: str) -> bool:
        return self._apart is not None and _lies_in(real, self._apart)

    def _add(self, name: str) -> None:
        """Add a file, or a folder with all that is in it, without recursion: a tree may be deep."""
        waiting: list[tuple[str, frozenset[_Folder] | None]] = [(name, None)]
        top = name
        while waiting:
            name, above = waiting.pop()
            path = os.path.join(self._root, name)
            try:
                status = os.stat(path)
                above = _folders_above(path) if above is None else above
                # What a pattern has found may lie behind a link. Below it, only links lead elsewhere.
                real = self._real(name) if name == top or os.path.islink(path) else None
                why = self._refusal(status, real, above)
                if why is not None:
                    self.listing.left_out[name or os.curdir] = why
                elif stat.S_ISDIR(status.st_mode):
                    below = above | {_id_of(status)}
                    waiting += [(os.path.join(name, entry), below) for entry in os.listdir(path)]
                elif name not in self._known:
                    self._known.add(name)
                    self.listing.files.append(_found(name, path, status))
            except OSError as error:
                is_dangling = isinstance(error, FileNotFoundError) and os.path.islink(path)
                self.listing.left_out[name] = "is a link to nothing" if is_dangling else _words(error)

    def _refusal(self, status: os.stat_result, real: str | None, above: frozenset[_Folder]) -> str | None:
        """Return why something is left out; None if it is not. `real` is where it is, if that needs to be asked."""
        if real is not None and not self._is_inside(real):
            return f"leads to {real}, out of the working directory"
        if (real is not None and self._is_apart(real)) or _id_of(status) == self._apart_id:
            return "is Metaflow's own datastore"
        if stat.S_ISDIR(status.st_mode):
            if _id_of(status) in above:
                return "is a link to a folder that it lies in"
            return None
        return None if stat.S_ISREG(status.st_mode) else _KINDS.get(stat.S_IFMT(status.st_mode), "is no file")


def _lies_in(real: str, folder: str) -> bool:
    return real == folder or real.startswith(os.path.join(folder, ""))


def _folders_above(path: str) -> frozenset[_Folder]:
    """Return the folders that a path lies in, wherever links lead on the way."""
    return frozenset(_id_of(folder.stat()) for folder in Path(os.path.realpath(path)).parents)


def _id_of(status: os.stat_result) -> _Folder:
    return status.st_dev, status.st_ino


def _found(name: str, path: str, status: os.stat_result) -> Found:
    return Found(name, path, status.st_size, status.st_mtime, status.st_ctime, stat.S_IMODE(status.st_mode))


def _words(error: OSError) -> str:
    return f"can't be read: {error.strerror or error}"


def lines(listing: Listing, most: int) -> Iterator[str]:
    """Yield what is to be said of a listing, in few lines."""
    yield from listing.remarks[:most]
    left_out = [f"{name!r} {why}" for name, why in sorted(listing.left_out.items())]
    if left_out:
        more = f"; and {len(left_out) - most} more" if len(left_out) > most else ""
        yield f"warning: left out of the outputs: {'; '.join(left_out[:most])}{more}"
