"""Finds the files that the patterns of ``run(outputs=...)`` name.

A link is followed if its target lies in the working directory, or in a path that a pattern names without wildcards.
Everything else that is not a file is left out, and reported.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class File:
    """One file, and what of it is stored."""

    name: str  # relative to the folder that was searched
    path: str
    status: os.stat_result  # when it was found
    parts: list[tuple[str, int, int]] = field(default_factory=list)  # key of the piece, begin in it, size
    size: int | None = None  # once all of it is read
    digest: str = ""  # of the content of a small file; of a large one, the keys are

    @property
    def is_stored(self) -> bool:
        """Whether all of it is."""
        return self.size is not None and sum(size for _, _, size in self.parts) == self.size


@dataclass
class Listing:
    """What the patterns name."""

    files: list[File] = field(default_factory=list)  # sorted by name, each once
    left_out: dict[str, str] = field(default_factory=dict)  # name -> why, as in "is no file"
    remarks: list[str] = field(default_factory=list)  # warnings for the user


def find(root: str, patterns: Sequence[str], apart: str | None = None) -> Listing:
    """Search the folder `root`; the folder `apart` and what lies in it is never an output."""
    search = _Search(root, apart)
    for pattern in patterns:
        search.add(pattern)
    search.listing.files = sorted(search.files.values(), key=lambda file: file.name)
    return search.listing


class _Search:
    def __init__(self, root: str, apart: str | None) -> None:
        self.listing = Listing()
        self.files: dict[str, File] = {}  # by name
        self._root = root
        self._inside = [os.path.realpath(root)]  # where links may lead
        self._apart = None if apart is None else os.path.realpath(apart)

    def add(self, pattern: str) -> None:
        """Add the path with exactly this name, if there is one, or else all that match the pattern."""
        if os.path.lexists(os.path.join(self._root, pattern)):
            self._allow(pattern)
            names = [pattern]
        else:
            names = [name for name in self._matches(pattern) if not self._is_apart(self._real(name))]
        if not names:
            self.listing.remarks.append(f"warning: {pattern!r} of run(outputs=...) matches nothing in {self._root}")
        for name in names:
            self._add_tree("" if name == os.curdir else name)

    def _matches(self, pattern: str) -> list[str]:
        try:
            return sorted(os.path.relpath(path, self._root) for path in Path(self._root).glob(pattern))
        except OSError as error:  # a folder that is gone meanwhile; those without permission are passed over
            self.listing.left_out[pattern] = f"can't be searched: {error}"
            return []

    def _allow(self, name: str) -> None:
        """Follow a path that the user names without wildcards wherever it leads, but report that."""
        real = self._real(name)
        if not self._is_inside(real):
            self._inside.append(real)
            self.listing.remarks.append(f"{name!r} of run(outputs=...) leads to {real}, out of the working directory")

    def _add_tree(self, top: str) -> None:
        """Add a file, or a folder with all that is in it."""
        is_link = os.path.islink(os.path.join(self._root, top))
        led_from = (self._real(os.path.dirname(top)),) if is_link else ()
        waiting = [(top, self._real(top), led_from)]  # with where it is, and the folders from which links led there
        while waiting:
            name, real, led_from = waiting.pop()
            try:
                status = os.stat(os.path.join(self._root, name))
                why = self._refusal(status, real, led_from)
                if why is not None:
                    self.listing.left_out[name or os.curdir] = why
                elif stat.S_ISDIR(status.st_mode):
                    with os.scandir(os.path.join(self._root, name)) as entries:
                        for entry in entries:
                            below = os.path.join(name, entry.name)
                            if entry.is_symlink():
                                waiting.append((below, self._real(below), (*led_from, real)))
                            else:
                                waiting.append((below, os.path.join(real, entry.name), led_from))
                else:
                    self.files.setdefault(name, File(name, os.path.join(self._root, name), status))
            except FileNotFoundError:
                self.listing.left_out[name] = "is a link to nothing, or gone"
            except OSError as error:
                self.listing.left_out[name] = cant_be_read(error)

    def _refusal(self, status: os.stat_result, real: str, led_from: Sequence[str]) -> str | None:
        """Return why something is left out; None if it is not."""
        if not self._is_inside(real):
            return f"leads to {real}, out of the working directory"
        if self._is_apart(real):
            return "is Metaflow's own datastore"
        if stat.S_ISDIR(status.st_mode):
            is_around = any(_lies_in(folder, real) for folder in led_from)
            return "is a link to a folder that it lies in" if is_around else None
        return None if stat.S_ISREG(status.st_mode) else "is no file"

    def _real(self, name: str) -> str:
        return os.path.realpath(os.path.join(self._root, name))

    def _is_inside(self, real: str) -> bool:
        return any(_lies_in(real, folder) for folder in self._inside)

    def _is_apart(self, real: str) -> bool:
        return self._apart is not None and _lies_in(real, self._apart)


def _lies_in(real: str, folder: str) -> bool:
    return real == folder or real.startswith(os.path.join(folder, ""))


def cant_be_read(error: OSError) -> str:
    """Return why a file is left out that could not be read."""
    return f"can't be read: {error.strerror or error}"
