"""``run(outputs=...)``: stores files of a launch in Metaflow's datastore when its workers have ended, and an index of them.

Metaflow's datastore needs each piece of data in memory as a whole (2.19), so a large file is stored in parts.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..compat.datastore import DatastoreValues
from ..errors import TorchrunConfigError
from ..gang.messages import CONTROL
from ..settings import RunSettings
from ..texts import counted, first_values, size_text
from .transfer import Begin, ToTell

# One is in memory. From 8 MiB on, boto3 (1.44) would send each in parts, with copies of them in ten threads.
PART_BYTES = 8_000_000
_NAMED, _NAME_CHARS = 5, 200  # so many names, each so long, go to the gang's page


def named_outputs(run: RunSettings, node: int, store: DatastoreValues | None) -> tuple[str, ...] | None:
    """Return what `run` names to store, empty if others than this node do so, None without; raises TorchrunConfigError."""
    if run.outputs is None:
        if run.outputs_from is None:
            return None
        said = f"run(outputs_from={run.outputs_from!r})"
        raise TorchrunConfigError(f"{said} says whose outputs to store, but outputs names none.")
    if store is None:
        raise TorchrunConfigError("run(outputs=...) needs a datastore, which only a step of a flow has.")
    return run.outputs if run.outputs_from == "all" or node == CONTROL else ()


def upload(
    store: DatastoreValues, patterns: tuple[str, ...], folder: str, within_s: float | None, begin: Begin
) -> ToTell:
    """Store the files of `folder` that patterns name, after a failure within so many seconds, and an index of them."""
    begun_at = time.monotonic()
    deadline = begun_at + (float("inf") if within_s is None else within_s)
    begin("its outputs")
    names, left_out = find(folder, patterns, store.folder)
    rows: list[dict[str, Any]] = []
    for name in names:
        try:
            file = open(os.path.join(folder, name), "rb", buffering=0)  # noqa: SIM115 - closed below
        except OSError as error:
            left_out[name] = _cant_be_read(error)
            continue
        with file:
            status, done, parts = os.fstat(file.fileno()), 0, list[str]()
            while data := file.read(min(PART_BYTES, status.st_size - done)):
                if time.monotonic() > deadline:
                    left_out[name] = "could not be stored in time"
                    break
                done += len(data)
                so_far = f"{len(rows)} of {counted(len(names), 'file')} so far, now {size_text(done)} of {name!r}"
                begin(f"its outputs ({so_far})")
                parts.append(store.save(data))
        if name not in left_out:
            row = {"name": name, "size": done, "modified": status.st_mtime, "mode": stat.S_IMODE(status.st_mode)}
            rows.append({**row, "parts": parts})
    begin("the index of its outputs")
    # In ASCII, so that names may be of any bytes.
    key = store.save(json.dumps({"files": rows, "left_out": dict(sorted(left_out.items()))}).encode())
    size, first = sum(row["size"] for row in rows), tuple(row["name"][:_NAME_CHARS] for row in rows[:_NAMED])
    lines = []
    if rows or within_s is None:  # a launch that fails early has nothing, and its cause comes next
        if why := [f"{name!r} {why}" for name, why in sorted(left_out.items())]:
            lines.append(f"warning: left out of the outputs in {folder}: {first_values(why)}")
        seconds = time.monotonic() - begun_at
        lines.append(f"stored outputs: {counted(len(rows), 'file')}, {size_text(size)}, in {seconds:.1f} s")
    return {"key": key, "files": len(rows), "size": size, "names": first}, lines


# --- what the patterns name -------------------------------------------------------------------------


def find(root: str, patterns: Sequence[str], apart: str | None = None) -> tuple[list[str], dict[str, str]]:
    """Return the files of the folder `root` that patterns name, in their order, each once; and why others are left out.

    Names are relative to `root`. What lies in the folder `apart` is passed over.
    """
    names: dict[str, None] = {}
    left_out: dict[str, str] = {}  # name or pattern -> why, as in "is no file"

    def add(name: str, follow: bool) -> None:
        """Add a file, or a folder with all that is in it; `follow` a link to a folder, which may hold more than is meant."""
        path = os.path.join(root, name)
        if apart is not None and Path(os.path.realpath(path)).is_relative_to(os.path.realpath(apart)):
            return
        if os.path.isfile(path):
            names[name] = None
        elif not os.path.isdir(path):
            left_out[name] = "is no file" if os.path.exists(path) else "is a link to nothing, or gone"
        elif os.path.islink(path) and not follow:
            left_out[name] = f"is a link to the folder {os.path.realpath(path)}; name it to store what is there"
        else:
            try:
                for each in sorted(os.listdir(path)):
                    add(each if name == os.curdir else os.path.join(name, each), follow=False)
            except OSError as error:
                left_out[name] = _cant_be_read(error)

    for pattern in patterns:
        # Exactly this name, where it is there, whatever it would mean as a pattern.
        is_name = os.path.lexists(os.path.join(root, pattern))
        found = [pattern] if is_name else sorted(os.path.relpath(each, root) for each in Path(root).glob(pattern))
        if not found:
            left_out[pattern] = "matches nothing"
        for name in found:
            add(name, follow=is_name)
    return list(names), left_out


def _cant_be_read(error: OSError) -> str:
    return f"can't be read: {error.strerror or error}"
