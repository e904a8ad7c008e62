"""What is seen of launches that hang, with real collectives, and what it costs. The chaos suite freezes processes."""

from __future__ import annotations

import re
import time

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
    }
    flow = run_flow(expect=1, runs_=[hang], env={"TMPDIR": str(kept)})
    errors = flow.errors()
    assert len(errors) == 2
    assert errors[0]["message"] == errors[1]["message"]
    assert {(error["class"], error["cause"]["category"]) for error in errors} == {("LaunchHung", "hang")}
    said = errors[0]["message"]
    assert "joined a process group or exited for 20 s. If they" in said
    missed = "Rank 1 has not called all_reduce no. 1 of group default_pg (1 x float32); it is at hanging.py:"
    told = re.search(rf"(?m)^{re.escape(missed)}\d+\. Rank 0 waits in it, at hanging.py:\d+\.$", said)
    assert told or "Look at rank 1 first: the others seem to wait" in said, "with an older PyTorch"
    for rank, place in (
        (0, "in train_step (in all_reduce): dist.all_reduce(torch.ones(1))"),
        (1, "in load_batch: time"),
    ):
        (line,) = [line for line in said.splitlines() if line.startswith(f"Rank {rank}: hanging.py:")]
        assert place in line
        assert f"[torchrun node {rank}]" in flow.text
    # What was seen before the restart is kept, too.
    assert re.search(r"restart 1 of 1.* the launch hangs", flow.text)
    assert flow.text.count("what the workers were doing:") == 4, "on each node, before the restart and at the end"
    assert "load_batch" in flow.text
    assert not list(kept.rglob("*stacks-*")), "what was read them from is gone"
    flow.await_gone()


def test_supervisors_rest_while_nothing_happens(gang):
    """The cores are the workers': a supervisor that looks at what no event tells does so now and then."""
    gang.start(2, 1, do="*:be-quiet", stand_in=True)
    for rank in (0, 1):
        gang.await_note(f"worker-launch0-0-{rank}")
    supervisors = [psutil.Process(gang.supervisor(node)) for node in (0, 1)]
    began_at, before = time.monotonic(), [each.num_ctx_switches().voluntary for each in supervisors]
    gang.await_age(began_at, 3)
    seconds = time.monotonic() - began_at
    rates = [
        (each.num_ctx_switches().voluntary - woken) / seconds for each, woken in zip(supervisors, before, strict=True)
    ]
    assert max(rates) < 40, "how often each woke up in a second"
    gang.end_well()


def test_a_launch_takes_processes_that_were_there_before(gang):
    """They have imported PyTorch while the step's own code ran."""
    gang.start(1, 1, launches=2)
    gang.await_workers()
    gang.let_go()
    gang.await_launch(0)
    (gang.out / "finish").unlink()
    gang.await_that(lambda: len(gang.living()) > 3, "more than the task, its supervisor and that one's parent")
    before = gang.living()
    gang.begin_launch(1)
    gang.await_workers("launch1-0")
    assert gang.agent(0, "launch1-0") in before
    gang.end_well()
