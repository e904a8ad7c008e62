"""``run(outputs=...)``: stores files of a launch in Metaflow's datastore when its workers have ended, and an index of them.

Metaflow's datastore needs each piece of data in memory as a whole (2.19), so a large file is stored in parts.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import TorchrunConfigError, TorchrunError
from ..gang.messages import CONTROL
from ..gang.texts import counted, size_text
from ..gang.wire import Plain
from ..outputs import Outputs
from ..supervisor.call import Call
from .run_settings import RunSettings
from .transfer import PATIENCE_S, Step, ToStore, ValueStore, patience_for

# Two are in memory at the same time: one that is stored, and the next one that is read. From 8 MiB on, boto3 (1.44)
# would send each in parts, with copies of them in ten threads.
PART_BYTES = 8_000_000
_VERSION = 2  # of the form of the index. 1: small files shared parts, and each file had a digest
_NAMED, _NAME_CHARS = 5, 200  # so many names, each so long, go to the gang's page
_SAID = 10  # so many names stand in a line


class LaunchOutputs:
    """The files that a call of `run` names, on this node; their patterns are relative to the workers' working directory."""

    def __init__(self, patterns: tuple[str, ...], of_all: bool, node: int, store: ValueStore) -> None:
        self.stores = of_all or node == CONTROL
        self._patterns, self._of_all, self._node, self._store = patterns, of_all, node, store
        self._folder = os.getcwd()
        self._since = time.time()  # files that are older are not of this call of `run`
        self._files: FilesToStore | None = None  # of this generation

    @classmethod
    def of(cls, run: RunSettings, node: int, store: ValueStore | None) -> LaunchOutputs | None:
        """Return what stores the files that `run` names, if it names any; raises TorchrunConfigError."""
        if run.outputs is None:
            if run.outputs_from is None:
                return None
            said = f"run(outputs_from={run.outputs_from!r})"
            raise TorchrunConfigError(f"{said} says whose outputs to store, but outputs names none.")
        if store is None:
            raise TorchrunConfigError("run(outputs=...) needs a datastore, which only a step of a flow has.")
        return cls(run.outputs, run.outputs_from == "all", node, store)

    def begin(self, call: Call) -> None:
        """Forget what another generation has stored; note where the workers run."""
        self._files, self._folder = None, call.cwd

    def to_store(self, error: TorchrunError | None, within_s: float | None) -> ToStore | None:
        """Return the files, unless they are stored."""
        if not self.stores or self._kept is not None:
            return None
        self._files = FilesToStore(self._patterns, self._folder, self._store, self._since, within_s)
        return self._files

    @property
    def _kept(self) -> Plain | None:
        return None if self._files is None else self._files.kept

    def result(self, told: Plain, say: Callable[[str], None]) -> Mapping[str, Any]:
        """Return the stored files that this node knows of."""
        return {"outputs": self._known(told)}

    def failed(self, error: TorchrunError, told: Plain) -> None:
        """Put the files that were stored after a failure on the error."""
        error.outputs = self._known(told)

    def _known(self, told: Plain) -> Outputs:
        """Return the control node's files, or those of all nodes on it; another node's own, where each has some."""
        of = {int(node): tuple(each) for node, each in told.get("nodes", {}).items()}
        if self._of_all and self._node != CONTROL:
            kept = self._kept
            # A task that has come in the place of another has stored none; it is told those of that one.
            own = of.get(self._node) if kept is None else (kept["key"], kept["files"], kept["size"])
            of = {} if own is None else {self._node: own}
        return Outputs(self._store.address, of)


class FilesToStore(ToStore):
    """Stores the files of `folder` that patterns name; those older than `since` (Unix time) are not of the launch.

    Until the transfer has ended, only its thread touches this object, except `kept`, which belongs to the caller.
    """

    def __init__(
        self, patterns: tuple[str, ...], folder: str, store: ValueStore, since: float, within_s: float | None = None
    ) -> None:
        self.kept: Plain | None = None  # where the index is, with number and size of the files, once that is told
        self._patterns, self._folder, self._store = patterns, folder, store
        self._since = since
        self._has_failed = within_s is not None
        self._deadline = float("inf") if within_s is None else time.monotonic() + within_s
        self._listing = Listing(folder)
        self._changed: list[str] = []  # names of files that changed while they were read
        self._rows: list[dict[str, Any]] = []  # one for each stored file
        self._stored: Plain | None = None  # at the very end

    def steps(self) -> Iterator[Step]:
        """Yield what is to be done, one thing after the other."""
        yield Step("its outputs", self._find, PATIENCE_S)
        for name in self._listing.names:
            yield from self._steps_of(name)
        yield Step("the index of its outputs", self._save_index, PATIENCE_S)

    def told(self) -> Plain | None:
        """Return where the index is, if it was stored."""
        self.kept = self._stored
        return self.kept

    def lines(self, problem: str | None, seconds: float) -> Iterator[str]:
        """Yield what was found and stored, and what was not, in few lines."""
        if problem is not None:
            yield f"its outputs could not be stored in {self._store.where} {problem}"
            return
        if self._has_failed and not self._rows and not self._listing.left_out:
            return  # a launch that fails early has nothing, and its cause comes next
        for pattern in self._listing.unmatched[:_SAID]:
            yield f"warning: {pattern!r} of run(outputs=...) matches nothing in {self._folder}"
        if self._listing.left_out:
            left_out = [f"{name!r} {why}" for name, why in sorted(self._listing.left_out.items())]
            yield f"warning: left out of the outputs: {_first(left_out, '; ')}"
        if self._changed:
            yield f"warning: changed while they were read: {_first([repr(name) for name in self._changed])}"
        old = [repr(row["name"]) for row in self._rows if row["older"]]
        if old:
            yield f"{counted(len(old), 'output')} {'is' if len(old) == 1 else 'are'} older than this launch: {_first(old)}"
        yield f"stored outputs: {counted(len(self._rows), 'file')}, {size_text(self._size)}, in {seconds:.1f} s"

    @property
    def _size(self) -> int:
        return sum(row["size"] for row in self._rows)

    @property
    def _is_late(self) -> bool:
        return time.monotonic() > self._deadline

    # --- the steps --------------------------------------------------------------------------------

    def _find(self) -> None:
        self._listing = find(self._folder, self._patterns, self._store.folder)

    def _steps_of(self, name: str) -> Iterator[Step]:
        """Read a file, as long as it is when it is opened, and yield a step for each part."""
        parts: list[tuple[str, int, int]] = []
        try:
            with open(os.path.join(self._folder, name), "rb", buffering=0) as file:
                before, done = os.fstat(file.fileno()), 0
                while not self._is_late and (data := file.read(min(PART_BYTES, before.st_size - done))):
                    done += len(data)
                    so_far = f"{len(self._rows)} of {counted(len(self._listing.names), 'file')} so far"
                    what = f"its outputs ({so_far}, now {size_text(done)} of {name!r})"
                    yield Step(what, partial(self._save, data, parts), patience_for(len(data)))
                after = os.fstat(file.fileno())
        except OSError as error:
            self._listing.left_out[name] = _cant_be_read(error)
            return
        if done < before.st_size and self._is_late:
            self._listing.left_out[name] = "could not be stored in time"
            return
        if (before.st_size, before.st_size, before.st_mtime_ns) != (done, after.st_size, after.st_mtime_ns):
            self._changed.append(name)
        about = {"modified": before.st_mtime, "older": before.st_ctime < self._since}
        self._rows.append({"name": name, "size": done, **about, "mode": stat.S_IMODE(before.st_mode), "parts": parts})

    def _save(self, data: bytes, parts: list[tuple[str, int, int]]) -> None:
        parts.append((self._store.save(data), 0, len(data)))

    def _save_index(self) -> None:
        left_out = dict(sorted(self._listing.left_out.items()))
        index = {"version": _VERSION, "files": self._rows, "left_out": left_out}
        key = self._store.save(json.dumps(index).encode())  # in ASCII, so that names may be of any bytes
        names = tuple(row["name"][:_NAME_CHARS] for row in self._rows[:_NAMED])
        self._stored = {"key": key, "files": len(self._rows), "size": self._size, "names": names}


def _first(said: list[str], between: str = ", ") -> str:
    more = f"{between}and {len(said) - _SAID} more" if len(said) > _SAID else ""
    return between.join(said[:_SAID]) + more


# --- what the patterns name -------------------------------------------------------------------------


@dataclass
class Listing:
    """What the patterns name; all names are relative to the folder `root`. What lies in the folder `apart` is passed over."""

    root: str
    apart: str | None = None
    names: dict[str, None] = field(default_factory=dict)  # in the order of the patterns, each once
    left_out: dict[str, str] = field(default_factory=dict)  # name -> why, as in "is no file"
    unmatched: list[str] = field(default_factory=list)  # patterns that match nothing

    def add(self, name: str, above: tuple[str, ...], inside: tuple[str, ...]) -> None:
        """Add a file, or a folder with all that is in it, with the folders `above` it; it must lie in one of `inside`.

        A link is followed if it leads there, and to no folder that it lies in.
        """
        real = os.path.realpath(os.path.join(self.root, name))
        if self.apart is not None and _lies_in(real, os.path.realpath(self.apart)):
            return
        if not any(_lies_in(real, folder) for folder in inside):
            why = f"leads to {real}, out of the working directory"
        elif any(_lies_in(folder, real) for folder in above):
            why = "is a link to a folder that it lies in"
        elif os.path.isfile(real):
            self.names[name] = None
            return
        elif os.path.isdir(real):
            try:
                for each in sorted(os.listdir(real)):
                    self.add(os.path.join(name, each), (*above, real), inside)
                return
            except OSError as error:
                why = _cant_be_read(error)
        else:
            why = "is no file" if os.path.exists(real) else "is a link to nothing, or gone"
        self.left_out[name or os.curdir] = why


def find(root: str, patterns: Sequence[str], apart: str | None = None) -> Listing:
    """Search the folder `root`."""
    listing, own = Listing(root, apart), os.path.realpath(root)
    for pattern in patterns:
        path = os.path.join(root, pattern)
        if is_named := os.path.lexists(path):
            found = [pattern]  # exactly this name, whatever it would mean as a pattern
        else:
            try:
                found = sorted(os.path.relpath(each, root) for each in Path(root).glob(pattern))
            except OSError as error:
                listing.left_out[pattern] = _cant_be_read(error)
                continue
        if not found:
            listing.unmatched.append(pattern)
        # What an entry names may lie elsewhere: the user has said so.
        inside = (own, os.path.realpath(path)) if is_named else (own,)
        for name in ("" if each == os.curdir else each for each in found):
            listing.add(name, (os.path.realpath(os.path.join(root, os.path.dirname(name))),) if name else (), inside)
    return listing


def _lies_in(real: str, folder: str) -> bool:
    return real == folder or real.startswith(os.path.join(folder, ""))


def _cant_be_read(error: OSError) -> str:
    return f"can't be read: {error.strerror or error}"
