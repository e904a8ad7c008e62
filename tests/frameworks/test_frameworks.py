"""The scripts of frameworks, unchanged, on 2 nodes x 2 processes by the example's flow."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from flow_runs import ABORTED_AT_EXIT
from limits import eventually
from pages import blocks_of

# Four ranks import up to 5 s of a core each, and the machine may do much else.
END_S = 300
pytestmark = pytest.mark.timeout(2 * END_S)

EXAMPLE = Path(__file__).parents[2] / "examples" / "frameworks"
TOGETHER = "4 of 4 ranks train together"
LIKE_ONE = r"loss \d\.\d+ -> 0\.\d+, the losses are as those of one model"
# What a script says when its ranks have worked together.
SAYS = {
    "trainer": f"Trainer: {TOGETHER}",
    "accelerate": f"Accelerate: {TOGETHER}",
    "lightning": rf"Lightning: {TOGETHER}, loss \d\.\d+ -> 0\.0",
    "fsdp2": r"FSDP2: 4 ranks, step 20, loss 0\.\d+",
    "tensor-parallel": f"tensor parallel: {LIKE_ONE}",
    "pipelining": f"pipelining: {LIKE_ONE}",
    "deepspeed": rf"DeepSpeed: {TOGETHER}, each with the optimizer's state of \d+ of 321 weights",
}


# No hub, and no network: what is not made is an error.
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}  # with one, both frameworks would use it
ALONE = "has trained by itself"


@pytest.fixture
def folder(tmp_path) -> Path:
    return Path(shutil.copytree(EXAMPLE, tmp_path / "frameworks"))


@pytest.fixture
def train(start_flow, folder):
    """Return a function that runs the flow to its end and returns what it has written."""

    def run(framework: str, *arguments: str, **env: str) -> str:
        options = ["--framework", framework, *arguments]
        for _ in range(2):
            flow = start_flow(*options, flow="flow.py", folder=folder, env={**OFFLINE, **env})
            status = flow.wait(END_S)
            if status == 0 or ABORTED_AT_EXIT not in flow.text:
                break
        assert status == 0, flow.text
        return flow.text

    return run


@pytest.mark.parametrize("framework", SAYS)
def test_a_script_runs_on_two_nodes_as_it_is(train, framework):
    text = train(framework)
    assert re.search(rf"\[rank \d\] {SAYS[framework]}", text), text
    assert ALONE not in text
    if framework == "fsdp2":
        assert "4 ranks have saved step 20, 2 ranks go on; the loss is the same" in text
        assert "FSDP2: 2 ranks, step 40, loss 0." in text


# Where a script gets what docs/metrics.md has for its framework.
REPORTING = {
    "lightning": ("from lightning.pytorch", "lightning_ddp.py", "max_epochs=4,"),
    "trainer": ("from transformers", "hf_trainer.py", "args=training,"),
}


@pytest.mark.parametrize("framework", REPORTING)
def test_a_framework_reports_its_progress_by_a_callback(train, folder, framework):
    first, name, place = REPORTING[framework]
    (callback,) = (block.text for block in blocks_of("docs/metrics.md") if block.text.startswith(first))
    script = (folder / name).read_text().replace("\n\n\n", f"\n\n\n{callback}\n\n", 1)
    assert place in script
    (folder / name).write_text(script.replace(place, f"{place} callbacks=[Report()],"))
    flow, call = (folder / "flow.py").read_text(), "run(script, self.args.split(), nproc_per_node=self.nproc)"
    assert call in flow
    (folder / "flow.py").write_text(flow.replace(call, f"told = {call}; print('TOLD', told.metrics, told.history)"))
    text = train(framework)
    told = re.search(r"TOLD ({.*?}) ({'.*})", text)
    metrics, history = map(ast.literal_eval, (told[1], told[2]))
    assert metrics["step"] == metrics["total"] > 0, text
    assert history["loss"][0][1] > history["loss"][-1][1] == metrics["loss"], text


STOPS = {  # where the callback is passed, and what makes the training last
    "lightning": ("from lightning.pytorch", "lightning_ddp.py", "max_epochs=4,", "max_epochs=4"),
    "trainer": ("from metaflow_torchrun", "hf_trainer.py", "args=training,", "max_steps=40"),
}


@pytest.mark.parametrize("framework", STOPS)
def test_a_framework_saves_and_stops_by_a_callback(start_flow, folder, framework):
    first, name, place, steps = STOPS[framework]
    (callback,) = (block.text for block in blocks_of("docs/frameworks.md") if block.text.startswith(first))
    script = (folder / name).read_text().replace("\n\n\n", f"\n\n\n{callback}\n\n", 1)
    assert place in script
    assert steps in script
    script = script.replace(place, f"{place} callbacks=[Stopping()],").replace(steps, f"{steps}00000")
    (folder / name).write_text(script)
    flow = start_flow("--framework", framework, flow="flow.py", folder=folder, env=OFFLINE)
    eventually(lambda: "stop at call" in flow.ask("stop", expect=None), "a call on all ranks", within_s=END_S)
    assert flow.wait(END_S) == 0, flow.text
    assert "launch 0 has ended well" in flow.text
    assert framework != "lightning" or (folder / "last.ckpt").exists()


FORGOTTEN = {"trainer": "--forget-use-cpu", "accelerate": "--forget-cpu"}


@pytest.mark.parametrize("framework", FORGOTTEN)
def test_without_a_gpu_each_rank_trains_by_itself_unless_it_is_told_otherwise_and_that_is_said_once(train, framework):
    text = train(framework, f"--args={FORGOTTEN[framework]}", **NO_GPU)
    assert "1 of 4 ranks train together" in text
    (line,) = [line for line in text.splitlines() if ALONE in line]
    assert "[torchrun node 0] warning: in launch 0 each of the 4 ranks" in line


COMMAND = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"]


def test_weights_and_biases_has_one_run(tmp_path):
    """The script of docs/frameworks.md with the real package, offline: of two ranks, one run comes."""
    (script,) = [block.text for block in blocks_of("docs/frameworks.md") if "import wandb" in block.text]
    (tmp_path / "train.py").write_text(script)
    env = {"OMP_NUM_THREADS": "1", "HOME": str(tmp_path), "METAFLOW_RUN_ID": "1234", "WANDB_MODE": "offline"}
    ran = subprocess.run(COMMAND, cwd=tmp_path, env=os.environ | env, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    (stored,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    assert b"loss" in stored.read_bytes()
