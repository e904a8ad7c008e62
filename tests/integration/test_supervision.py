"""What is seen of launches that hang, with real collectives, and what it costs. The chaos suite freezes processes."""

from __future__ import annotations

import re
import time
from pathlib import Path

import psutil
import pytest


@pytest.mark.matrix
def test_a_hang_is_shown_by_the_stacks_of_all_workers_and_restarted(run_flow, tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    hang = {
        "entrypoint": "hanging.py",
        "hang_timeout_s": 20,  # begins where the first rank joins; the other one may still import PyTorch
        "max_restarts": 1,
        "torchrun_args": {"log_dir": str(kept)},
    }
    flow = run_flow(expect=1, runs_=[hang])
    errors = flow.errors()
    assert len(errors) == 2
    assert errors[0]["message"] == errors[1]["message"]
    assert {(error["class"], error["cause"]["category"]) for error in errors} == {("LaunchHung", "hang")}
    said = errors[0]["message"]
    assert "joined a process group or exited for 20 s. If they" in said
    assert "rank 1 in load_batch at hanging.py:14. Look at rank 1 first: the others seem to wait" in said
    for rank, place in (
        (0, "in train_step (in all_reduce): dist.all_reduce(torch.ones(1))"),
        (1, "in load_batch: time"),
    ):
        (line,) = [line for line in said.splitlines() if line.startswith(f"Rank {rank}: hanging.py:")]
        assert place in line
        assert f"[torchrun node {rank}]" in flow.text
    # What was seen before the restart is kept, too.
    assert re.search(r"restart 1 of 1.* the launch hangs", flow.text)
    assert len(list(kept.glob("torchrun-hang-node*-launch0-0-*/stacks.txt"))) == 2
    files = [Path(line.split(": ", 1)[1]) for line in said.splitlines() if line.startswith("Whole stacks of node")]
    assert len(files) == 2
    assert all(kept in file.parents for file in files)
    stacks = "\n".join(file.read_text() for file in files)
    assert "load_batch" in stacks
    assert "train_step" in stacks
    assert "load_batch" in flow.text
    assert not list(kept.rglob("*stacks-*")), "what was read them from is gone"
    flow.await_gone()


def cpu_s(*pids: int) -> float:
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def test_it_costs_next_to_nothing_while_ranks_train(gang):
    """It is 0.3 % of a core (docs/performance.md). Whoever looks at something all the time takes ten times that."""
    gang.start(2, entrypoint="writer.py", do="15 1", stand_in=True)
    gang.await_that(lambda: all(f"writer {node} 0000002" in gang.log(node) for node in (0, 1)), "the third line")
    ours = [pid for node in (0, 1) for pid in (gang.task(node), gang.supervisor(node), gang.between(node))]
    begun_at, begun_s = time.monotonic(), cpu_s(*ours)
    gang.await_that(lambda: all(f"writer {node} 0000012" in gang.log(node) for node in (0, 1)), "ten more")
    seconds, used_s = time.monotonic() - begun_at, cpu_s(*ours) - begun_s
    assert used_s / 2 < 0.03 * seconds, f"{used_s:.2f} s of CPU for two nodes in {seconds:.1f} s"
    gang.await_that(lambda: all(process.poll() is not None for process in gang.processes.values()), "the end")
