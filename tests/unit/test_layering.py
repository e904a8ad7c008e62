"""Imports go one way, between rooms and inside them; the picture of it in the docs is the one that counts."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from metaflow_extensions.torchrun.plugins import torchrun as package
from metaflow_extensions.torchrun.plugins.torchrun.supervisor import between

FOLDER = Path(package.__file__).parent
PICTURE = Path(__file__).parents[2] / "docs" / "architecture.md"

# What runs in agents, workers and spares, without the package: it imports what lies beside it, at most.
SCRIPTS = "worker"
# This imports torch, in functions that workers call. The task imports it, too, so that both sides pickle alike.
CALLED_BY_WORKERS = ("worker.function_worker", "worker.agent", "worker.process_groups")
# Besides `compat`, these may import Metaflow, and what it promises: `current` and the base of its exceptions.
KNOW_METAFLOW = {"decorator", "single_node", "errors", "tracebacks", "show.gang_part", "task.task_gang"}
# `metaflow` imports these whenever it is imported, whether or not a flow has a step of ours; all others wait for one.
IMPORTED_WITH_METAFLOW = {
    "decorator",
    "single_node",
    "result",
    "run_arguments",
    "settings",
    "parsing",
    "compat.cards",
    "compat.graph",
    "compat.steps",
    "compat.renamed",
    "tracebacks",
    "errors",
    "task.signs",
    "machine.processes",
    "show.gang_card",
}


_SHOWN = re.search(r"<!-- layers -->\n```\n(.*?)```", PICTURE.read_text(encoding="utf-8"), re.DOTALL)[1]
# From top to bottom, each with its rooms and single modules.
LAYERS = [[name.strip().rstrip("/") for name in line.split("  ")[0].split(",")] for line in _SHOWN.splitlines()]
ROOMS = sorted(path.parent.name for path in FOLDER.glob("*/__init__.py"))
MODULES = sorted(
    ".".join(path.relative_to(FOLDER).with_suffix("").parts)
    for path in [*FOLDER.glob("*.py"), *(path for room in ROOMS for path in (FOLDER / room).glob("*.py"))]
    if path.name != "__init__.py"
)


def source_of(module):
    return (FOLDER / module.replace(".", "/")).with_suffix(".py").read_text(encoding="utf-8")


def imports_in(source, module):
    """Return our own modules and the foreign top-level packages that a module imports, anywhere in it."""
    tree = ast.parse(source)
    here = module.split(".")[:-1]
    ours, foreign = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            foreign |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            foreign.add(node.module.split(".")[0])
        elif isinstance(node, ast.ImportFrom):
            assert node.level <= len(here) + 1, f"{module} reaches out of its package"
            base = [*here[: len(here) + 1 - node.level], *(node.module or "").split(".")]
            found = ".".join(part for part in base if part)
            ours |= {found} if found in MODULES else {f"{found}.{alias.name}".lstrip(".") for alias in node.names}
    words = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    if "compat.renamed" in ours and any(word.startswith("metaflow.") for word in words):
        foreign.add("metaflow")
    return ours, foreign


IMPORTS = {module: imports_in(source_of(module), module) for module in MODULES}
# For type checkers alone: an error has outputs, and the arguments of `run` a type that old Pythons lack.
IMPORTS["errors"][0].discard("outputs")
IMPORTS["run_arguments"][1].discard("typing_extensions")


def place_of(module):
    """Return the room of a module, or the module itself where it stands in none."""
    return "/".join(module.split(".")[:-1]) or module


def layer_of(module):
    return next(number for number, layer in enumerate(LAYERS) if place_of(module) in layer)


def test_every_room_and_module_has_one_place_in_the_picture():
    assert sorted({place_of(module) for module in MODULES}) == sorted(name for layer in LAYERS for name in layer)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_from_its_own_room_and_from_lower_layers(module):
    ours, _ = IMPORTS[module]
    assert ours <= set(MODULES), f"{module} imports {sorted(ours - set(MODULES))}, which are no modules of ours"
    others = {other for other in ours if place_of(other) != place_of(module)}
    above = sorted(other for other in others if layer_of(other) <= layer_of(module))
    assert not above, f"{module} imports {above}, which do not stand below it in docs/architecture.md"


def test_no_modules_import_each_other_in_a_circle():
    left = {module: ours for module, (ours, _) in IMPORTS.items()}
    while leaves := {module for module, ours in left.items() if not ours & left.keys()}:
        left = {module: ours for module, ours in left.items() if module not in leaves}
    assert not left, f"in a circle, or above one: {sorted(left)}"


@pytest.mark.parametrize("module", MODULES)
def test_only_the_border_knows_metaflow_and_nobody_knows_torch(module):
    _, foreign = IMPORTS[module]
    allowed = set(sys.stdlib_module_names) | (
        {"metaflow"} if module in KNOW_METAFLOW or place_of(module) == "compat" else set()
    )
    allowed |= {"torch"} if module in CALLED_BY_WORKERS else set()
    assert foreign <= allowed, f"{module} imports {sorted(foreign - allowed)}"


def test_metaflow_itself_imports_few_of_our_modules():
    """See benchmarks/import_time.py for what they cost."""
    code = f"import sys, metaflow; print(*[m for m in sys.modules if m.startswith({package.__name__!r})])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    ours = {name.removeprefix(f"{package.__name__}.") for name in loaded}
    assert ours & set(MODULES) == IMPORTED_WITH_METAFLOW


@pytest.mark.parametrize("program", ["between", "process"])
def test_a_supervisor_and_its_parent_start_without_metaflow_and_without_site_packages(program):
    """Each node has both; what belongs to Metaflow is missing there, and nothing asks for it."""
    code = "import os, sys\n" + between.OURS.replace("os._exit(main())", "print(*sys.modules)")
    code = code.replace("supervisor.between", f"supervisor.{program}")
    command = [sys.executable, "-I", "-S", "-c", code, str(FOLDER)]
    loaded = set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    foreign = {name.partition(".")[0] for name in loaded} - {"torchrun", "__mp_main__"}
    assert foreign <= {*sys.stdlib_module_names, "__main__", "sitecustomize"}
    assert program == "process" or not {"asyncio", "socket", "subprocess"} & loaded, "the parent imports little"


def test_scripts_import_only_what_lies_beside_them_and_take_none_of_that_for_a_module_of_pythons():
    """Their folder stands first on their ``sys.path`` while they import what they need themselves."""
    of_scripts = {module for module in MODULES if place_of(module) == SCRIPTS}
    assert {name for module in of_scripts for name in IMPORTS[module][0]} == {"worker.spare_process"}
    assert not {path.stem for path in (FOLDER / SCRIPTS).glob("*.py")} & set(sys.stdlib_module_names)
