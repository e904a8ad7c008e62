"""The pages: narrow enough, links that lead somewhere, names that exist, and commands that some test runs."""

from __future__ import annotations

import ast
import inspect
import re
import runpy
import shlex
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import metaflow
import pages
import pytest
from pages import NAMES, REPOSITORY, blocks_of, read

from metaflow_extensions.torchrun.plugins.torchrun.channel.backlog import LINE_CHARS
from metaflow_extensions.torchrun.plugins.torchrun.executor import TorchrunExecutor
from metaflow_extensions.torchrun.plugins.torchrun.gang.cause import Cause
from metaflow_extensions.torchrun.plugins.torchrun.logs.lines import MAX_LINE_BYTES
from metaflow_extensions.torchrun.plugins.torchrun.parsing import RETRY_CLASSES
from metaflow_extensions.torchrun.plugins.torchrun.run_arguments import IGNORED
from metaflow_extensions.torchrun.plugins.torchrun.settings import ARGUMENTS, DEFAULTS

PACKAGE = Path(inspect.getfile(TorchrunExecutor)).parent
EXAMPLE_TESTS = "tests/integration/test_examples.py"
SEEING_TESTS = "tests/integration/test_seeing.py"
FEATURES_TESTS = "tests/integration/test_metaflow_features.py"
OUTPUT_TESTS = "tests/integration/test_outputs.py"
DOCUMENT_TESTS = "tests/integration/test_documents.py"
CHECKPOINT_TESTS = "tests/frameworks/test_checkpoints.py"
FIRST_TESTS = (DOCUMENT_TESTS, "test_the_first_five_minutes")
FRAMEWORK_TESTS = "tests/frameworks/test_frameworks.py"

INSTALL = "pip install --editable ."
GENERATE = 'python generate.py --prompt "A function " --length 300 --seed 1'
CREATE = "python flow.py card create RUN/STEP/TASK --type torchrun"
PLAIN = "torchrun --standalone --nproc-per-node=2 train.py --checkpoints kept --output weights.pt"
STANDALONE = "torchrun --standalone --nproc-per-node=2 hello/train.py"
TRAP = "python flow.py run --framework trainer --args=--forget-use-cpu"
OVER_MPI = "python flow.py run --backend mpi --python /usr/bin/python3"
BY_TORCHRUN = "torchrun --standalone --nproc-per-node=2"
# Commands that a test runs: that test's file, and what stands there for the command.
RUN_ELSEWHERE = {
    ("README.md", "python flow.py run"): (DOCUMENT_TESTS, "test_the_first_example_of_the_readme_runs"),
    ("README.md", INSTALL): ("tests/integration/test_shipping.py", INSTALL),
    ("docs/start.md", "pip install -e '.[examples]'"): ("setup.py", '"examples": EXAMPLES'),
    ("docs/start.md", "python flow.py run"): FIRST_TESTS,
    ("docs/start.md", "python flow.py run --epochs 9"): FIRST_TESTS,
    ("docs/start.md", "python flow.py torchrun show"): FIRST_TESTS,
    ("docs/troubleshooting.md", "python flow.py torchrun show"): FIRST_TESTS,
    ("docs/troubleshooting.md", "python flow.py torchrun logs 1234/train"): (SEEING_TESTS, '"logs", f"{run}/hurt"'),
    ("docs/recipes/hang.md", "python flow.py torchrun show 1234/train"): (SEEING_TESTS, '"show", f"{run}/train"'),
    ("docs/recipes/hang.md", "python flow.py torchrun logs 1234/train"): (SEEING_TESTS, '"logs", f"{run}/hurt"'),
    ("docs/install.md", INSTALL): ("tests/integration/test_shipping.py", INSTALL),
    ("docs/seeing.md", "python flow.py torchrun show 1234/train"): (SEEING_TESTS, '"show", f"{run}/train"'),
    ("docs/seeing.md", "python flow.py torchrun show 1234/train --attempt 0"): (SEEING_TESTS, '"--attempt", "0"'),
    ("docs/seeing.md", "python flow.py torchrun logs 1234/train"): (SEEING_TESTS, '"logs", f"{run}/hurt"'),
    ("docs/seeing.md", "python flow.py torchrun logs 1234/train --rank 3"): (SEEING_TESTS, '"--rank", "1"'),
    ("docs/seeing.md", "python flow.py torchrun logs 1234/train --node 1 --follow"): (
        SEEING_TESTS,
        '"--node", "1", "--follow"',
    ),
    ("docs/seeing.md", "python flow.py torchrun logs 1234/train --grep 'loss|lr'"): (SEEING_TESTS, '"--grep", "'),
    ("docs/metaflow-features.md", "python flow.py run"): (FEATURES_TESTS, 'flow="features.py"'),
    ("docs/metaflow-features.md", "python flow.py spin train"): (FEATURES_TESTS, 'command="spin"'),
    ("docs/outputs.md", "python flow.py torchrun outputs 1234/train"): (OUTPUT_TESTS, '"outputs", f"{run}/train")'),
    ("docs/outputs.md", "python flow.py torchrun outputs 1234/train --to folder"): (OUTPUT_TESTS, '"--to", '),
    ("docs/card.md", "python flow.py card server"): ("tests/integration/test_card.py", '"server"'),
    ("docs/card.md", CREATE): ("tests/integration/test_card.py", '"create"'),
    ("examples/README.md", "pip install -e '.[examples]'"): ("setup.py", '"examples": EXAMPLES'),
    ("examples/README.md", "export METAFLOW_USER=me"): ("tests/flow_runs.py", '"METAFLOW_USER": "tester"'),
    ("examples/README.md", STANDALONE): (DOCUMENT_TESTS, STANDALONE),
    ("examples/frameworks/README.md", "python flow.py run --framework lightning"): (FRAMEWORK_TESTS, '"--framework", '),
    ("examples/frameworks/README.md", TRAP): (FRAMEWORK_TESTS, '"trainer": "--forget-use-cpu"'),
    ("examples/frameworks/README.md", f"{BY_TORCHRUN} lightning_ddp.py"): (FRAMEWORK_TESTS, '["lightning_ddp.py"]'),
    ("examples/frameworks/README.md", f"{BY_TORCHRUN} fsdp2_checkpoint.py --folder checkpoints"): (
        FRAMEWORK_TESTS,
        '"--folder", "checkpoints"',
    ),
    ("examples/from-shell/README.md", OVER_MPI): ("tests/integration/test_mpi.py", OVER_MPI),
    ("examples/min-gpt/README.md", GENERATE): (EXAMPLE_TESTS, GENERATE),
    ("examples/checkpoint/README.md", "pip install metaflow-checkpoint"): ("setup.py", '"metaflow-checkpoint"'),
    **{
        ("examples/checkpoint/README.md", command): (CHECKPOINT_TESTS, f'"{command}"')
        for command in (
            "python flow.py run --die-at 10",
            "python flow.py run --die-at 10 --restarts 1",
            "python flow.py run --pause 0.5",
            "python flow.py run --sharded --die-at 10 --nproc-again 1",
        )
    },
    ("examples/checkpoint/README.md", PLAIN): ("tests/checkpoint_example.py", f'"{PLAIN}"'),
}
# Commands that tests run with other numbers, because these would take minutes or tell nothing new. Here they are asked
# for their help, which fails if an option does not exist.
OTHER_NUMBERS = [
    (
        "benchmarks/README.md",
        "python benchmarks/many_nodes.py --members 10 100 1000 4000 --rounds 3 --json members.json",
    ),
    ("benchmarks/README.md", "python benchmarks/logs_of_all.py --nodes 8 --lines 1 100 --seconds 20"),
    ("benchmarks/README.md", "python benchmarks/output.py --rounds 7 --megabytes 500 --flow-megabytes 20"),
    ("benchmarks/README.md", "python benchmarks/cost_of_supervision.py --nodes 1 2 8 --seconds 60 --json costs.json"),
    ("benchmarks/README.md", "python benchmarks/cost_for_workers.py --rounds 5"),
    ("benchmarks/README.md", "python benchmarks/import_time.py --rounds 41"),
    ("benchmarks/README.md", "python benchmarks/failures.py --rounds 50 --others 3 --limit 60"),
    ("benchmarks/README.md", "python benchmarks/datastore_requests.py --nodes 2 8 32 --others-up-to 8"),
    ("benchmarks/README.md", "python benchmarks/launches.py --rounds 7 --shapes 2x2 1x4 --settle 6"),
    ("benchmarks/README.md", "python benchmarks/whole_flow.py --rounds 7 --before 0 3"),
    ("benchmarks/README.md", "python benchmarks/step_time.py --rounds 7 --shapes 2x1"),
    ("examples/checkpoint/README.md", "python flow.py run"),
    ("examples/min-gpt/README.md", "python flow.py run"),
    ("examples/min-gpt/README.md", "python flow.py run --steps 3000"),
    ("examples/single-node/README.md", "python flow.py run --nproc 4"),
    ("examples/tensor-pass/README.md", "python flow.py run --nodes 3"),
    ("examples/torch-ddp/README.md", "python flow.py run"),
    ("examples/torch-ddp/README.md", "python flow.py run --epochs 3 --snapshot-dir snapshots"),
]


def commands_of(name: str) -> list[str]:
    """Return the commands of the blocks that are not marked as needing something that tests don't have."""
    blocks = [block for block in blocks_of(name) if block.language in ("bash", "sh", "console")]
    joined = "".join(block.text for block in blocks if not block.is_marked).replace("\\\n", " ")
    return [line.strip() for line in joined.splitlines() if line.strip() and not line.startswith("#")]


COMMANDS = [(name, command) for name in NAMES for command in commands_of(name)]
MAKE = sorted({command for _, command in COMMANDS if command.startswith("make ")})


@cache
def run_by_tests() -> set[tuple[str, str]]:
    """Return the commands of the examples' pages that tests of examples name, as ``run(example, command)``."""
    found = set()
    for tests in (EXAMPLE_TESTS, DOCUMENT_TESTS):
        for node in ast.walk(ast.parse(read(tests))):
            if isinstance(node, ast.Call):
                words = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
                if len(words) >= 2 and all(isinstance(word, str) for word in words[:2]):
                    found.add((f"examples/{words[0]}/README.md", words[1]))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_lines_have_less_than_100_columns(name):
    wide = [number for number, line in enumerate(read(name).splitlines(), 1) if len(line) >= 100]
    assert not wide, f"{name}: lines {wide}"


def test_the_readme_is_for_ten_minutes():
    assert len(read("README.md").splitlines()) < 250


def anchors_of(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", NAMES)
def test_links_to_files_and_headings_of_ours_lead_somewhere(name):
    for target, anchor in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", read(name)):
        path = REPOSITORY / name if not target else (REPOSITORY / name).parent / target
        assert path.exists(), f"{name} links to {target}"
        assert not anchor or anchor in anchors_of(path.read_text(encoding="utf-8")), f"{name}: {target}#{anchor}"


@pytest.mark.parametrize(("name", "command"), COMMANDS)
def test_a_command_is_run_by_a_test_or_marked(name, command):
    known = {*RUN_ELSEWHERE, *OTHER_NUMBERS, *run_by_tests(), *((name, make) for make in MAKE)}
    assert (name, command) in known, f"{name}: no test runs {command!r}; see the tables in this file"


def test_make_knows_its_targets():
    words = [word for command in MAKE for word in shlex.split(command)[1:]]
    made = subprocess.run(["make", "--dry-run", *words], cwd=REPOSITORY, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr


@pytest.mark.parametrize(("name", "command"), [entry for entry in OTHER_NUMBERS if "--" in entry[1]])
def test_a_command_that_tests_run_with_other_numbers_has_these_options(name, command, tmp_path):
    program, *words = shlex.split(command)
    assert program == "python"
    folder = REPOSITORY if name.startswith("benchmarks") else (REPOSITORY / name).parent
    env = {"PATH": "/usr/bin:/bin", "METAFLOW_USER": "tester", "METAFLOW_DATASTORE_SYSROOT_LOCAL": str(tmp_path)}
    asked = subprocess.run(
        [sys.executable, "-B", *words, "--help"], cwd=folder, env=env, capture_output=True, text=True
    )
    assert asked.returncode == 0, asked.stderr
    options = {word for word in words if word.startswith("--")}
    assert options <= set(re.findall(r"--[a-z-]+", asked.stdout)), asked.stdout


@pytest.mark.parametrize("command", [*RUN_ELSEWHERE, *OTHER_NUMBERS])
def test_the_tables_of_commands_are_of_today(command):
    assert command in COMMANDS, "no page says so any more"
    file, words = RUN_ELSEWHERE.get(command, ("README.md", ""))
    assert words in read(file)


def test_the_report_in_the_readme_is_the_one_that_the_example_is_tested_for():
    blocks = [blocks_of(name) for name in ("README.md", "examples/failing-node/README.md")]
    ours, tested = (next(b.text for b in found if b.text.startswith("[rank 3]")) for found in blocks)
    assert ours == tested


@pytest.mark.parametrize("name", NAMES)
def test_python_in_pages_compiles(name):
    for block in blocks_of(name):
        if block.language == "python":
            compile(block.text, name, "exec", ast.PyCF_ONLY_AST)


PYTHON = sorted({pages.key(block) for block in pages.python_of_pages()})
IN_ONE_FLOW = {pages.key(block) for block in pages.run_in_one_flow()}


@pytest.mark.parametrize("block", PYTHON)
def test_python_of_a_page_is_run_by_a_test_or_marked(block):
    assert block in IN_ONE_FLOW or block in pages.RUN_ELSEWHERE, "see RUN_ELSEWHERE in tests/pages.py"


@pytest.mark.parametrize("block", pages.RUN_ELSEWHERE)
def test_the_table_of_python_that_is_run_elsewhere_is_of_today(block):
    assert block in PYTHON, "no page says so any more"
    file, words = pages.RUN_ELSEWHERE[block]
    assert words in read(file)


def script_of(name: str, first_line: str) -> str:
    return next(block.text for block in blocks_of(name) if pages.key(block) == (name, first_line))


@pytest.mark.parametrize("first_line", ["import json, os", "import json, os, time"])
def test_scripts_of_the_pages_run(first_line, tmp_path, monkeypatch):
    told = tmp_path / "metrics"
    monkeypatch.setenv("TORCHRUN_METRICS", str(told))
    loss = SimpleNamespace(backward=lambda: None)
    around = {"load_batches": lambda: range(3), "model": lambda batch: loss}
    exec(script_of("docs/metrics.md", first_line), around)
    around["metrics"].close()
    assert '{"step": 2, ' in told.read_text()


def test_the_recipe_for_spot_instances_saves():
    saved, steps = [], []

    def train_step(batch):
        steps.append(batch)
        if len(steps) == 3:
            signal.raise_signal(signal.SIGUSR1)

    around = {"begin": 0, "args": SimpleNamespace(epochs=9), "batches": "ab", "train_step": train_step}
    before = signal.getsignal(signal.SIGUSR1)
    try:
        with pytest.raises(SystemExit) as ended:
            exec(
                script_of("docs/recipes/spot.md", "import signal"),
                {**around, "save": lambda *what: saved.append(what), "model": "model", "optimizer": "optimizer"},
            )
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert (ended.value.code, saved, steps) == (0, [("model", "optimizer", 1)], ["a", "b", "a"])


def test_what_is_named_for_people_from_elsewhere_exists():
    """In the tables of docs/migration.md, each ``name=`` on our side is an argument or an attribute."""
    ours = set(inspect.signature(TorchrunExecutor.run).parameters) | set(DEFAULTS)
    of_metaflow = {"num_parallel", "times", "gpu", "shared_memory"}
    rows = re.findall(r"^\| .* \| (.*) \|$", read("docs/migration.md"), re.MULTILINE)
    named = {name for cell in rows for code in re.findall(r"`([^`]+)`", cell) for name in re.findall(r"(\w+)=", code)}
    assert len(named) > 15
    assert named - ours - of_metaflow == set()


def test_the_flows_of_the_readme_can_be_defined(tmp_path):
    """Metaflow refuses an attribute that a decorator does not have, and reads a flow's source from its file."""
    first, second = [block.text for block in blocks_of("README.md") if block.language == "python"]
    assert "    @kubernetes(" in second
    for number, flow in enumerate([first, second, second.replace("    @kubernetes(", "    @batch(")]):
        path = tmp_path / f"readme_flow_{number}.py"
        path.write_text(flow)
        runpy.run_path(str(path))


def test_the_reference_says_how_long_a_line_may_be():
    reference = " ".join(read("docs/reference.md").split())
    assert f"Lines over {MAX_LINE_BYTES // 1024} KiB are shown in pieces" in reference
    assert f"Of a line over {LINE_CHARS // 1024} KiB the control node has the begin" in reference


def test_the_reference_names_every_attribute_and_argument():
    reference = read("docs/reference.md")
    attributes, arguments = reference.split("## `@torchrun`")[1].split("## `current.torch.run")
    assert [name for name in DEFAULTS if f"`{name}`" not in attributes] == []
    assert [name for name in ARGUMENTS if f"`{name}`" not in arguments and name not in IGNORED] == []
    defaults = dict(re.findall(r"^- `(\w+)` \(default `?([^`)]+)`?\)", attributes, re.MULTILINE))
    assert defaults == {name: str(value) for name, value in DEFAULTS.items() if value is not None} | {
        name: f'"{value}"' for name, value in DEFAULTS.items() if isinstance(value, str)
    }


def test_the_page_of_errors_names_every_class():
    named = vars(metaflow).items()
    errors = {name for name, value in named if inspect.isclass(value) and issubclass(value, metaflow.TorchrunError)}
    assert len(errors) > 5
    assert errors == set(re.findall(r"^(?:[│├└─ ]*)(\w+) {2,}", read("docs/errors.md"), re.MULTILINE))


def test_the_page_of_errors_names_every_part_and_class_of_a_cause():
    page = read("docs/errors.md")
    cause = Cause("exit", 0, "host").as_dict()
    assert [name for name in cause if f"`{name}`" not in page] == []
    assert [name for name in RETRY_CLASSES if f"| `{name}` |" not in page] == []


def test_the_table_of_threads_in_architecture_names_each_where_it_is_started():
    rows = re.findall(r"^\| `(torchrun-[a-z]+)` \|.*\| `([\w/]+)` \|$", read("docs/architecture.md"), re.MULTILINE)
    started = {
        (name, str(path.relative_to(PACKAGE).with_suffix("")))
        for path in PACKAGE.rglob("*.py")
        for name in re.findall(r"(?:name=|LoopThread\()\"(torchrun-[a-z]+)\"", path.read_text(encoding="utf-8"))
    }
    assert set(rows) == started
