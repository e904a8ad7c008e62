"""The examples do what their READMEs say, by the commands written there."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys

import pytest
from pages import REPOSITORY, blocks_of

# They train, and import PyTorch up to eighteen times: on a machine that does much else, the longest takes minutes.
END_S = 400
pytestmark = pytest.mark.timeout(2 * END_S)


def texts(example: str, language: str = "") -> list[str]:
    """Return the blocks of an example's README: what it shows as output, or its commands; a long line is in one piece."""
    blocks = blocks_of(f"examples/{example}/README.md")
    return [block.text.replace("\\\n", "") for block in blocks if block.language == language]


@pytest.fixture
def example(start_flow, tmp_path):
    """Return a function that runs one command of a README to its end, in a copy of its folder.

    What stands after the command is added to it, to spend less time on it: fewer processes or steps.
    """

    def run(name: str, command: str = "python flow.py run", added: str = "", expect: int = 0):
        assert f"\n{command}\n" in "\n".join(["", *texts(name, "bash")]), f"the README of {name} does not say so"
        folder = tmp_path / name
        _, flow, verb, *arguments = shlex.split(command)
        assert verb == "run"
        if not folder.exists():
            shutil.copytree(REPOSITORY / "examples" / name, folder)
        started = start_flow(*arguments, *added.split(), flow=flow, folder=folder)
        assert started.wait(END_S) == expect, started.text
        return started

    return run


LINK = r"\[rank 0\] node {} \(host \S+\) to node {} \(host \S+\): [\d.]+ GB/s over gloo"
RUN = "python flow.py run"
SAYS = {  # command, options to spend less time on it, and what is printed
    "check-links": (
        RUN, "--nproc 1",
        [
            r"\[rank 0\] all-reduce over 2 ranks: [\d.]+ ms, [\d.]+ GB/s \(bus [\d.]+ GB/s\)",
            LINK.format(0, 1), LINK.format(1, 0), r"\[rank 1\] it trains", "reach each other, and have trained",
        ],
    ),
    "function": (
        RUN, "--nproc 1",
        [r"epoch 4: training loss 0\.\d+", r"2 ranks trained; accuracy on 359 held-out digits: (9\d|100)\.\d%"],
    ),
    "single-node": (RUN, "", ["2 ranks.*ok"]),
    # With more than one process, and without Metaflow: test_documents.py.
    "one-gpu": (
        f"{RUN} --nodes 1 --nproc 1", "--epochs 1",
        [r"\[rank 0\] epoch 0: loss 0\.\d{4}", "stored: <Outputs: 1 file"],
    ),
    "from-shell": (
        RUN, "--nproc 1", [r"y = 3\.00 x \+ -1\.00, loss 0\.0000", "2 ranks over gloo have the same weights: ok"],
    ),
}  # fmt: skip


@pytest.mark.long  # but for `make test-matrix`: the README's own example says it for one
@pytest.mark.matrix
def test_hello(example):
    assert "all-reduce over 4 ranks: ok" in example("hello").text


@pytest.mark.long
@pytest.mark.parametrize("name", SAYS)
def test_it_says_what_its_readme_says(name, example):
    command, added, patterns = SAYS[name]
    flow = example(name, command, added)
    assert [each for each in patterns if not re.search(each, flow.text)] == [], flow.text


@pytest.mark.long
def test_complete_goes_on_from_its_checkpoint_after_a_failure(example):
    flow = example("complete", f"{RUN} --fail-after 2", "--nproc 1 --epochs 4")
    assert re.search(
        r"restart 1 of 2: .* because rank 1 on node 1 .* failed at train.py:\d+ with RuntimeError", flow.text
    )
    assert "goes on after epoch 2" in flow.text
    assert re.findall(r"\[rank 0\] epoch (\d+): loss 0", flow.text) == ["0", "1", "2", "3"]
    assert re.search(r"accuracy 9\d\.\d%, restarts 1\n", flow.text), flow.text
    assert "stored: <Outputs: 1 file" in flow.text


@pytest.mark.long
def test_complete_is_resumed_where_it_was_interrupted(start_flow, tmp_path):
    """A resumed run has another number. What was reported last before Ctrl-C is kept."""
    folder = tmp_path / "complete"
    shutil.copytree(REPOSITORY / "examples" / "complete", folder)
    assert "python flow.py resume\n" in texts("complete", "bash")
    flow = start_flow("--nproc", "1", "--epochs", "60", flow="flow.py", folder=folder)
    flow.await_text("epoch 6: loss")
    os.killpg(flow.process.pid, signal.SIGINT)
    assert flow.wait(END_S) != 0, flow.text
    last = int(re.findall(r"epoch (\d+): loss", flow.text)[-1])
    (step,) = re.findall(r"rank 0 +step (\d+) of 3840", flow.ask("show"))
    assert int(step) >= 64 * last
    flow = start_flow(flow="flow.py", folder=folder, command="resume")
    flow.await_text(f"goes on after epoch ({last}|{last - 1})\n")  # it is saved after that line
    os.killpg(flow.process.pid, signal.SIGINT)
    flow.wait(END_S)


@pytest.mark.long
def test_min_gpt_learns_and_writes_again_later(example, tmp_path):
    flow = example("min-gpt", f"{RUN} --steps 150", "--nproc 1 --steps 60")  # `make demo` trains it longer
    losses = [float(x) for x in re.search(r"(\d\.\d+) before, (\d\.\d+) after training", flow.text).groups()]
    assert losses[1] < losses[0] - 1.0
    assert re.search(r"\| \S.{40}", flow.text.split("What it writes now:")[1]), flow.text

    (command,) = re.findall(
        r"^python generate\.py .*--length 300.*$", "\n".join(texts("min-gpt", "bash")), re.MULTILINE
    )
    words = [sys.executable, *shlex.split(command)[1:]]
    written = subprocess.run(words, cwd=tmp_path / "min-gpt", env=flow.env, capture_output=True, text=True)
    assert written.returncode == 0, written.stderr
    assert re.fullmatch(r"A function (.|\n){300}\n", written.stdout), written.stdout


@pytest.mark.long
def test_torchrunx_parity(example):
    flow = example("torchrunx-parity")
    (page,) = texts("torchrunx-parity")
    missing = [
        line for line in page.splitlines() if line.replace("host vm", f"host {socket.gethostname()}") not in flow.text
    ]
    assert missing == [], flow.text


@pytest.fixture
def failing_node(example, tmp_path):
    """Return a function that runs a command of failing-node and checks that what its README shows is printed."""

    def run(*words, shown: int, **options):
        flow = example("failing-node", *words, **options)
        for line in texts("failing-node")[shown].splitlines():
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
    flow = failing_node(RUN, expect=1, shown=0)
    # One node tells all of it, the other one line.
    assert len(re.findall(r"Rank 3 on node 1 \(host \S+\) failed at train\.py:\d+ with", flow.text)) == 2
    assert flow.text.count("The reason: an error in your code.") == 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "added", "shown"), [("kill", "", 1), ("exit --fail-rank 0", "--nproc 1", 2)], ids=["kill", "exit"]
)
def test_failing_node_in_other_ways(how, added, shown, failing_node):
    failing_node(f"{RUN} --how {how}", added, expect=1, shown=shown)
