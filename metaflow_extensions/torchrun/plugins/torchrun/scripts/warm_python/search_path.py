"""Tells whether a program would find other modules than those that a warm process has imported beforehand.

A program's own folder comes first on its path, before the standard library and all that is installed. The imports of
the warm process had another folder there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from typing import Any


def first_entry(argv: Sequence[str], cwd: str) -> str:
    """Return what Python puts first on the path for ``python -u SCRIPT`` and for ``python -u -m MODULE``."""
    program = argv[2]
    return cwd if program == "-m" else os.path.dirname(os.path.realpath(os.path.join(cwd, program)))


def refuse(folder: str) -> str | None:
    """Return what a program whose own folder this is would find elsewhere; None if there is nothing."""
    if getattr(sys.flags, "safe_path", False):  # Python 3.11: its folder is not on the path
        return None
    # Whatever has these names, `import` finds these.
    fixed = {*sys.builtin_module_names, "__main__", "__mp_main__"}
    imported = {name: module for name, module in list(sys.modules.items()) if "." not in name and name not in fixed}
    own = sys.path[0]
    if folder != own and own not in sys.path[1:]:
        lost = next((name for name, module in imported.items() if _folder_of(module) == own), None)
        if lost is not None:
            return f"{lost} was imported from {own}, which is not on the program's path"
    return _shadowed(folder, imported)


def _folder_of(module: Any) -> str | None:
    """Return in which folder of the path a module, or its package, was found."""
    file = getattr(module, "__file__", None)
    if not isinstance(file, str):
        return None
    return os.path.dirname(os.path.dirname(file) if hasattr(module, "__path__") else file)


def _shadowed(folder: str, imported: Mapping[str, Any]) -> str | None:
    try:
        names = {entry.partition(".")[0] for entry in os.listdir(folder)} & set(imported)
    except OSError:  # Python would find nothing in it
        return None
    for name in sorted(names):
        spec, file = PathFinder.find_spec(name, [folder]), getattr(imported[name], "__file__", None)
        # A folder without ``__init__.py`` comes after all others.
        if spec is not None and spec.origin is not None and spec.origin != file:
            return f"{spec.origin} would be imported instead of {file or name}"
    return None
