"""Hangs and torchrun's own elasticity: real flows, real collectives. The chaos suite freezes processes."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest


@pytest.mark.matrix
def test_a_hang_is_shown_by_the_stacks_of_all_workers_and_restarted(run_flow, tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    hang = {
        "entrypoint": "hanging.py",
        "hang_timeout_s": 20,  # on a busy machine, torchrun imports PyTorch for more than ten before a worker starts
        "max_restarts": 1,
        "torchrun_args": {"log_dir": str(kept)},
    }
    flow = run_flow(expect=1, runs_=[hang])
    errors = flow.errors()
    assert len(errors) == 2
    assert errors[0]["message"] == errors[1]["message"]
    assert {(error["class"], error["cause"]["category"]) for error in errors} == {("LaunchHung", "hang")}
    said = errors[0]["message"]
    assert "or exited for 20 s" in said
    for rank, place in ((0, "in train_step"), (1, "in load_batch")):
        (line,) = [line for line in said.splitlines() if line.startswith(f"Rank {rank} was at hanging.py:")]
        assert place in line
        assert f"[torchrun node {rank}]" in flow.text
    # What was seen before the restart is kept, too.
    assert re.search(r"restart 1 of 1.* the launch hangs", flow.text)
    assert len(list(kept.glob("torchrun-hang-node*-launch0-0-*/stacks.txt"))) == 2
    files = [Path(line.split(": ", 1)[1]) for line in said.splitlines() if line.startswith("Stacks of node")]
    assert len(files) == 2
    assert all(kept in file.parents for file in files)
    stacks = "\n".join(file.read_text() for file in files)
    assert "load_batch" in stacks
    assert "train_step" in stacks
    assert "load_batch" in flow.text
    flow.await_gone()


def test_an_elastic_launch_goes_on_when_a_node_is_lost(start_flow):
    options = {"nnodes": "1:2", "rdzv_backend": "c10d", "rdzv_conf": "last_call_timeout=4", "max_restarts": 2}
    flow = start_flow(runs_=[{"entrypoint": "elastic.py", "torchrun_args": options}])
    assert {seen["WORLD_SIZE"] for seen in flow.await_notes("elastic-0-*", 2)} == {"2"}
    psutil.Process(flow.note("task-1")["pid"]).kill()
    assert flow.wait(60) == 1  # Metaflow wants the lost node's results
    (alone,) = flow.notes("elastic-1-*")
    assert (alone["WORLD_SIZE"], alone["TORCHELASTIC_MAX_RESTARTS"]) == ("1", "2")
    assert "alone, and done" in flow.text
    assert "node 1 has dropped out" in flow.text
    assert "the launch goes on with 1 nodes" in flow.text
    assert not flow.errors()  # run() of the control node has ended well
    flow.await_gone()
