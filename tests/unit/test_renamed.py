"""A private name of Metaflow's is gone: who uses ``@torchrun`` gets one error with its name, and nobody else notices."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import metaflow
import pytest
from flow_runs import RENAMED_TOGETHER, RENAMING

from metaflow_extensions.torchrun.plugins import torchrun as extension
from metaflow_extensions.torchrun.plugins.torchrun.compat import renamed
from metaflow_extensions.torchrun.plugins.torchrun.decorator import TorchrunDecorator
from metaflow_extensions.torchrun.plugins.torchrun.errors import TorchrunError
from metaflow_extensions.torchrun.plugins.torchrun.show.commands import cli
from metaflow_extensions.torchrun.plugins.torchrun.single_node import TorchrunSingleNodeMultiGPU


@pytest.fixture(autouse=True)
def check_again():
    renamed.check()  # imports all modules, while nothing is hidden
    renamed.check.cache_clear()
    yield
    renamed.check.cache_clear()


def hide(monkeypatch, place, name):
    """Take a name out of a module's source."""
    loader = sys.modules[place].__spec__.loader
    source = re.sub(rf"\b{name}\b", f"{name}_renamed", loader.get_source(place))
    monkeypatch.setattr(loader, "get_source", lambda _: source)


ALL = [(place, word) for place, words in renamed.NAMES.items() for word in words.split()]


@pytest.mark.parametrize(("place", "word"), ALL)
def test_each_name_that_is_missing_is_named_before_anything_is_scheduled(place, word, monkeypatch):
    hide(monkeypatch, place, word)
    with pytest.raises(TorchrunError) as error:
        TorchrunDecorator()
    assert str(error.value) == (
        f"@torchrun needs {place}.{word}, which this Metaflow ({metaflow.__version__}) does not have. "
        "Metaflow 2.13 to 2.19 works: install that, or a newer metaflow-torchrun."
    )


@pytest.mark.parametrize("module", renamed.NAMES)
def test_each_module_that_is_missing_is_named(module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(TorchrunError, match=r"^@torchrun needs metaflow\S+, which this Metaflow \("):
        TorchrunDecorator()


USES = {
    "a launch on a single node": lambda: TorchrunSingleNodeMultiGPU().run("train.py"),
    "a command": lambda: cli.main(["torchrun", "show"], standalone_mode=False),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_who_needs_no_decorator_gets_the_same_error(use, monkeypatch):
    hide(monkeypatch, "metaflow.flowspec", "ParallelUBF")
    with pytest.raises(TorchrunError, match="ParallelUBF, which this Metaflow"):
        use()


# --- without @torchrun ----------------------------------------------------------------------------

IMPORT = """
import metaflow
from metaflow.plugins import get_plugin_cli
try:
    metaflow.torchrun(metaflow.step(lambda self: None))
except metaflow.TorchrunError as error:
    print(error)
"""


def test_metaflow_can_be_imported_whatever_it_renames():
    """All names at once: no module that this loads asks for one name after it has found another."""
    env = {**os.environ, "PYTHONPATH": str(RENAMING), "RENAMED": " ".join(RENAMED_TOGETHER.split())}
    done = subprocess.run([sys.executable, "-c", IMPORT], env=env, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert "@torchrun needs metaflow." in done.stdout


# --- the list is whole ----------------------------------------------------------------------------

LISTED = {word for _, word in ALL} | {place.rpartition(".")[2] for place in renamed.NAMES}
OTHERS = {
    # Looked for in frames of the stack; Python's own; and artifacts that are read where there are any.
    *("_one_boto_op", "_send_request", "_jobset", "_current_frames", "_register_atexit", "_run_module_as_main"),
    *("_task_ok", "_exception"),
    "_save_metadata",  # of a card; Metaflow 2.19 has it, and is the first that asks for it
    # ``test_worker_hooks.py`` takes these of torch and Accelerate away.
    *("_backend", "_default_pg_init_method", "_get_sequence_nr", "_shared_state"),
    # Without these no collective is known in a hang (torch 2.13); ``test_missing_ranks.py`` takes one of torch's away.
    *("_pg_names", "_pg_group_ranks", "_initializing"),
    "_is_profiler_enabled",  # two profilers at a time crash
    "_torch_profile",  # of its debug handlers; without it `torchrun profile` says so
    "_popen",  # of torch's `SubprocessHandler`; without it each launch fails at its start, as `make test-matrix` shows
}
FOLDER = Path(extension.__file__).parent
TREES = {path.relative_to(FOLDER): ast.parse(path.read_text(encoding="utf-8")) for path in FOLDER.rglob("*.py")}
SCRIPTS = ("worker", "task/function_call.py", "task/transfer.py")
OURS = {"_asdict", "_replace", "_exit", "current", "MetaflowException"}  # or promised
for node in (node for tree in TREES.values() for node in ast.walk(tree)):
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            OURS.add(name)
        case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(ast.Name("self"), name, ast.Store()):
            OURS.add(name)


def private_names(tree):
    """Yield what a module uses that others have not promised: imported from inside Metaflow, or with a `_` before it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").startswith("metaflow."):
            yield from (alias.name for alias in node.names)
        value = getattr(node, "value", None)
        name = node.attr if isinstance(node, ast.Attribute) else value
        if isinstance(name, str) and re.fullmatch(r"_[a-z]\w+(?<!_)", name):
            yield name
        if isinstance(value, str) and re.fullmatch(r"(metaflow[\w.]*)?:[A-Z]\w+", value):  # an argument of `known`
            yield value.partition(":")[2]


@pytest.mark.parametrize("path", sorted(TREES), ids=str)
def test_a_private_name_stands_in_compat_and_in_the_list(path):
    used = {*private_names(TREES[path])} - OURS
    if path.parts[0] != "compat" and not str(path).startswith(SCRIPTS):
        assert not used, "they belong into compat/"
    assert used <= LISTED | OTHERS
