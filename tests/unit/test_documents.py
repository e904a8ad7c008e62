"""The pages: narrow enough, links that lead somewhere, names that exist, and commands and options that exist."""

from __future__ import annotations

import ast
import difflib
import inspect
import itertools
import re
import runpy
import shlex
import subprocess
import sys
from collections import defaultdict
from importlib.metadata import metadata
from pathlib import Path
from types import SimpleNamespace

import metaflow
import metaflow_torchrun
import pages
import pytest
from pages import NAMES, REPOSITORY, blocks_of, read

from metaflow_extensions.torchrun.plugins.torchrun import errors
from metaflow_extensions.torchrun.plugins.torchrun.executor import TorchrunExecutor
from metaflow_extensions.torchrun.plugins.torchrun.gang.cause import _CATEGORIES, Cause
from metaflow_extensions.torchrun.plugins.torchrun.parsing import RETRY_CLASSES
from metaflow_extensions.torchrun.plugins.torchrun.settings import DEFAULTS, SETTINGS


def commands_of(name: str) -> list[str]:
    """Return the commands of the blocks that are not marked as needing something that tests don't have."""
    blocks = [block for block in blocks_of(name) if block.language in ("bash", "sh", "console")]
    joined = "".join(block.text for block in blocks if not block.is_marked).replace("\\\n", " ")
    return [line.strip() for line in joined.splitlines() if line.strip() and not line.startswith("#")]


COMMANDS = [(name, shlex.split(command)) for name in NAMES for command in commands_of(name)]
MAKE = sorted({word for _, (program, *words) in COMMANDS if program == "make" for word in words})


def flow_of(name: str) -> str | None:
    """Return the flow that a page shows, which its commands run."""
    return next((block.text for block in blocks_of(name) if block.language == "python" and block.kind == "flow"), None)


def folder_of(name: str, program: str) -> str:
    """Return where a page's commands run: pages without a flow mean any flow."""
    if name in ("README.md", "docs/start.md"):
        return "examples/first"
    if name == "docs/from-one-gpu.md":
        return "examples/one-gpu"
    if name.startswith(("examples/", "benchmarks/")):
        return "." if name.startswith("benchmarks") else str(Path(name).parent)
    return name if program == "flow.py" and flow_of(name) else "examples/hello"


def is_script(words: list[str]) -> bool:
    """Tell whether a command runs a script that trains; flows and benchmarks import torch in other processes."""
    return words[0] == "torchrun" or words[1:2] in (["before.py"], ["generate.py"])


def programs() -> list[tuple[tuple[str, ...], list[str]]]:
    """Return the options that the pages give to each program of ours: its folder, its file, its subcommands."""
    found = defaultdict[tuple[str, ...], set[str]](set)
    for name, (first, *words) in COMMANDS:
        if first == "python" and not is_script([first, *words]):
            subcommands = itertools.takewhile(re.compile("[a-z]+").fullmatch, words[1:])
            options = {word.partition("=")[0] for word in words if word.startswith("--")}
            found[(folder_of(name, words[0]), words[0], *subcommands)] |= options
    return [(program, sorted(options)) for program, options in sorted(found.items())]


def test_the_diff_and_the_flow_of_the_page_are_those_of_the_example():
    example = REPOSITORY / "examples" / "one-gpu"
    before, after = [(example / name).read_text().splitlines(keepends=True) for name in ("before.py", "after.py")]
    wanted = "".join(difflib.unified_diff(before, after, "before.py", "after.py", n=2))
    shown = [block.text for block in blocks_of("docs/from-one-gpu.md")]
    assert wanted in shown
    assert (example / "flow.py").read_text() in shown


def anchors_of(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_narrow_its_links_lead_somewhere_and_its_python_compiles(name):
    wide = [number for number, line in enumerate(read(name).splitlines(), 1) if len(line) >= 100]
    assert not wide, f"{name}: lines {wide} have 100 columns or more"
    for target, anchor in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", read(name)):
        path = REPOSITORY / name if not target else (REPOSITORY / name).parent / target
        assert path.exists(), f"{name} links to {target}"
        assert not anchor or anchor in anchors_of(path.read_text(encoding="utf-8")), f"{name}: {target}#{anchor}"
    for block in blocks_of(name):
        if block.language == "python":
            compile(block.text, name, "exec", ast.PyCF_ONLY_AST)


def test_each_command_is_of_a_kind_that_is_checked_here():
    of_shells = {".", "cd", "echo", "export"}
    kinds = {words[0].removeprefix(".venv-dev/bin/") for _, words in COMMANDS} - of_shells
    assert kinds == {"git", "make", "pip", "python", "python3", "torchrun"}


def test_make_knows_its_targets():
    made = subprocess.run(["make", "--dry-run", *MAKE], cwd=REPOSITORY, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr


def test_the_tests_that_the_pages_run_exist():
    tests = [words[-1] for _, words in COMMANDS if words[0] == ".venv-dev/bin/python"]
    assert tests
    assert [name for name in tests if not (REPOSITORY / name).exists()] == []


@pytest.mark.parametrize(("program", "options"), programs(), ids=lambda it: " ".join(it))
def test_a_program_has_the_options_that_the_pages_give_it(program, options, tmp_path):
    """Its help fails if the subcommand does not exist. Those that train are run by the tests of examples."""
    where, *words = program
    folder = REPOSITORY / where
    if folder.is_file():
        folder = tmp_path
        (tmp_path / "flow.py").write_text(flow_of(where))
    (tmp_path / ".metaflow").mkdir()  # `card` looks there for runs
    env = {"PATH": "/usr/bin:/bin", "METAFLOW_USER": "tester", "METAFLOW_DATASTORE_SYSROOT_LOCAL": str(tmp_path)}
    command = [sys.executable, "-B", *words, "--help"]
    asked = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert asked.returncode == 0, asked.stderr
    assert set(options) <= set(re.findall(r"--[a-z-]+", asked.stdout)), asked.stdout


@pytest.mark.parametrize(("name", "words"), [entry for entry in COMMANDS if is_script(entry[1])])
def test_a_script_has_the_options_that_it_is_given(name, words):
    """Its help would import torch, and what is not installed everywhere."""
    (at,) = (number for number, word in enumerate(words) if word.endswith(".py"))
    script = REPOSITORY / folder_of(name, words[at]) / words[at]
    assert [word for word in words[at + 1 :] if word.startswith("--") and f'"{word}"' not in script.read_text()] == []


def test_the_extras_that_pages_install_exist():
    wanted = {extra for _, words in COMMANDS if words[0] == "pip" for extra in re.findall(r"\[(\w+)\]", words[-1])}
    assert wanted <= set(metadata("metaflow-torchrun").get_all("Provides-Extra"))


PYTHON = sorted({pages.key(block) for block in pages.python_of_pages()})
IN_ONE_FLOW = {pages.key(block) for block in pages.run_in_one_flow()}


def test_python_of_pages_is_run_by_a_test_or_marked():
    assert {*PYTHON} - IN_ONE_FLOW == pages.RUN_ELSEWHERE, "see RUN_ELSEWHERE in tests/pages.py"


def script_of(name: str, first_line: str) -> str:
    return next(block.text for block in blocks_of(name) if pages.key(block) == (name, first_line))


@pytest.mark.parametrize("first_line", ["import time", "try:"])
def test_scripts_of_the_pages_run(first_line, tmp_path, monkeypatch):
    told = tmp_path / "metrics"
    monkeypatch.setenv("TORCHRUN_METRICS", str(told))
    loss = SimpleNamespace(backward=lambda: None)
    around = {"load_batches": lambda: range(3), "model": lambda batch: loss}
    exec(script_of("docs/metrics.md", first_line), around)
    around["report"](step=3)
    assert '{"step": 3}' in told.read_text()
    assert ('"seconds": ' in told.read_text()) is (first_line == "import time")


def test_the_recipe_for_spot_instances_saves(monkeypatch):
    saved, steps = [], []
    monkeypatch.setattr(metaflow_torchrun, "stopping", lambda: len(steps) == 3)
    around = {"begin": 0, "args": SimpleNamespace(epochs=9), "batches": "ab", "train_step": steps.append}
    around |= {"save": lambda *what: saved.append(what), "model": "model", "optimizer": "optimizer"}
    with pytest.raises(SystemExit) as ended:
        exec(script_of("docs/failures.md", "import sys"), around)
    assert (ended.value.code, saved, steps) == (0, [("model", "optimizer", 0)], ["a", "b", "a"])


def test_what_is_named_for_people_from_elsewhere_exists():
    """In the tables of docs/migration.md, each ``name=`` on our side is an argument or an attribute."""
    ours = set(inspect.signature(TorchrunExecutor.run).parameters) | set(DEFAULTS)
    of_metaflow = {"num_parallel", "times", "gpu", "shared_memory"}
    rows = re.findall(r"^\| .* \| (.*) \|$", read("docs/migration.md"), re.MULTILINE)
    named = {name for cell in rows for code in re.findall(r"`([^`]+)`", cell) for name in re.findall(r"(\w+)=", code)}
    assert len(named) >= 10
    assert named - ours - of_metaflow == set()


def test_the_flow_for_backends_can_be_defined(tmp_path):
    """Metaflow refuses an attribute that a decorator does not have, and reads a flow's source from its file."""
    (shown,) = [block.text for block in blocks_of("docs/kubernetes.md") if block.kind == "flow"]
    (of_batch,) = re.findall(r"# On AWS Batch: (@batch\(.*\))$", shown, re.MULTILINE)
    with_batch = re.sub(r"@kubernetes\(\n.*?\n    \)$", of_batch, shown, flags=re.DOTALL | re.MULTILINE)
    assert with_batch != shown
    for number, flow in enumerate([shown, with_batch]):
        path = tmp_path / f"backends_flow_{number}.py"
        path.write_text(flow)
        runpy.run_path(str(path))


def rows_of(text: str) -> list[list[str]]:
    """Return the cells of the tables' rows that begin with a name in code."""
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in re.findall(r"^\| `.*\|$", text, re.MULTILINE)]


def test_the_reference_has_a_table_of_the_attributes_and_tables_of_the_arguments():
    page = read("docs/reference.md").partition("## The result")[0]
    heads = ("## `@torchrun`\n", "### What to run, and its results\n", "### Processes and environment\n")
    ends = [page.index(head) for head in heads] + [len(page)]
    for of, begin, end in zip(("step", "run", "both"), ends, ends[1:], strict=False):
        told = {row[0].strip("`") for row in rows_of(page[begin:end])}
        assert told == {setting.name for setting in SETTINGS.values() if setting.of == of}
    defaults = {row[0].strip("`"): row[2].strip("`") for row in rows_of(page)}
    fixed = {s.name: s.default for s in SETTINGS.values() if s.default is not None}
    shown = {name: f'"{value}"' if isinstance(value, str) else str(value) for name, value in fixed.items()}
    assert {name: defaults[name] for name in fixed} == shown


def test_the_page_of_errors_names_every_class():
    named = vars(metaflow).items()
    errors = {name for name, value in named if inspect.isclass(value) and issubclass(value, metaflow.TorchrunError)}
    assert len(errors) > 5
    assert errors == set(re.findall(r"^(?:[│├└─ ]*)(\w+) {2,}", read("docs/failures.md"), re.MULTILINE))


def test_the_page_of_errors_names_every_part_and_class_of_a_cause():
    page = read("docs/failures.md")
    cause = Cause("exit", 0, "host").as_dict()
    assert [name for name in cause if f"`{name}`" not in page] == []
    assert [name for name in {*RETRY_CLASSES, *_CATEGORIES} if f"`{name}`" not in page] == []


PACKAGE = Path(errors.__file__).parent


def template(node: ast.expr) -> str:
    """Return a text as it stands in the source, with … for what is filled in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(template, node.values))
    if isinstance(node, ast.BinOp):
        return template(node.left) + template(node.right)
    return "…"


def test_the_messages_of_errors_that_a_page_lists_are_ours():
    """Messages are the code with which items of its lists begin."""
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py"))
    nodes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.JoinedStr | ast.Constant))
    texts = "\n".join(map(template, nodes))
    page = read("docs/troubleshooting.md").replace("\n  ", " ")
    items = re.findall(r"^- ((?:`[^`]+`, )*`[^`]+`):", page, re.MULTILINE)
    listed = [part for item in items for part in re.findall(r"`([^`]+)`", item)]
    assert len(listed) > 9
    assert [part for part in listed if part not in texts] == []


def test_every_page_is_in_the_navigation_and_on_the_first_page():
    uris = {name.removeprefix("docs/") for name in NAMES if name.startswith("docs/")}
    assert uris - {*re.findall(r"^ +- .*: (\S+)$", read("mkdocs.yml"), re.MULTILINE)} == set(), "add to nav"
    first = read("docs/index.md")
    assert [uri for uri in uris - {"index.md"} if f"]({uri})" not in first] == []
