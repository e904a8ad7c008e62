"""The example of checkpoints with real torch: whatever ends it, its weights come out as if nothing had happened."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from checkpoint_example import EXAMPLE, FEWER, end_line, train_plainly
from flow_runs import supervisor

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.xdist_group("checkpoints")]

END_S = 300
LARGEST_DIFFERENCE = """
import io, json, sys, torch
from metaflow import Run, namespace
namespace(None)
ours = torch.load(io.BytesIO(Run(sys.argv[1]).data.weights), weights_only=True)
plain = torch.load(sys.argv[2], weights_only=True)
assert ours.keys() == plain.keys()
print(json.dumps(max((ours[name] - plain[name]).abs().max().item() for name in plain)))
"""


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    return train_plainly(tmp_path_factory.mktemp("plain") / "checkpoint")


@pytest.fixture
def run_example(start_flow, tmp_path):
    """Return a function that starts a command of the page, with further options."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(EXAMPLE, folder)

    def start(command: str, *added: str):
        assert f"\n{command}\n" in (EXAMPLE / "README.md").read_text(), "the page does not say so"
        _, flow, verb, *arguments = shlex.split(command)
        assert verb == "run"
        return start_flow(*arguments, *added, flow=flow, folder=folder)

    return start


def check_end(flow, weights: Path) -> None:
    assert flow.wait(END_S) == 0, flow.text
    assert end_line(weights) in flow.text, flow.text


def task_of_node_1(flow) -> psutil.Process:
    (found,) = [
        process
        for process in flow.processes()
        if "step" in (words := process.cmdline()) and any(word.endswith("_node_1") for word in words)
    ]
    return found


def lose_node_1(flow) -> None:
    """Kill all processes of the node, from the supervisor's parent, which would let the workers save, to the task."""
    task = task_of_node_1(flow)
    between = supervisor(flow, task.pid).parent()
    for process in [between, *between.children(recursive=True), task]:
        with suppress(psutil.NoSuchProcess):
            process.kill()


@pytest.mark.parametrize("restarts", ["", " --restarts 1"])
def test_a_rank_that_dies_is_followed_by_others_that_go_on(restarts, run_example, plain):
    """By an attempt, or by a restart within it."""
    flow = run_example(f"python flow.py run --die-at 10{restarts}", *FEWER)
    check_end(flow, plain)
    assert "a worker was killed by SIGKILL" in flow.text
    assert ("restart 1 of 1" in flow.text, "Task is starting (retry)" in flow.text) == (bool(restarts), not restarts)
    assert "goes on after step 8" in flow.text


def test_a_lost_node_and_one_that_is_taken_back(run_example, plain):
    flow = run_example("python flow.py run --pause 0.5", *FEWER)
    flow.await_text("step 6: loss")
    lose_node_1(flow)
    went_on = flow.await_text(r"goes on after step (\d+)")
    first = int(went_on[1])
    assert first >= 4
    assert first % 4 == 0
    flow.await_text(f"step {first + 3}: loss", went_on.end())
    task_of_node_1(flow).terminate()
    check_end(flow, plain)
    assert "ranks 0, 1 exited with code 0" in flow.text
    since = flow.text[went_on.end() :]
    assert int(re.search(r"goes on after step (\d+)", since)[1]) >= first + 3
    # Where it was told to end, it has saved; so no step was done twice.
    steps = [int(number) for number in re.findall(r"\[rank 0\] step (\d+): loss", since)]
    assert steps == list(range(first + 1, 21))


def test_a_file_a_rank_goes_on_with_another_number_of_ranks(run_example, plain):
    """Sums over other ranks round otherwise."""
    flow = run_example("python flow.py run --sharded --die-at 10 --nproc-again 1")
    assert flow.wait(END_S) == 0, flow.text
    assert "ranks 0-3" in flow.text
    assert "goes on after step 8" in flow.text
    assert {f"saved part {part} of 2 of step 20" in flow.text for part in (0, 1)} == {True}
    run = re.search(r"run-id (\d+)", flow.text)[1]
    words = [sys.executable, "-c", LARGEST_DIFFERENCE, f"CheckpointFlow/{run}", str(plain)]
    asked = subprocess.run(words, env=flow.env, capture_output=True, text=True, timeout=END_S)
    assert asked.returncode == 0, asked.stderr
    assert json.loads(asked.stdout) < 1e-5
