"""Hangs, frozen processes, preemption, torchrun's own elasticity: real flows, real collectives."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil

STOP_S = 5.0
TWO = [{"entrypoint": "worker.py", "nproc_per_node": 1}]


def test_a_hang_is_shown_by_the_stacks_of_all_workers_and_restarted(run_flow, tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    hang = {"entrypoint": "hanging.py", "hang_timeout_s": 9}
    last = {**hang, "entrypoint_args": ["always"], "torchrun_args": {"log_dir": str(kept)}}
    flow = run_flow(expect=1, runs_=[{**hang, "max_restarts": 1}, last], env={"TMPDIR": str(tmp_path)})
    errors = flow.errors()
    assert len(errors) == 2
    assert errors[0]["message"] == errors[1]["message"]
    assert {(error["class"], error["cause"]["category"]) for error in errors} == {("LaunchHung", "hang")}
    said = errors[0]["message"]
    assert "no rank wrote anything or exited for 9 s" in said
    for rank, place in ((0, "in train_step"), (1, "in load_batch")):
        (line,) = [line for line in said.splitlines() if line.startswith(f"Rank {rank} was at hanging.py:")]
        assert place in line
        assert f"[torchrun node {rank}]" in flow.text
    # The restart that ended well says why it was needed, too.
    assert "restart 1 of 1 in 1 s, because the launch hangs" in flow.text
    assert len(list(tmp_path.glob("torchrun-hang-node*-launch0-0-*/stacks.txt"))) == 2
    files = [Path(line.split(": ", 1)[1]) for line in said.splitlines() if line.startswith("Stacks of node")]
    assert len(files) == 2
    assert all(kept in file.parents for file in files)
    stacks = "\n".join(file.read_text() for file in files)
    assert "load_batch" in stacks
    assert "train_step" in stacks
    assert "load_batch" in flow.text
    flow.await_gone(1)


def test_a_frozen_worker_is_a_hang_that_is_named(start_flow):
    flow = start_flow(attrs={"heartbeat_timeout_s": 3}, runs_=TWO, do="*:sleep")
    victim = next(w for w in flow.await_notes("worker-*", 2) if w["env"]["RANK"] == "1")["pid"]
    os.kill(victim, signal.SIGSTOP)
    assert flow.wait(3 + STOP_S + 15) == 1
    (error, other) = flow.errors()
    assert error["message"] == other["message"]
    assert "Rank 1 on node 1" in error["message"]
    assert "was stopped by a signal (SIGSTOP or the like) and not continued for 3 s" in error["message"]
    assert error["cause"]["category"] == "hang"
    flow.await_gone(1)


def test_an_elastic_launch_goes_on_when_a_node_is_lost(start_flow):
    options = {"nnodes": "1:2", "rdzv_backend": "c10d", "rdzv_conf": "last_call_timeout=1", "max_restarts": 2}
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
    flow.await_gone(1)
