"""Reads the calls of `run` in the source of a step: unknown arguments are refused before anything is scheduled.

If the source leaves a doubt about what is called, only `run` itself refuses them, in the tasks. `missing_scripts` reads
more of the same calls.
"""

from __future__ import annotations

import ast
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from ..compat.graph import LintWarn, sources_of_other_steps, sources_of_steps
from ..run_arguments import KNOWN, instead_of

# A call below one of these may not be made, or its error may be caught.
_MAY_NOT_RUN = (ast.If, ast.IfExp, ast.BoolOp, ast.While, ast.Try, ast.Match, ast.FunctionDef, ast.Lambda)
_RUNS = frozenset({"metaflow.current.torch.run", "metaflow.metaflow_current.current.torch.run"})


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
    """Refuse a step without ``@torchrun`` that calls ``current.torch.run``; Metaflow would start it first, and not say why.

    Metaflow loads this with the first ``@torchrun`` of a flow, so a flow without any has only Metaflow's error.
    """
    for step, path, first in sources_of_other_steps(graph):
        source = Source.of_step(path, first)
        for call in [] if source is None else source.sure_calls_of_run:
            raise LintWarn(
                f"Step *{step}* calls current.torch.run, but has no @torchrun. Add @torchrun to this step, and enter it with "
                f"self.next(self.{step}, num_parallel=N). On one node, TorchrunSingleNodeMultiGPU().run does without both.",
                call.lineno,
                path,
            )


def nproc_in_calls(graph: Any, step: str) -> int | None:
    """Return the number of processes per node that all calls of `run` in a step name in the source; None without one."""
    found: set[Any] = set()
    for name, path, first in sources_of_steps(graph):
        for call in calls_of_run(path, first) if name == step else ():
            named = [each.value for each in call.keywords if each.arg == "nproc_per_node"]
            found.add(named[0].value if named and isinstance(named[0], ast.Constant) else None)
    number = found.pop() if len(found) == 1 else None
    return number if type(number) is int else None


def unknown_arguments(path: str | None, first: int | None) -> Iterator[tuple[str, int]]:
    """Yield unknown arguments in the function whose ``def`` is in line `first` of a file, each with its line."""
    for call in calls_of_run(path, first):
        yield from ((each.arg, each.lineno) for each in call.keywords if each.arg and each.arg not in KNOWN)


def calls_of_run(path: str | None, first: int | None) -> list[ast.Call]:
    """Return the calls of `run` in the function whose ``def`` is in line `first` of a file."""
    source = Source.of_step(path, first)
    return [] if source is None else source.calls_of_run


class Source(NamedTuple):
    """The source of a step, and what the names in its file mean."""

    text: str  # of the whole file
    function: ast.FunctionDef
    names: dict[str, str]

    @classmethod
    def of_step(cls, path: str | None, first: int | None) -> Source | None:
        """Read the function whose ``def`` is in line `first` of a file; None if it can't be read."""
        with suppress(OSError, SyntaxError, ValueError, RecursionError), tokenize.open(path or "") as file:
            text = file.read()
            nodes = list(ast.walk(ast.parse(text)))
            names = {} if any(map(_hides, nodes)) else _meanings(nodes)
            found = (node for node in nodes if isinstance(node, ast.FunctionDef) and node.lineno == first)
            return next((cls(text, node, names) for node in found), None)
        return None

    @property
    def calls(self) -> list[ast.Call]:
        """All calls in the step."""
        return [node for node in ast.walk(self.function) if isinstance(node, ast.Call)]

    @property
    def calls_of_run(self) -> list[ast.Call]:
        """Those of ``current.torch.run``."""
        return [call for call in self.calls if self.meaning(call.func) in _RUNS]

    @property
    def sure_calls_of_run(self) -> list[ast.Call]:
        """Those that are made whenever the step runs, unless it returns before, or loops over nothing."""
        parts = [n for n in ast.walk(self.function) if isinstance(n, _MAY_NOT_RUN) and n is not self.function]
        uncertain = {id(inner) for part in parts for inner in ast.walk(part)}
        return [call for call in self.calls_of_run if id(call) not in uncertain]

    def meaning(self, node: ast.AST) -> str | None:
        """Return the dotted name that a name with attributes stands for; None if it is something else."""
        return _resolved(_dotted(node), self.names)


def _hides(node: ast.AST) -> bool:
    """Return whether names may be bound in ways that can't be read from the source."""
    if isinstance(node, ast.ImportFrom):
        return any(each.name == "*" for each in node.names)
    if not isinstance(node, ast.Attribute) or node.attr not in ("current", "torch", "run"):
        return False
    return _is_stored(node) and _dotted(node.value) != "self"


def _is_stored(node: ast.Attribute | ast.Name) -> bool:
    return isinstance(node.ctx, ast.Store | ast.Del)


def _meanings(nodes: list[ast.AST]) -> dict[str, str]:
    """Return the names that mean the same wherever a file binds them, whatever the scope, and the dotted names for them."""
    plain = [node for node in nodes if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)]
    aliases = {node.targets[0]: _dotted(node.value) for node in plain if len(node.targets) == 1}
    found: dict[str, set[str | None]] = defaultdict(set)
    for node in nodes:
        for name, meaning in _bindings(node):
            found[name].add(aliases.get(node, meaning))  # type: ignore[call-overload]
    return {name: str(*meanings) for name, meanings in found.items() if len(meanings) == 1 and None not in meanings}


def _bindings(node: ast.AST) -> Iterator[tuple[str, str | None]]:
    """Yield the names that a node binds and what they are then, if it is an import."""
    if isinstance(node, ast.ImportFrom):
        yield from ((each.asname or each.name, f"{'.' * node.level}{node.module}.{each.name}") for each in node.names)
    elif isinstance(node, ast.Import):
        for each in node.names:
            yield (each.asname, each.name) if each.asname else (each.name.partition(".")[0],) * 2
    elif isinstance(node, ast.Name) and _is_stored(node):
        yield node.id, None
    else:  # an argument, a function or class, a handler of exceptions, a pattern
        for name in (getattr(node, field, None) for field in ("arg", "name", "rest")):
            if isinstance(name, str) and not isinstance(node, ast.keyword | ast.alias):
                yield name, None


def _dotted(node: ast.AST) -> str | None:
    """Return a name with attributes, as in ``current.torch``, as it is written; None if it is something else."""
    after: list[str] = []
    while isinstance(node, ast.Attribute):  # a source may have thousands in a row
        after.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(after)]) if isinstance(node, ast.Name) else None


def _resolved(dotted: str | None, names: dict[str, str]) -> str | None:
    """Replace the first name by what it means, as often as it means something; names may go round in a circle."""
    for _ in range(len(names) + 1):
        first, dot, rest = (dotted or "").partition(".")
        if first not in names or names[first] == first:
            break
        dotted = f"{names[first]}{dot}{rest}"
    return dotted
