"""Reads the scalar summaries in TensorBoard's event files, and appends them to a file as lines of JSON.

``node.event_files`` starts it beside the workers of rank 0's node, with the folder of the event files, the file for the
lines, since when an event file must have been written to, and its parent's pid. It ends with its parent at the latest. At
SIGTERM it reads once more, and ends.
"""

import contextlib
import ctypes
import itertools
import json
import os
import signal
import sys
import types
from collections.abc import Iterator
from typing import Any

_EVERY_S = 2.0
# What a folder may hold: of more files the last ones are read, and no more folders are looked through.
_MAX_FILES, _MAX_FOLDERS = 16, 500
_MAX_VALUES = 40  # in a line
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends; the parent may have ended already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(0)


def event_files(folder: str, since: float) -> list[str]:
    """Return the event files below a folder that were written to since a time, the last ones, by name."""
    found = []
    for place, folders, names in itertools.islice(os.walk(folder), _MAX_FOLDERS):
        folders.sort()
        for name in names:
            if "tfevents" in name:
                path = os.path.join(place, name)
                with contextlib.suppress(OSError):
                    found.append((os.stat(path).st_mtime, path))
    return sorted(path for written, path in sorted(found)[-_MAX_FILES:] if written >= since)


class Reader:
    """Reads on in all event files of a folder."""

    def __init__(self, folder: str, since: float) -> None:
        # Without TensorFlow, which may be installed and takes seconds and hundreds of MB: this is how TensorBoard itself
        # is told (tensorboard/compat/__init__.py, 2.21).
        sys.modules["tensorboard.compat.notf"] = types.ModuleType("tensorboard.compat.notf")
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
        from tensorboard.util.tensor_util import make_ndarray

        self._folder, self._since = folder, since
        self._open, self._to_array = EventFileLoader, make_ndarray
        self._loaders: dict[str, Any] = {}
        self._first_folder: str | None = None

    def new_lines(self) -> Iterator[str]:
        """Yield what is new: a line for each step of each file."""
        for path in event_files(self._folder, self._since):
            if path not in self._loaders:
                self._loaders[path] = self._open(path)
                self._first_folder = self._first_folder or os.path.dirname(path)
            if self._loaders[path] is not None:
                yield from self._lines_of(path)

    def _lines_of(self, path: str) -> Iterator[str]:
        place = os.path.dirname(path)
        prefix = "" if place == self._first_folder else os.path.basename(place) + "/"
        scalars = self._scalars(path)
        for step, values in itertools.groupby(scalars, key=lambda scalar: scalar[0]):
            named = {prefix + tag: value for _, tag, value in itertools.islice(values, _MAX_VALUES)}
            yield json.dumps({**named, "step": step}) + "\n"

    def _scalars(self, path: str) -> Iterator[tuple[int, str, float]]:
        try:
            for event in self._loaders[path].Load():
                for value in event.summary.value:
                    # All forms of scalars come out as this one.
                    if value.metadata.plugin_data.plugin_name == "scalars" and value.HasField("tensor"):
                        yield event.step, value.tag, float(self._to_array(value.tensor).item())
        except Exception:  # it is damaged, or no event file
            self._loaders[path] = None


def main() -> None:
    """Read until SIGTERM."""
    folder, lines, since, parent = sys.argv[1:]
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    end_with_parent(int(parent))
    os.nice(19)
    reader = Reader(folder, float(since))
    with open(lines, "a", encoding="utf-8") as file:
        is_over = False
        while True:
            file.writelines(reader.new_lines())
            file.flush()
            if is_over:
                break
            is_over = signal.sigtimedwait({signal.SIGTERM}, _EVERY_S) is not None


if __name__ == "__main__":
    main()
