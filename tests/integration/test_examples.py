"""The examples do what their READMEs say, by the commands written there."""

from __future__ import annotations

import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

# They train, and import PyTorch up to eighteen times: on a machine that does much else, the longest takes minutes.
END_S = 400
pytestmark = pytest.mark.timeout(2 * END_S)

EXAMPLES = Path(__file__).parents[2] / "examples"


def commands(example: str) -> list[str]:
    """Return the commands of an example's README, as they stand there."""
    blocks = re.findall(r"```bash\n(.*?)```", (EXAMPLES / example / "README.md").read_text(), re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.startswith("python ")]


def outputs(example: str) -> list[str]:
    """Return what an example's README shows as output, block by block."""
    blocks = re.findall(
        r"^```(\w*)\n(.*?)^```", (EXAMPLES / example / "README.md").read_text(), re.DOTALL | re.MULTILINE
    )
    return [text for language, text in blocks if not language]


@pytest.fixture
def example(start_flow, tmp_path):
    """Return a function that runs one command of a README to its end, in a copy of its folder.

    What stands after the command is added to it, to spend less time on it: fewer processes or steps.
    """

    def run(name: str, command: str, added: str = "", expect: int = 0):
        assert command in commands(name), f"the README of {name} does not say so"
        folder = tmp_path / name
        program, flow, verb, *arguments = shlex.split(command)
        if not folder.exists():
            shutil.copytree(EXAMPLES / name, folder)
        assert (program, verb) == ("python", "run")
        started = start_flow(*arguments, *added.split(), flow=flow, folder=folder)
        assert started.wait(END_S) == expect, started.text
        return started

    return run


LINK = r"\[rank 0\] node {} \(host \S+\) to node {} \(host \S+\): [\d.]+ GB/s over gloo"
SAYS = {  # command and options to spend less time on it, and what is printed
    "check-links": (
        "python flow.py run", "--nproc 1",
        [
            r"\[rank 0\] all-reduce over 2 ranks: [\d.]+ ms, [\d.]+ GB/s \(bus [\d.]+ GB/s\)",
            LINK.format(0, 1), LINK.format(1, 0), r"\[rank 1\] it trains", "reach each other, and have trained",
        ],
    ),
    "single-node": ("python flow.py run", "", ["2 ranks.*ok"]),
    # With more than one process, and without Metaflow: test_documents.py.
    "one-gpu": (
        "python flow.py run --nodes 1 --nproc 1", "--epochs 1",
        [r"\[rank 0\] epoch 0: loss 0\.\d{4}", "stored: <Outputs: 1 file"],
    ),
    "from-shell": (
        "python flow.py run", "--nproc 1",
        [r"y = 3\.00 x \+ -1\.00, loss 0\.0000", "2 ranks over gloo have the same weights: ok"],
    ),
}  # fmt: skip


@pytest.mark.long  # but for `make test-matrix`: the README's own example says it for one
@pytest.mark.matrix
def test_hello(example):
    assert "all-reduce over 4 ranks: ok" in example("hello", "python flow.py run").text


@pytest.mark.long
@pytest.mark.parametrize("name", SAYS)
def test_it_says_what_its_readme_says(name, example):
    command, added, patterns = SAYS[name]
    flow = example(name, command, added)
    assert [each for each in patterns if not re.search(each, flow.text)] == [], flow.text


@pytest.mark.long
def test_from_shell_without_mpi_says_what_to_do(example):
    """The PyTorch of the tests has none."""
    flow = example("from-shell", "python flow.py run --backend mpi", "--nodes 1", expect=1)
    page = next(each for each in outputs("from-shell") if "MPI is only" in each).replace("\\\n", "").splitlines()
    shown = [re.sub(r"^.*?\] *", "", line.text) for line in flow.lines]
    wanted = [re.sub(r"\(host \w+\)", "", line) for line in page]
    found = [line for line in shown if re.sub(r"\(host \S+\)", "", line).split(" Its traceback")[0] in wanted]
    assert len(found) == len(wanted), flow.text


@pytest.mark.long
def test_complete_goes_on_from_its_checkpoint_after_a_failure(example):
    flow = example("complete", "python flow.py run --fail-after 2", "--nproc 1 --epochs 4")
    assert re.search(
        r"restart 1 of 2: .* because rank 1 on node 1 .* failed at train.py:\d+ with RuntimeError", flow.text
    )
    assert "goes on after epoch 2" in flow.text
    assert re.findall(r"\[rank 0\] epoch (\d+): loss 0", flow.text) == ["0", "1", "2", "3"]
    assert re.search(r"accuracy 9\d\.\d%, restarts 1\n", flow.text), flow.text
    assert "stored: <Outputs: 1 file" in flow.text


@pytest.mark.long
def test_min_gpt_learns_and_writes_again_later(example, tmp_path):
    flow = example("min-gpt", "python flow.py run --steps 150", "--nproc 1 --steps 60")  # `make demo` trains it longer
    losses = [float(x) for x in re.search(r"(\d\.\d+) before, (\d\.\d+) after training", flow.text).groups()]
    assert losses[1] < losses[0] - 1.0
    assert re.search(r"\| \S.{40}", flow.text.split("What it writes now:")[1]), flow.text

    command = 'python generate.py --prompt "A function " --length 300 --seed 1'
    assert command in commands("min-gpt")
    words = [sys.executable, *shlex.split(command)[1:]]
    folder = tmp_path / "min-gpt"
    written = subprocess.run(words, cwd=folder, env=flow.env, capture_output=True, text=True)
    assert written.returncode == 0, written.stderr
    assert re.fullmatch(r"A function (.|\n){300}\n", written.stdout), written.stdout


@pytest.mark.long
def test_function_trains_and_evaluates(example):
    flow = example("function", "python flow.py run", "--nproc 1")
    accuracy = float(re.search(r"2 ranks trained; accuracy on 359 held-out digits: (\d+\.\d)%", flow.text)[1])
    assert accuracy > 90
    losses = [float(loss) for loss in re.findall(r"epoch \d: training loss (\d\.\d+)", flow.text)]
    assert losses == sorted(losses, reverse=True)
    assert len(losses) == 5


@pytest.mark.long
def test_torchrunx_parity(example):
    flow = example("torchrunx-parity", "python flow.py run")
    (page,) = outputs("torchrunx-parity")
    for line in page.replace("\\\n", "").splitlines():  # a line that is too long for a page
        assert line.replace("host vm", f"host {socket.gethostname()}") in flow.text, flow.text


@pytest.fixture
def failing_node(example, tmp_path):
    """Return a function that runs a command of failing-node and checks that what its README shows is printed."""

    def run(*words, shown: int, **options):
        flow = example(*words, **options)
        for line in outputs("failing-node")[shown].replace("\\\n", "").splitlines():  # a line too long for a page
            # How Python marks a place differs between its versions.
            if not line.removeprefix("[rank 3] [rank3]:").strip("|~^ "):
                continue
            pattern = re.escape(line)
            for before, after in [
                ("(host vm)", r"\(host \S+\)"),
                ("/home/me/examples", re.escape(str(tmp_path))),
                ("trained 6 s", r"trained \d+ s"),
                # On a busy machine torchrun may take the exit code first, and tell it in its report.
                ("a worker exited with code 1", "(a worker exited with code 1|rank 3 failed)"),
            ]:
                pattern = pattern.replace(re.escape(before), after)
            assert re.search(pattern + "$", flow.text, re.MULTILINE), f"not printed: {line}\n{flow.text}"
        return flow

    return run


def test_failing_node_names_the_rank(failing_node):
    flow = failing_node("failing-node", "python flow.py run", expect=1, shown=0)
    # One node tells all of it, the other one line.
    assert len(re.findall(r"Rank 3 on node 1 \(host \S+\) failed at train\.py:\d+ with", flow.text)) == 2
    assert flow.text.count("The reason: an error in your code.") == 1


@pytest.mark.long
def test_failing_node_in_other_ways(failing_node, example):
    failing_node("failing-node", "python flow.py run --how kill", expect=1, shown=1)
    flow = failing_node("failing-node", "python flow.py run --how exit --fail-rank 0", "--nproc 1", expect=1, shown=2)
    assert len(re.findall(r"Rank 0 on node 0 \(host \S+\) exited with", flow.text)) == 2
    flow = example("failing-node", "python flow.py run --how none", "--nproc 1 --fail-rank 1")
    assert outputs("failing-node")[3].replace("4 ranks", "2 ranks").strip() in flow.text
