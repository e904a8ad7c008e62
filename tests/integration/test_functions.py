"""Python functions as entrypoints, in real flows; tests/unit/test_function_worker.py looks at single workers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from flow_runs import FLOWS


@pytest.mark.matrix
@pytest.mark.long
def test_functions_of_a_flow_in_launches_of_different_widths(run_flow):
    """One flow, many assertions: torch makes every launch expensive. examples/torchrunx-parity shows the rest."""
    flow = run_flow(flow="functions.py")
    end = flow.note("end")
    losses = [1.0, 1 / 2, 1 / 3]
    assert end["trained"] == [*([rank, rank // 2, losses, 0, ""] for rank in range(3)), [3, 1, losses, 2 << 20, "03"]]
    assert end["same"] == [True] * 4, "a class of the flow is another one in the workers"
    assert (end["iterated"], end["lengths"]) == ([[0, 1, 2, 3], [2, 3]], [4, 2])
    assert end["local"] == [1, 3]
    assert "values of ranks 2, 3, not of 0" in end["missing"]

    assert end["restarts"] == [1, 1]
    assert "restart 1 of 1" in flow.text

    # Widths change from launch to launch, and no worker outlives its own.
    assert end["added"] == [[2, {"sum": 3, "alive": []}]] * 2
    assert len(re.findall(r"process group at the end: False", flow.text)) == 2

    for failure in end["failures"]:
        assert (failure["class"], failure["is"], failure["batch"]) == ("BadBatch", True, 17)
        (note,) = failure["notes"]
        assert re.fullmatch(r"raised at functions.py:56 by rank 1 on node 1 \(host \S+\)", note)
        kind, rank, text = failure["cause"]
        assert (kind, rank, failure["is ours"]) == ("LaunchFailed", 1, True)
        assert "Traceback (most recent call last)" in text
        assert "in fail_on" in text
        assert "batch 17 is bad" in text

    # Values stay what they are until somebody looks: no torch in the task for functions that have none.
    assert [task["torch"] for task in flow.notes("task-*")] == [False, False]


def test_different_sources_are_refused_and_what_a_function_raises_is_retried(run_flow):
    flow = run_flow(flow="functions_retried.py", stand_in=True)
    refusals = [line.text for line in flow.lines if "refused: " in line.text]
    assert len(refusals) == 2
    assert all("contents of the entrypoint (node 0: " in line for line in refusals)
    assert "attempts: [1, 1]" in flow.text
    # The first attempt ended on both nodes by the function's own exception.
    note = r"its own exception: raised at functions_retried\.py:17 by rank 1 on node 1 \(host \S+\)"
    assert len(re.findall(note, flow.text)) == 2
    assert len(re.findall(r"KeyError: 'only in the first attempt'", flow.text)) >= 2
    assert "in check" in flow.text
    assert "function_worker" not in flow.text, "the tracebacks have no frame of ours"


@pytest.mark.long
def test_tensors_and_modules_go_there_and_back(tmp_path):
    """In single workers; `programs` of the unit tests make them without torchrun."""
    programs = Path(__file__).parents[1] / "unit" / "programs"
    env = {**os.environ, "METAFLOW_USER": "tester", "NO_METAFLOW_IN_WORKERS": "1"}
    command = [sys.executable, programs / "tensors.py"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "all as it was\n"


CELLS = [
    """
from metaflow import Runner

class Answer:
    def __init__(self, number):
        self.number = number

with Runner("single.py", pylint=False).run() as running:
    print("Runner:", running.status, running.run.data.result.world_size)
""",
    """
import os
from metaflow import TorchrunSingleNodeMultiGPU

class CellError(Exception):
    pass

def half(answer):
    if os.environ["RANK"] == "1":
        return Answer(answer.number / 2)
    if answer.number > 99:
        raise CellError(answer.number)

result = TorchrunSingleNodeMultiGPU().run(entrypoint=half, entrypoint_args=[Answer(84)], nproc_per_node=2)
print("cell:", result.rank(0), type(result.rank(1)) is Answer, result.rank(1).number)
try:
    TorchrunSingleNodeMultiGPU().run(entrypoint=half, entrypoint_args=[Answer(100)])
except CellError as error:
    print("caught:", error.args)
    print("verdict:", str(error.__cause__))
""",
    """
from metaflow import FlowSpec, NBRunner, current, step, torchrun


def rank_of_world():
    import os

    return f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}"


class CellFlow(FlowSpec):
    @step
    def start(self):
        self.next(self.train, num_parallel=2)

    @torchrun
    @step
    def train(self):
        self.ranks = list(current.torch.run(rank_of_world, gather=True))
        self.next(self.join)

    @step
    def join(self, inputs):
        self.ranks = inputs[0].ranks
        self.next(self.end)

    @step
    def end(self):
        pass


run = NBRunner(CellFlow).nbrun()
print(run.data.ranks)
""",
]


NO_GUARD = """
import os
from metaflow import TorchrunSingleNodeMultiGPU

def rank():
    return int(os.environ["RANK"])

print("LAUNCHES")
result = TorchrunSingleNodeMultiGPU().run(rank, nproc_per_node=2)
print("ranks:", list(result))
"""


def test_a_file_that_launches_without_a_guard_launches_once(tmp_path):
    (tmp_path / "alone.py").write_text(NO_GUARD)
    done = subprocess.run([sys.executable, "alone.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.count("ranks: [0, 1]")) == (0, 1), done.stdout + done.stderr
    assert done.stdout.count("] LAUNCHES") == 2, "each rank imports the file up to its call"


def test_a_lambda_without_cloudpickle_is_refused_with_what_to_install(tmp_path):
    (tmp_path / "cloudpickle.py").write_text("raise ImportError")
    (tmp_path / "alone.py").write_text(
        "from metaflow import TorchrunSingleNodeMultiGPU\nTorchrunSingleNodeMultiGPU().run(lambda: 1, nproc_per_node=1)"
    )
    done = subprocess.run([sys.executable, "alone.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "can't be pickled" in last
    assert "or install cloudpickle in the step's environment" in last


@pytest.mark.long
def test_functions_from_a_notebook(tmp_path, monkeypatch):
    """A real kernel: a flow in a file, a flow in a cell, and a function of a cell without any flow."""
    import nbclient  # here, since environments of `make test-matrix` have none
    import nbformat

    folder = tmp_path / "notes"
    shutil.copytree(FLOWS, folder)
    monkeypatch.setenv("METAFLOW_USER", "tester")
    monkeypatch.setenv("METAFLOW_DATASTORE_SYSROOT_LOCAL", str(tmp_path / "home"))
    monkeypatch.setenv("METAFLOW_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    cells = [nbformat.v4.new_code_cell(cell) for cell in CELLS]
    notebook = nbformat.v4.new_notebook(cells=cells)
    client = nbclient.NotebookClient(notebook, kernel_name="python3", resources={"metadata": {"path": folder}})
    client.execute()
    text = "".join(output.get("text", "") for cell in notebook.cells for output in cell.outputs)
    assert "Runner: successful 3" in text, text
    assert "cell: None True 42.0" in text, text
    assert "caught: (100,)" in text, text
    assert re.search(r'"Cell In\[2\]", line \d+, in half\n.* raise CellError\(answer.number\)', text), text
    assert "['rank 0 of 2', 'rank 1 of 2']" in text, text
