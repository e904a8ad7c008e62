"""Imports go one way; inside a task only the standard library and Metaflow are needed."""

import ast
import sys
from pathlib import Path

import pytest

from metaflow_extensions.torchrun.plugins.torchrun import guardian

FOLDER = Path(guardian.__file__).parent

# From top to bottom: a module may import only from those below it.
ORDER = [
    "decorator",
    "executor",
    "joining",
    "local_nodes",
    "value_store",
    "report",
    "supervisor",
    "result",
    "function_call",
    "transfer",
    "values",
    "membership",
    "channel",
    "frames",
    "open_files",
    "address_book",
    "gang",
    "launch_state",
    "generation",
    "process",
    "guardian",
    "logs",
    "evidence",
    "failure",
    "tracebacks",
    "submit_checks",
    "settings",
    "facts",
    "preflight",
    "launch_spec",
    "policy",
    "elastic",
    "devices",
    "memory",
    "cgroup",
    "network",
    "preemption",
    "interrupts",
    "task_log",
    "events",
    "console",
    "errors",
]
KNOW_METAFLOW = {"address_book", "task_log", "decorator", "executor", "submit_checks", "report", "errors"}
# torchrun runs them as scripts, so they stand in no order: they import none of ours, and none imports them.
WORKERS = {"preflight_worker", "function_worker"}


def imports_of(name):
    """Return our own modules and the foreign top-level packages that a module imports, anywhere in it.

    What stands there for type checkers alone does not count.
    """
    tree = ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))
    for node in [node for node in ast.walk(tree) if isinstance(node, ast.If)]:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = [ast.Pass()]
    ours, foreign = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            foreign |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            foreign.add(node.module.split(".")[0])
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 1, f"{name} reaches out of its package"
            ours |= {node.module.split(".")[0]} if node.module else {alias.name for alias in node.names}
    return ours, foreign


def test_every_module_has_its_place():
    assert {path.stem for path in FOLDER.glob("*.py")} - {"__init__", *WORKERS} == set(ORDER)
    assert len(ORDER) == len(set(ORDER))


@pytest.mark.parametrize("name", ORDER)
def test_a_module_imports_only_from_below(name):
    ours, _ = imports_of(name)
    below = set(ORDER[ORDER.index(name) + 1 :])
    assert ours <= below, f"{name} imports {sorted(ours - below)}, which stand above it"


@pytest.mark.parametrize("name", ORDER)
def test_only_the_border_knows_metaflow_and_nobody_knows_torch(name):
    _, foreign = imports_of(name)
    allowed = set(sys.stdlib_module_names) | ({"metaflow"} if name in KNOW_METAFLOW else set())
    assert foreign <= allowed, f"{name} imports {sorted(foreign - allowed)}"


def test_the_guardian_imports_nothing_of_ours():
    assert imports_of("guardian")[0] == set()


@pytest.mark.parametrize("name", sorted(WORKERS))
def test_a_workers_script_imports_nothing_of_ours_and_they_alone_import_torch(name):
    ours, foreign = imports_of(name)
    assert ours == set()
    assert foreign - set(sys.stdlib_module_names) == {"torch"}


def test_a_workers_script_takes_no_module_of_ours_for_one_of_pythons():
    """Its folder stands first on its ``sys.path`` while it imports what it needs itself."""
    assert not {path.stem for path in FOLDER.glob("*.py")} & set(sys.stdlib_module_names)


def test_the_package_itself_imports_nothing_of_ours():
    assert imports_of("__init__")[0] == set()


def test_the_whole_package_can_be_imported_without_torch_coming_along():
    assert "torch" not in sys.modules


def test_the_namespace_of_metaflows_extensions_is_nobodys_own():
    namespace = FOLDER.parents[2]
    assert namespace.name == "metaflow_extensions"
    assert not (namespace / "__init__.py").exists()
