"""Reads a flow's source: what is wrong with its use of ``current.torch`` is told before anything is scheduled.

If the source leaves a doubt about what is called, only `run` itself refuses it, in the tasks.
"""

from __future__ import annotations

import ast
import os
import sys
import tokenize
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..compat.graph import LintWarn, first_plain_step, sources_of_steps
from ..compat.steps import flow_folder
from ..parsing import did_you_mean
from ..run_arguments import KNOWN, instead_of

# Arguments of `run` with which the script is searched elsewhere, made before, or no script.
_ELSEWHERE = frozenset({"module", "cwd", "before_run", "torchrun_args"})


def check_source(graph: Any) -> None:
    """Check what the source of a flow tells, for a run or a deployment."""
    plain = first_plain_step(graph)
    if plain is not None:  # Metaflow's own checks would speak of @parallel, and not say how
        name, entered, *where = plain
        raise LintWarn(
            f"Step *{name}* has @torchrun but is not entered with num_parallel. In step *{entered}*, write "
            f"self.next(self.{name}, num_parallel=2) to run it on 2 nodes. For one node without "
            "num_parallel, remove @torchrun and use TorchrunSingleNodeMultiGPU.",
            *where,
        )
    for step, path, first in sources_of_steps(graph, with_torchrun=False):
        # Metaflow would start it first, and not say why it failed.
        if line := _line_with_torch(_nodes_of_step(path, first)):
            raise LintWarn(
                f"Step *{step}* uses current.torch, but has no @torchrun. Add @torchrun to this step, and enter it with "
                f"self.next(self.{step}, num_parallel=N). On one node, TorchrunSingleNodeMultiGPU().run does without both. "
                'If the step also runs without it, write: if "torch" in current: ...',
                line,
                path,
            )
    for step, path, first in sources_of_steps(graph):
        calls = _calls_of_run(path, first)
        for given in (each for call in calls for each in call.keywords):
            if given.arg and given.arg not in KNOWN:
                hint = f"{given.arg}=...), which has no argument {given.arg}.{instead_of(given.arg)}"
                raise LintWarn(f"Step *{step}* calls current.torch.run({hint}", given.lineno, path)
        own = next(deco.attributes for deco in graph[step].decorators if deco.name == "torchrun")
        _tell_missing_scripts(step, own, calls)


def _tell_missing_scripts(step: str, attributes: dict[str, Any], calls: list[ast.Call]) -> None:
    """Write a line for each script in a call of `run` that is not there; an earlier step may write it."""
    if attributes.get("cwd") or attributes.get("before_run"):
        return
    folders = list(dict.fromkeys(filter(None, (os.getcwd(), flow_folder()))))
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
    sources = [(path, first) for name, path, first in sources_of_steps(graph) if name == step]
    numbers = set()
    for call in (call for source in sources for call in _calls_of_run(*source)):
        named = (each.value for each in call.keywords if each.arg == "nproc_per_node")
        numbers.add(next((value.value for value in named if isinstance(value, ast.Constant)), None))
    number = numbers.pop() if len(numbers) == 1 else None
    return number if type(number) is int else None


# --- the source of a step ---------------------------------------------------------------------------


def _nodes_of_step(path: str | None, first: int | None) -> list[ast.AST]:
    """Return what stands in the function whose ``def`` is in line `first` of a file.

    Nothing where that can't be read, or ``current`` may be another one than Metaflow's.
    """
    with suppress(OSError, SyntaxError, ValueError, RecursionError), tokenize.open(path or "") as file:
        nodes = list(ast.walk(ast.parse(file.read())))
        imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
        sources = {each.module for each in imports for name in each.names if (name.asname or name.name) == "current"}
        names = (node for node in nodes if isinstance(node, ast.Name) and node.id == "current")
        functions = [node for node in nodes if isinstance(node, ast.FunctionDef) and node.lineno == first]
        if sources == {"metaflow"} and all(isinstance(name.ctx, ast.Load) for name in names):
            return [inner for node in functions for inner in ast.walk(node)]
    return []


def _is_torch(node: ast.AST) -> bool:
    name = node.value if isinstance(node, ast.Attribute) and node.attr == "torch" else None
    return isinstance(name, ast.Name) and name.id == "current"


def _calls_of_run(path: str | None, first: int | None) -> list[ast.Call]:
    """Return the calls of ``current.torch.run`` in a step."""
    calls = [node for node in _nodes_of_step(path, first) if isinstance(node, ast.Call)]
    named = ((call, call.func) for call in calls)
    return [call for call, f in named if isinstance(f, ast.Attribute) and f.attr == "run" and _is_torch(f.value)]


def _line_with_torch(nodes: list[ast.AST]) -> int | None:
    """Return where they surely use ``current.torch``: they don't ask for "torch", and it is not below ``if`` or ``try``."""
    if any(isinstance(node, ast.Constant) and node.value == "torch" for node in nodes):
        return None
    unsure = (node for node in nodes if isinstance(node, ast.If | ast.IfExp | ast.Try))
    passed_over = {id(inner) for node in unsure for inner in ast.walk(node)}
    uses = [node for node in nodes if isinstance(node, ast.expr) and _is_torch(node) and id(node) not in passed_over]
    return min((node.lineno for node in uses), default=None)
