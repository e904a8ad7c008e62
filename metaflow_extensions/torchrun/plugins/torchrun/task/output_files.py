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
    listing = Listing()
    for pattern in patterns:
        if is_named := os.path.lexists(os.path.join(root, pattern)):
            found = [pattern]  # exactly this name, whatever it would mean as a pattern
        else:
            try:
                found = sorted(os.path.relpath(path, root) for path in Path(root).glob(pattern))
            except OSError as error:
                listing.left_out[pattern] = cant_be_read(error)
                continue
        if not found:
            listing.unmatched.append(pattern)
        for name in found:
            _add_tree(listing, root, "" if name == os.curdir else name, apart, is_named)
    return listing


def _add_tree(listing: Listing, root: str, top: str, apart: str | None, is_named: bool) -> None:
    """Add a file, or a folder with all that is in it; `is_named`: the user has named it, not a pattern."""
    # What an entry names may lie elsewhere: the user has said so.
    inside = (
        [os.path.realpath(root), os.path.realpath(os.path.join(root, top))] if is_named else [os.path.realpath(root)]
    )
    above = (os.path.realpath(os.path.join(root, os.path.dirname(top))),) if top else ()
    waiting = [(top, above)]  # each with the folders on the way to it
    while waiting:
        name, above = waiting.pop()
        real = os.path.realpath(os.path.join(root, name))
        if apart is not None and _lies_in(real, os.path.realpath(apart)):
            continue
        if not any(_lies_in(real, folder) for folder in inside):
            listing.left_out[name] = f"leads to {real}, out of the working directory"
        elif any(_lies_in(folder, real) for folder in above):
            listing.left_out[name] = "is a link to a folder that it lies in"
        elif os.path.isdir(real):
            try:
                below = sorted(os.listdir(real), reverse=True)
            except OSError as error:
                listing.left_out[name or os.curdir] = cant_be_read(error)
            else:
                waiting += [(os.path.join(name, each), (*above, real)) for each in below]
        elif os.path.isfile(real):
            listing.names[name] = None
        else:
            listing.left_out[name] = "is no file" if os.path.exists(real) else "is a link to nothing, or gone"


def _lies_in(real: str, folder: str) -> bool:
    return real == folder or real.startswith(os.path.join(folder, ""))


def cant_be_read(error: OSError) -> str:
    """Return why a file is left out that could not be read."""
    return f"can't be read: {error.strerror or error}"
