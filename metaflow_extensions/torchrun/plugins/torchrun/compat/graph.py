"""A flow's graph and its checks, before anything is scheduled: ``metaflow/graph.py``, ``lint.py`` and `--with`.

Read in 2.13 and 2.19.39. The flow's commands load this module.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from typing import Any

from .renamed import check, harmless, known

# Where the decorators are defined that are known to offer no `current.torch`.
_KNOWN_DECORATORS = ("metaflow.", "metaflow_extensions.torchrun.", "metaflow_extensions.obcheckpoint.")

LintWarn: Any = known("metaflow.lint:LintWarn")


def entry_of(graph: Any, step: str) -> tuple[bool, int | None, list[str]]:
    """Return whether a step is entered with `num_parallel`, the number if it is a literal, and the foreach steps around."""
    callers = [node for node in graph if step in (node.out_funcs or ()) and node.parallel_foreach]
    num_nodes = next((node.num_parallel for node in callers if isinstance(node.num_parallel, int)), None)
    around = [graph[parent] for parent in graph[step].split_parents]
    foreach = [node.name for node in around if node.type == "foreach" and not node.parallel_foreach]
    return bool(callers), num_nodes, foreach


def is_on_argo(decorators: Collection[str], arguments: Sequence[str] | None = None) -> bool:
    """Return whether this process deploys a flow on Argo Workflows, or is a task there, by the names of its decorators."""
    words = set(sys.argv if arguments is None else arguments)  # of which the first may be a tag
    return {"argo-workflows", "create"} <= words or "argo_workflows_internal" in decorators  # so in 2.13 to 2.19


def parallel_steps(graph: Any) -> list[str]:
    """Return the steps of a flow that are gangs."""
    return [node.name for node in graph if node.parallel_step]


# --- our checks among Metaflow's ------------------------------------------------------------------


def check_first(check: Callable[[Any], None]) -> None:
    """Run `check` on each graph before Metaflow's own checks."""
    with harmless():  # `import metaflow` comes by here
        from metaflow.lint import linter

        linter.ensure_static_graph(linter.check(check))
        # `linter.check` appends to this private list (lint.py, 2.13 and 2.19.39). There ours would run after Metaflow's
        # check of num_parallel, whose error names @parallel instead of @torchrun.
        linter._checks.insert(0, linter._checks.pop())


def is_ours(graph: Any) -> bool:
    """Return whether a flow has ``@torchrun``, or may use ``current.torch`` without. No other flow notices us."""
    with suppress(Exception):
        if any(deco.name == "torchrun" for node in graph for deco in node.decorators):
            return True
        files = {node.source_file for node in graph}
        if any(".torch" in line for path in files for line in linecache.getlines(path)):
            check()
            return True
    return False


def first_plain_step(graph: Any) -> tuple[Any, ...] | None:
    """Return the first ``@torchrun`` step that is no gang: its name, the step before it, line and file.

    ``--with torchrun`` decorates every step of a flow (`_attach_decorators`). Its decorator is removed from such steps.
    """
    for node in graph:
        for deco in [d for d in node.decorators if d.name == "torchrun"]:
            callers = [caller for caller in graph if node.name in (caller.out_funcs or ())]
            if callers and all(caller.parallel_foreach for caller in callers):
                continue
            if deco.statically_defined:
                entered = callers[0].name if callers else "the step before it"
                return node.name, entered, node.func_lineno, node.source_file
            node.decorators.remove(deco)
            node.parallel_step = any(getattr(d, "IS_PARALLEL", False) for d in node.decorators)
    return None


def sources_of_steps(graph: Any, with_torchrun: bool = True) -> Iterator[tuple[str, str, int]]:
    """Yield the name of each ``@torchrun`` step, its file, and the line of its ``def``; or the same of the other steps.

    Of these, some may have ``current.torch`` nevertheless: a mutator can still make a gang of one with ``@parallel``
    (2.19), and the decorators of users (from 2.16) and of other extensions may do anything.
    """
    for node in graph:
        is_ours = any(deco.name == "torchrun" for deco in node.decorators)
        if is_ours if with_torchrun else not is_ours and _is_plain(node):
            yield node.name, node.source_file, node.func_lineno


def _is_plain(node: Any) -> bool:
    modules = [type(deco).__module__ for deco in node.decorators]
    may_change = node.parallel_step or getattr(node, "wrappers", None)
    return not may_change and all(name.startswith(_KNOWN_DECORATORS) for name in modules)


def ignored_by_with(name: str) -> list[str]:
    """Return the ``--with`` options for the decorator `name`; Metaflow ignores them for steps with it in the source."""
    from metaflow._vendor import click

    specs: list[str] = []
    context = click.get_current_context(silent=True)
    while context is not None:  # the option can be the command's or the program's
        specs += context.params.get("decospecs") or ()
        context = context.parent
    return [f"--with {spec}" for spec in specs if spec.startswith(f"{name}:")]
