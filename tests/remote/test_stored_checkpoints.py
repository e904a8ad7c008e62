"""examples/checkpoint with its checkpoints in S3: the same weights as under plain torchrun."""

from __future__ import annotations

import shutil

import pytest
from checkpoint_example import EXAMPLE, FEWER, end_line, train_plainly


@pytest.mark.s3
@pytest.mark.xdist_group("s3")
def test_checkpoints_in_s3(run_flow, tmp_path):
    folder = tmp_path / "checkpoint"
    shutil.copytree(EXAMPLE, folder)
    # @checkpoint heeds this setting alone, not the option --datastore (0.2.14).
    env = {"METAFLOW_DEFAULT_DATASTORE": "s3"}
    words = (*FEWER, "--die-at", "10")
    flow = run_flow(*words, flow="flow.py", folder=folder, keep_settings=True, env=env, timeout_s=240)
    assert "goes on after step 8" in flow.text
    assert end_line(train_plainly(tmp_path / "plain")) in flow.text, flow.text
    assert not list((tmp_path / "home").rglob("mf.checkpoints")), "they are on this machine's disk"
