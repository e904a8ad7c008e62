"""The script of docs/frameworks.md for W&B with the real package, offline: of two ranks, one run comes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from pages import blocks_of

pytestmark = pytest.mark.timeout(300)
COMMAND = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"]


def test_weights_and_biases_has_one_run(tmp_path):
    (script,) = [block.text for block in blocks_of("docs/frameworks.md") if "import wandb" in block.text]
    (tmp_path / "train.py").write_text(script)
    env = {"OMP_NUM_THREADS": "1", "HOME": str(tmp_path), "METAFLOW_RUN_ID": "1234", "WANDB_MODE": "offline"}
    ran = subprocess.run(COMMAND, cwd=tmp_path, env=os.environ | env, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    (stored,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    assert b"loss" in stored.read_bytes()
