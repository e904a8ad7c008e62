"""Finds the files that the patterns of ``run(outputs=...)`` name.

A link is followed if its target lies in the working directory and is no folder that the link lies in. Everything else
that is not a file is left out, and reported.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Listing:
    """What the patterns name; all names are relative to the folder that was searched."""

    names: dict[str, None] = field(default_factory=dict)  # in the order of the patterns, each once
    left_out: dict[str, str] = field(default_factory=dict)  # name -> why, as in "is no file"
    unmatched: list[str] = field(default_factory=list)  # patterns that match nothing


def find(root: str, patterns: Sequence[str], apart: str | None = None) -> Listing:
    """Search the folder `root`; what lies in the folder `apart` is passed over."""
    listing, own = Listing(), os.path.realpath(root)
    passed_over = None if apart is None else os.path.realpath(apart)

    def add(name: str, above: tuple[str, ...], inside: tuple[str, ...]) -> None:
        """Add a file, or a folder with all that is in it; `above` are the folders on the way to it."""
        real = os.path.realpath(os.path.join(root, name))
        if passed_over is not None and _lies_in(real, passed_over):
            return
        if not any(_lies_in(real, folder) for folder in inside):
            why = f"leads to {real}, out of the working directory"
        elif any(_lies_in(folder, real) for folder in above):
            why = "is a link to a folder that it lies in"
        elif os.path.isfile(real):
            listing.names[name] = None
            return
        elif os.path.isdir(real):
            try:
                for each in sorted(os.listdir(real)):
                    add(os.path.join(name, each), (*above, real), inside)
                return
            except OSError as error:
                why = cant_be_read(error)
        else:
            why = "is no file" if os.path.exists(real) else "is a link to nothing, or gone"
        listing.left_out[name or os.curdir] = why

    for pattern in patterns:
        path = os.path.join(root, pattern)
        if is_named := os.path.lexists(path):
            found = [pattern]  # exactly this name, whatever it would mean as a pattern
        else:
            try:
                found = sorted(os.path.relpath(path, root) for path in Path(root).glob(pattern))
            except OSError as error:
                listing.left_out[pattern] = cant_be_read(error)
                continue
        if not found:
            listing.unmatched.append(pattern)
        # What an entry names may lie elsewhere: the user has said so.
        inside = (own, os.path.realpath(path)) if is_named else (own,)
        for name in ("" if each == os.curdir else each for each in found):
            add(name, (os.path.realpath(os.path.join(root, os.path.dirname(name))),) if name else (), inside)
    return listing


def _lies_in(real: str, folder: str) -> bool:
    return real == folder or real.startswith(os.path.join(folder, ""))


def cant_be_read(error: OSError) -> str:
    """Return why a file is left out that could not be read."""
    return f"can't be read: {error.strerror or error}"
