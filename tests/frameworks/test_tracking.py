"""The scripts of docs/frameworks.md with the real packages, offline: of two ranks, one run comes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pages import blocks_of

pytestmark = pytest.mark.timeout(300)
COMMAND = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"]


def run_on_two_ranks(folder: Path, words: str, **env: str) -> None:
    (script,) = [block.text for block in blocks_of("docs/frameworks.md") if words in block.text]
    (folder / "train.py").write_text(script)
    full = {**os.environ, "OMP_NUM_THREADS": "1", "HOME": str(folder), "METAFLOW_RUN_ID": "1234", **env}
    ran = subprocess.run(COMMAND, cwd=folder, env=full, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr


def test_weights_and_biases_has_one_run(tmp_path):
    run_on_two_ranks(tmp_path, "import wandb", WANDB_MODE="offline")
    (stored,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    assert b"loss" in stored.read_bytes()


def test_mlflow_has_one_run(tmp_path):
    import mlflow

    run_on_two_ranks(tmp_path, "import mlflow")
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (experiment,) = [each for each in client.search_experiments() if each.name == "my-experiment"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.data.params) == ("1234", {"lr": "0.1"})
    assert len(client.get_metric_history(run.info.run_id, "loss")) == 10


def test_tensorboard_has_one_file(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_on_two_ranks(tmp_path, "SummaryWriter")
    (events,) = (tmp_path / "runs" / "first").iterdir()
    read = EventAccumulator(str(events))
    read.Reload()
    assert [each.step for each in read.Scalars("loss")] == list(range(10))
