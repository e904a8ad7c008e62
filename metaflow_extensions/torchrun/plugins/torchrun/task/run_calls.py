"""Reads the use of ``current.torch`` in the source of a step: what is wrong there is told before anything is scheduled.

If the source leaves a doubt about what is called, only `run` itself refuses it, in the tasks.
"""

from __future__ import annotations

import ast
import os
import sys
import tokenize
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..compat.graph import (
    LintWarn,
    attributes_of_torchrun,
    sources_of_steps,
)
from ..parsing import did_you_mean
from ..run_arguments import KNOWN, instead_of
from .commands import flow_folder

_CATCH_ALL = frozenset({"AttributeError", "Exception", "BaseException"})
# Arguments of `run` with which the script is searched elsewhere, made before, or no script.
_ELSEWHERE = frozenset({"module", "cwd", "before_run", "torchrun_args"})


def check_arguments_of_run(graph: Any) -> None:
    """Refuse a ``@torchrun`` step that calls ``current.torch.run`` with an argument that it does not have."""
    for step, path, first in sources_of_steps(graph):
        for name, line in unknown_arguments(path, first):
            raise LintWarn(
                f"Step *{step}* calls current.torch.run({name}=...), which has no argument {name}.{instead_of(name)}",
                line,
                path,
            )


def check_steps_without_torchrun(graph: Any) -> None:
    """Refuse a step without ``@torchrun`` that uses ``current.torch``; Metaflow would start it first, and not say why."""
    for step, path, first in sources_of_steps(graph, with_torchrun=False):
        if lines := _lines_with_torch(_nodes_of_step(path, first)):
            raise LintWarn(
                f"Step *{step}* uses current.torch, but has no @torchrun. Add @torchrun to this step, and enter it with "
                f"self.next(self.{step}, num_parallel=N). On one node, TorchrunSingleNodeMultiGPU().run does without both. "
                'If the step also runs without it, write: if "torch" in current: ...',
                min(lines),
                path,
            )


def tell_missing_scripts(graph: Any) -> None:
    """Write a line for each script in a call of ``current.torch.run`` that is not there; an earlier step may write it."""
    folders = list(dict.fromkeys(filter(None, (os.getcwd(), flow_folder()))))
    for step, path, first in sources_of_steps(graph):
        attributes = attributes_of_torchrun(graph, step)
        is_elsewhere = attributes.get("cwd") or attributes.get("before_run")
        calls = [] if is_elsewhere else _calls_of_run(path, first)
        for name in dict.fromkeys(filter(None, map(_script_of, calls))):
            # What is in a folder that is not there either may be fetched with it.
            paths = [Path(folder, name) for folder in folders]
            if any(path.parent.is_dir() for path in paths) and not any(path.exists() for path in paths):
                near = (found for path in paths for found in path.parent.glob(f"*{path.suffix}"))
                known = sorted({os.path.join(os.path.dirname(name), found.name) for found in near})
                sys.stderr.write(
                    f"[torchrun] Step {step} calls current.torch.run({name!r}), but there is no such file in "
                    f"{' or '.join(folders)} yet.{did_you_mean(name, known)} If the flow does not write it before, the "
                    "step will fail.\n"
                )


def _script_of(call: ast.Call) -> str | None:
    """Return the script that a call of `run` names, below the folder in which it is searched; None in doubt."""
    names = {each.arg for each in call.keywords}
    given = [*call.args[:1], *(each.value for each in call.keywords if each.arg == "entrypoint")]
    name = given[0].value if len(given) == 1 and isinstance(given[0], ast.Constant) else None
    if not isinstance(name, str) or None in names or names & _ELSEWHERE:
        return None
    # In a container there may be anything beside the folder of the flow.
    return None if os.path.isabs(name) or ".." in Path(name).parts else name


def nproc_in_calls(graph: Any, step: str) -> int | None:
    """Return the number of processes per node that all calls of `run` in a step name in the source; None without one."""
    found: set[Any] = set()
    for name, path, first in sources_of_steps(graph):
        for call in _calls_of_run(path, first) if name == step else ():
            named = [each.value for each in call.keywords if each.arg == "nproc_per_node"]
            found.add(named[0].value if named and isinstance(named[0], ast.Constant) else None)
    number = found.pop() if len(found) == 1 else None
    return number if type(number) is int else None


def unknown_arguments(path: str | None, first: int | None) -> Iterator[tuple[str, int]]:
    """Yield unknown arguments in the function whose ``def`` is in line `first` of a file, each with its line."""
    for call in _calls_of_run(path, first):
        yield from ((each.arg, each.lineno) for each in call.keywords if each.arg and each.arg not in KNOWN)


# --- the source of a step ---------------------------------------------------------------------------


def _nodes_of_step(path: str | None, first: int | None) -> list[ast.AST]:
    """Return what stands in the function whose ``def`` is in line `first` of a file.

    Nothing where that can't be read, or ``current`` may be another one than Metaflow's.
    """
    with suppress(OSError, SyntaxError, ValueError, RecursionError), tokenize.open(path or "") as file:
        nodes = list(ast.walk(ast.parse(file.read())))
        functions = [node for node in nodes if isinstance(node, ast.FunctionDef) and node.lineno == first]
        return [inner for node in functions if _is_metaflows(nodes) for inner in ast.walk(node)]
    return []


def _is_metaflows(nodes: list[ast.AST]) -> bool:
    """Return whether ``current`` is Metaflow's wherever a file names it."""
    named = {
        (each.level, each.module, name.name)
        for each in nodes
        if isinstance(each, ast.ImportFrom)
        for name in each.names
        if (name.asname or name.name) in ("current", "*")
    }
    bound = (node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load))
    binders = [node for node in nodes if not isinstance(node, ast.alias | ast.keyword)]  # arguments, functions, ...
    others = (getattr(node, field, None) for node in binders for field in ("arg", "name", "rest"))
    return named == {(0, "metaflow", "current")} and "current" not in bound and "current" not in others


def _calls_of_run(path: str | None, first: int | None) -> list[ast.Call]:
    """Return the calls of ``current.torch.run`` in a step."""
    calls = (node for node in _nodes_of_step(path, first) if isinstance(node, ast.Call))
    return [call for call in calls if _dotted(call.func) == "current.torch.run"]


def _lines_with_torch(nodes: list[ast.AST]) -> list[int]:
    """Return where they surely use ``current.torch``: without asking for "torch", catching the error, or below ``if``."""
    if any(isinstance(node, ast.Constant) and node.value == "torch" for node in nodes):
        return []
    unsure = (node for node in nodes if isinstance(node, ast.If | ast.IfExp) or _catches_all(node))
    passed_over = {id(inner) for node in unsure for inner in ast.walk(node)}
    uses = (node for node in nodes if isinstance(node, ast.Attribute) and id(node) not in passed_over)
    return [node.lineno for node in uses if _dotted(node) == "current.torch"]


def _catches_all(node: ast.AST) -> bool:
    """Return whether a statement catches what Metaflow raises for a name that ``current`` does not have."""
    kinds = [each.type for each in node.handlers] if isinstance(node, ast.Try) else []
    names = {getattr(name, "id", None) for kind in kinds if kind is not None for name in ast.walk(kind)}
    return None in kinds or not names.isdisjoint(_CATCH_ALL)


def _dotted(node: ast.AST) -> str | None:
    """Return a name with attributes, as in ``current.torch``, as it is written; None if it is something else."""
    after: list[str] = []
    while isinstance(node, ast.Attribute):  # a source may have thousands in a row
        after.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(after)]) if isinstance(node, ast.Name) else None
