"""Finds scripts that a step names but that are not there, before anything is scheduled.

The source has to leave no doubt that the script will be missing when the step runs. Otherwise only `run` itself refuses it,
in the tasks.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..compat.graph import LintWarn, attributes_of_torchrun, runs_unknown_code, sources_of_steps
from ..launch.commands import flow_folder
from ..parsing import did_you_mean
from .run_calls import Source

# Arguments of `run` with which the script is searched elsewhere, made before, or no script.
_ELSEWHERE = frozenset({"module", "cwd", "before_run", "torchrun_args"})
# A flow with one of these words may make files whose names it does not have.
_MAKERS = re.compile(r"\b(subprocess|Popen|os\.system|shutil|tarfile|zipfile|extractall)\b")
# A step that calls nothing else makes no file, unless it names it.
_HARMLESS = frozenset(
    {
        *("print", "len", "range", "str", "int", "float", "bool", "dict", "list", "tuple", "set", "sorted", "repr"),
        *("min", "max", "sum", "abs", "round", "enumerate", "zip", "isinstance", "any", "all", "self.next"),
        *("pathlib.Path", "os.getenv", "os.getcwd"),
    }
)
_HARMLESS_MODULES = ("metaflow.", "time.", "datetime.", "json.", "math.", "os.path.", "os.environ.")
_HARMLESS_METHODS = frozenset(
    {"append", "extend", "update", "get", "items", "keys", "values", "join", "format", "split"}
)


def check_scripts_of_run(graph: Any) -> None:
    """Refuse a ``@torchrun`` step that calls ``current.torch.run`` with the name of a script that is not there.

    Of a flow that is resumed, steps may be taken from the run before.
    """
    if "resume" in sys.argv:
        return
    folders = list(dict.fromkeys(filter(None, (os.getcwd(), flow_folder()))))
    for step, path, first in sources_of_steps(graph):
        attributes = attributes_of_torchrun(graph, step)
        if runs_unknown_code(graph, step) or attributes.get("cwd") or attributes.get("before_run"):
            continue
        for name, line in missing_scripts(path, first, folders):
            raise LintWarn(
                f"Step *{step}* calls current.torch.run({name!r}), but there is no such file in {' or '.join(folders)}."
                f"{did_you_mean(name, _files_near(name, folders))} If the flow makes it while it runs, give its name "
                "in a variable: that is checked only when the step runs.",
                line,
                path,
            )


def missing_scripts(path: str | None, first: int | None, folders: list[str]) -> Iterator[tuple[str, int]]:
    """Yield scripts that are in no folder, each with its line, of the function whose ``def`` is in line `first` of a file."""
    source = Source.of_step(path, first)
    if source is None or _MAKERS.search(source.text) or not _is_harmless(source):
        return
    for call in source.sure_calls_of_run:
        name = _script_of(call)
        if name is not None and _is_missing(name, folders) and not _is_named_elsewhere(name, source, folders):
            yield name, call.lineno


def _script_of(call: ast.Call) -> str | None:
    """Return the script that a call of `run` names, below the folder in which it is searched; None in doubt."""
    names = {each.arg for each in call.keywords}
    if None in names or names & _ELSEWHERE:
        return None
    given = [*call.args[:1], *(each.value for each in call.keywords if each.arg == "entrypoint")]
    name = given[0].value if len(given) == 1 and isinstance(given[0], ast.Constant) else None
    # In a container there may be anything beside the folder of the flow.
    is_below = isinstance(name, str) and bool(name) and not os.path.isabs(name) and ".." not in Path(name).parts
    return str(name) if is_below else None


def _is_missing(name: str, folders: list[str]) -> bool:
    """Return whether a file is in no folder; what is in a folder that is not there either may be fetched with it."""
    paths = [os.path.join(folder, name) for folder in folders]
    return any(os.path.isdir(os.path.dirname(path)) for path in paths) and not any(map(os.path.exists, paths))


def _is_named_elsewhere(name: str, source: Source, folders: list[str]) -> bool:
    """Return whether Python files beside the flow, or other lines of it, have the name of a script: they may make it."""
    base = os.path.basename(name)
    of_calls = [script for call in source.calls_of_run if (script := _script_of(call))]
    if source.text.count(base) > sum(script.count(base) for script in of_calls):
        return True
    for path in (path for folder in folders for path in Path(folder).glob("*.py")):
        with suppress(OSError):
            text = path.read_text(encoding="utf-8", errors="replace")
            if base in text and text != source.text:
                return True
    return False


def _is_harmless(source: Source) -> bool:
    """Return whether the step only calls what makes no files."""
    for call in source.calls:
        name = source.meaning(call.func) or ""
        is_method = isinstance(call.func, ast.Attribute) and call.func.attr in _HARMLESS_METHODS
        if not (is_method or name in _HARMLESS or name.startswith(_HARMLESS_MODULES)):
            return False
    return True


def _files_near(name: str, folders: list[str]) -> list[str]:
    """Return the names of the files beside a script, written as it is."""
    below, end = os.path.split(name)
    suffix = Path(end).suffix
    found = {
        os.path.join(below, path.name)
        for folder in folders
        for path in Path(folder, below).glob(f"*{suffix}")
        if path.is_file()
    }
    return sorted(found)
