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
    "supervisor",
    "result",
    "membership",
    "channel",
    "address_book",
    "gang",
    "launch_state",
    "generation",
    "process",
    "guardian",
    "logs",
    "evidence",
    "failure",
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
    "task_log",
    "events",
    "console",
    "errors",
]
KNOW_METAFLOW = {"address_book", "task_log", "decorator", "submit_checks", "errors"}
# torchrun runs it as a script, so it stands in no order: it imports none of ours, and none imports it.
WORKER = "preflight_worker"


def imports_of(name):
    """Return our own modules and the foreign top-level packages that a module imports, anywhere in it."""
    tree = ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))
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
    assert {path.stem for path in FOLDER.glob("*.py")} - {"__init__", WORKER} == set(ORDER)
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


def test_the_preflights_worker_imports_nothing_of_ours_and_is_the_only_one_to_import_torch():
    ours, foreign = imports_of(WORKER)
    assert ours == set()
    assert foreign - set(sys.stdlib_module_names) == {"torch"}


def test_the_package_itself_imports_nothing_of_ours():
    assert imports_of("__init__")[0] == set()


def test_the_whole_package_can_be_imported_without_torch_coming_along():
    assert "torch" not in sys.modules


def test_the_namespace_of_metaflows_extensions_is_nobodys_own():
    namespace = FOLDER.parents[2]
    assert namespace.name == "metaflow_extensions"
    assert not (namespace / "__init__.py").exists()
