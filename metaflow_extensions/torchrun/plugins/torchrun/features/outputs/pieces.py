"""Stores files in the datastore, as pieces and a list of them.

Metaflow's datastore keeps what it is given under a hash of it, but wants each thing in memory as a whole. So a large
file goes there in pieces, and small files share them. What another node or attempt has stored is not stored again.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from ...gang.keepers import Plain
from ...gang.texts import counted, size_text
from ...launch.transfer import PATIENCE_S, Step, ValueStore, patience_for
from ...node.services import ToStore
from .files import Found, Listing, find, lines

# Two are in memory at the same time: one that is stored, and the next one that is read. From 8 MiB on, boto3 (1.44)
# would send each in parts, with copies of them in ten threads.
PIECE_BYTES = 8_000_000
_SMALL_BYTES = 1024 * 1024  # files up to this size share pieces: for each piece, the store is asked twice
_VERSION = 1  # of the form of the list
_TELL_EVERY_S = 5.0
_SAID = 10  # so many names stand in a line


@dataclass(frozen=True)
class StoredOutputs:
    """Where the list of a node's outputs is, and what it comes to."""

    key: str  # of the list in the datastore
    files: int
    size: int  # bytes of all files


@dataclass
class _Entry:
    """A file on its way."""

    file: Found
    parts: list[tuple[str, int, int]] = field(default_factory=list)  # key of the piece, begin in it, size
    size: int | None = None  # once all of it is read
    digest: str = ""  # of the content of a small file; of a large one, the keys are

    @property
    def is_stored(self) -> bool:
        return self.size is not None and sum(size for _, _, size in self.parts) == self.size


_Piece = list[tuple[_Entry, bytes]]


class OutputPieces(ToStore):
    """Stores the files of `folder` that patterns name; those older than `since` were not written in the launch.

    `kept` belongs to whoever asks, and everything else to the transfer's thread, until that has ended.
    """

    def __init__(
        self,
        patterns: tuple[str, ...],
        folder: str,
        store: ValueStore,
        node: int,
        since: float,  # in seconds since 1970
        within_s: float | None = None,
    ) -> None:
        self.kept: StoredOutputs | None = None  # once that is told
        self._patterns, self._folder = patterns, folder
        self._store = store
        self._node = node
        self._since = since
        # After a failure: those that are stored by then count, and the newest go first.
        self._deadline = None if within_s is None else time.monotonic() + within_s
        self._listing = Listing()
        self._entries: list[_Entry] = []
        self._list: StoredOutputs | None = None  # at the very end
        self._told_at = time.monotonic()
        self._done_bytes = self._all_bytes = 0

    def steps(self) -> Iterator[Step]:
        """Yield what is to be done, one thing after the other."""
        yield Step("its outputs", self._find, PATIENCE_S)
        for piece in self._pieces():
            if self._deadline is not None and time.monotonic() > self._deadline:
                break
            do, size = partial(self._save, piece), sum(len(data) for _, data in piece)
            yield Step(self._what(piece), do, patience_for(size), is_news=self._is_due())
        yield Step("the list of its outputs", self._save_list, PATIENCE_S)

    def told(self) -> Plain | None:
        """Return where the list is, if it was stored."""
        self.kept = self._list
        return None if self.kept is None else asdict(self.kept)

    def lines(self, problem: str | None, seconds: float) -> list[str]:
        """Return what was found and stored, and what was not."""
        if problem is not None:
            return [f"what outputs there are could not be stored in {self._store.where} {problem}"]
        said = list(lines(self._listing, _SAID))
        old = [entry.file.name for entry in self._stored() if self._is_older(entry)]
        if old:
            verb = "is" if len(old) == 1 else "are"
            said.append(f"{counted(len(old), 'output')} {verb} older than this launch: {_names(old)}")
        if self._list is not None:
            stored = f"{counted(self._list.files, 'file')}, {size_text(self._list.size)}"
            said.append(f"stored outputs: {stored}, in {seconds:.1f} s")
        return said

    def _is_older(self, entry: _Entry) -> bool:
        return entry.file.changed < self._since

    def _is_due(self) -> bool:
        """Tell whether it is time to tell the gang again how far this is."""
        now = time.monotonic()
        if now - self._told_at < _TELL_EVERY_S:
            return False
        self._told_at = now
        return True

    def _what(self, piece: _Piece) -> str:
        name = piece[0][0].file.name
        return f"its outputs ({size_text(self._done_bytes)} of {size_text(self._all_bytes)} so far, now {name!r})"

    # --- the steps --------------------------------------------------------------------------------

    def _find(self) -> None:
        self._listing = find(self._folder, self._patterns, self._store.folder)
        self._all_bytes = sum(file.size for file in self._listing.files)

    def _save(self, piece: _Piece) -> None:
        key = self._store.save(piece[0][1] if len(piece) == 1 else b"".join(data for _, data in piece))
        begin = 0
        for entry, data in piece:
            entry.parts.append((key, begin, len(data)))
            begin += len(data)
        self._done_bytes += begin

    def _save_list(self) -> None:
        stored = list(self._stored())
        known = {entry.file.name for entry in stored} | self._listing.left_out.keys()
        late = {file.name: "could not be stored in time" for file in self._listing.files if file.name not in known}
        self._listing.left_out.update(late)
        content = {
            "version": _VERSION,
            "node": self._node,
            "files": [self._row(entry) for entry in stored],
            "left_out": dict(sorted(self._listing.left_out.items())),
        }
        key = self._store.save(json.dumps(content).encode())  # in ASCII, so that names may be of any bytes
        self._list = StoredOutputs(key, len(stored), sum(entry.size or 0 for entry in stored))

    def _row(self, entry: _Entry) -> dict[str, Any]:
        return {
            "name": entry.file.name,
            "size": entry.size,
            "modified": entry.file.modified,
            "older": self._is_older(entry),
            "mode": entry.file.mode,
            "digest": entry.digest or hashlib.sha256(repr(entry.parts).encode()).hexdigest(),
            "parts": entry.parts,
        }

    def _stored(self) -> Iterator[_Entry]:
        yield from sorted((entry for entry in self._entries if entry.is_stored), key=lambda entry: entry.file.name)

    # --- what is read -----------------------------------------------------------------------------

    def _pieces(self) -> Iterator[_Piece]:
        """Yield pieces: of small files together, then of each large one."""
        shared: _Piece = []
        size = 0
        for entry in self._in_order(are_large=False):
            for data in self._read(entry):
                entry.digest = hashlib.sha256(entry.digest.encode() + data).hexdigest()
                if shared and size + len(data) > PIECE_BYTES:
                    yield shared
                    shared, size = [], 0
                shared.append((entry, data))
                size += len(data)
        if shared:
            yield shared
        for entry in self._in_order(are_large=True):
            for data in self._read(entry):
                yield [(entry, data)]

    def _in_order(self, are_large: bool) -> Iterator[_Entry]:
        files = [file for file in self._listing.files if (file.size > _SMALL_BYTES) is are_large]
        for file in files if self._deadline is None else sorted(files, key=lambda file: -file.modified):
            self._entries.append(_Entry(file))
            yield self._entries[-1]

    def _read(self, entry: _Entry) -> Iterator[bytes]:
        """Yield what is in a file, as long as it was when it was opened."""
        try:
            # Without waiting: what was a file may have become a named pipe.
            fd = os.open(entry.file.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            with open(fd, "rb", buffering=0) as source:
                before = os.fstat(fd)
                if not stat.S_ISREG(before.st_mode):
                    self._listing.left_out[entry.file.name] = "is no file any more"
                    return
                done = 0
                while data := source.read(min(PIECE_BYTES, before.st_size - done)):
                    done += len(data)
                    yield data
                after = os.fstat(fd)
                entry.size = done
        except OSError as error:
            self._listing.left_out[entry.file.name] = f"can't be read: {error.strerror or error}"
            return
        if (before.st_size, before.st_mtime_ns) != (done, after.st_mtime_ns) or after.st_size != done:
            self._listing.remarks.append(f"warning: the output {entry.file.name!r} changed while it was read")


def _names(names: list[str]) -> str:
    more = f" and {len(names) - _SAID} more" if len(names) > _SAID else ""
    return ", ".join(map(repr, names[:_SAID])) + more
