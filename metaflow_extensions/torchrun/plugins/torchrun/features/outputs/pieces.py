"""Stores files in the datastore, as pieces and a list of them.

Metaflow's datastore stores data under its hash, and needs each piece of data in memory as a whole. So a large file is
stored in pieces, and small files share them. Data that another node or attempt has stored is not stored again.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from ...gang.keepers import Plain
from ...gang.texts import counted, size_text
from ...launch.transfer import PATIENCE_S, Step, ValueStore, patience_for
from ...node.services import ToStore
from .files import File, Listing, cant_be_read, find

# Two are in memory at the same time: one that is stored, and the next one that is read. From 8 MiB on, boto3 (1.44)
# would send each in parts, with copies of them in ten threads.
PIECE_BYTES = 8_000_000
_SMALL_BYTES = 1024 * 1024  # files up to this size share pieces: for each piece, the store is asked twice
_VERSION = 1  # of the form of the list
_SAID = 10  # so many names stand in a line


@dataclass(frozen=True)
class StoredOutputs:
    """The key of the list of a node's outputs, with their number and size."""

    key: str  # of the list in the datastore
    files: int
    size: int  # bytes of all files


_Piece = list[tuple[File, bytes]]


class OutputPieces(ToStore):
    """Stores the files of `folder` that patterns name; those older than `since` were not written in the launch.

    Until the transfer has ended, only its thread touches this object, except `kept`, which belongs to the caller.
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
        self._list: StoredOutputs | None = None  # at the very end
        self._done_bytes = self._all_bytes = 0

    def steps(self) -> Iterator[Step]:
        """Yield what is to be done, one thing after the other."""
        yield Step("its outputs", self._find, PATIENCE_S)
        for piece in self._pieces():
            if self._deadline is not None and time.monotonic() > self._deadline:
                break
            so_far = f"{size_text(self._done_bytes)} of {size_text(self._all_bytes)} so far"
            what = f"its outputs ({so_far}, now {piece[0][0].name!r})"
            patience_s = patience_for(sum(len(data) for _, data in piece))
            yield Step(what, partial(self._save, piece), patience_s, is_news=False)  # there may be very many
        yield Step("the list of its outputs", self._save_list, PATIENCE_S)

    def told(self) -> Plain | None:
        """Return where the list is, if it was stored."""
        self.kept = self._list
        return None if self.kept is None else asdict(self.kept)

    def lines(self, problem: str | None, seconds: float) -> Iterator[str]:
        """Yield what was found and stored, and what was not, in few lines."""
        if problem is not None:
            yield f"its outputs could not be stored in {self._store.where} {problem}"
            return
        yield from self._listing.remarks[:_SAID]
        if self._listing.left_out:
            left_out = [f"{name!r} {why}" for name, why in sorted(self._listing.left_out.items())]
            yield f"warning: left out of the outputs: {_first(left_out, '; ')}"
        old = [repr(file.name) for file in self._stored() if self._is_older(file)]
        if old:
            yield f"{counted(len(old), 'output')} {'is' if len(old) == 1 else 'are'} older than this launch: {_first(old)}"
        if self._list is not None:
            stored = f"{counted(self._list.files, 'file')}, {size_text(self._list.size)}"
            yield f"stored outputs: {stored}, in {seconds:.1f} s"

    def _is_older(self, file: File) -> bool:
        return file.status.st_ctime < self._since

    # --- the steps --------------------------------------------------------------------------------

    def _find(self) -> None:
        self._listing = find(self._folder, self._patterns, self._store.folder)
        self._all_bytes = sum(file.status.st_size for file in self._listing.files)

    def _save(self, piece: _Piece) -> None:
        key = self._store.save(b"".join(data for _, data in piece) if len(piece) > 1 else piece[0][1])
        begin = 0
        for file, data in piece:
            file.parts.append((key, begin, len(data)))
            begin += len(data)
        self._done_bytes += begin

    def _save_list(self) -> None:
        stored, left_out = self._stored(), self._listing.left_out
        for file in self._listing.files:
            if not file.is_stored:
                left_out.setdefault(file.name, "could not be stored in time")
        content = {
            "version": _VERSION,
            "node": self._node,
            "files": [self._row(file) for file in stored],
            "left_out": dict(sorted(left_out.items())),
        }
        key = self._store.save(json.dumps(content).encode())  # in ASCII, so that names may be of any bytes
        self._list = StoredOutputs(key, len(stored), sum(file.size or 0 for file in stored))

    def _row(self, file: File) -> dict[str, Any]:
        return {
            "name": file.name,
            "size": file.size,
            "modified": file.status.st_mtime,
            "older": self._is_older(file),
            "mode": stat.S_IMODE(file.status.st_mode),
            "digest": file.digest or hashlib.sha256(repr(file.parts).encode()).hexdigest(),
            "parts": file.parts,
        }

    def _stored(self) -> list[File]:
        return [file for file in self._listing.files if file.is_stored]

    # --- what is read -----------------------------------------------------------------------------

    def _pieces(self) -> Iterator[_Piece]:
        """Yield pieces: of small files together, then of each large one; after a failure, of the newest first."""
        newest_first = self._deadline is not None
        files = sorted(self._listing.files, key=lambda file: -file.status.st_mtime if newest_first else 0)
        small = [file for file in files if file.status.st_size <= _SMALL_BYTES]
        large = [file for file in files if file.status.st_size > _SMALL_BYTES]
        shared: _Piece = []
        size = 0
        for file in small:
            for data in self._read(file):
                file.digest = hashlib.sha256(file.digest.encode() + data).hexdigest()
                if shared and size + len(data) > PIECE_BYTES:
                    yield shared
                    shared, size = [], 0
                shared.append((file, data))
                size += len(data)
        if shared:
            yield shared
        for file in large:
            for data in self._read(file):
                yield [(file, data)]

    def _read(self, file: File) -> Iterator[bytes]:
        """Yield what is in a file, as long as it was when it was opened."""
        try:
            with open(file.path, "rb", buffering=0) as source:
                before = os.fstat(source.fileno())
                done = 0
                while data := source.read(min(PIECE_BYTES, before.st_size - done)):
                    done += len(data)
                    yield data
                after = os.fstat(source.fileno())
        except OSError as error:
            self._listing.left_out[file.name] = cant_be_read(error)
            return
        file.size = done
        if (before.st_size, before.st_mtime_ns) != (done, after.st_mtime_ns) or after.st_size != done:
            self._listing.remarks.append(f"warning: the output {file.name!r} changed while it was read")


def _first(said: list[str], between: str = ", ") -> str:
    more = f"{between}and {len(said) - _SAID} more" if len(said) > _SAID else ""
    return between.join(said[:_SAID]) + more
