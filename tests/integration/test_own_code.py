"""What the step's own code does to its process counts for its workers, too, although another process starts them."""

from __future__ import annotations

import os

import pytest


@pytest.mark.parametrize("warm", ["agent", "off"])
def test_workers_have_what_the_step_has_changed_and_write_where_it_prints(warm, run_flow):
    flow = run_flow(flow="own_code.py", env={"WARM": warm}, stand_in=True)
    # On a local run the tasks of all other nodes are children of node 0's.
    assert flow.note("children-1") == {"ends": 0, "living": False}
    for node in (0, 1):
        assert flow.note(f"seen-{node}") == {
            "umask": 0o27,
            "core": 0,
            "cwd": str(flow.out / f"here-{node}"),
            "nice": os.nice(0) + 3,
            "cpus": [min(os.sched_getaffinity(0))],
            "step": "größe",
        }
        assert flow.note(f"memory-{node}") == f"[rank {node}] größe * memory of {node}\n"
        assert (flow.out / f"file-{node}").read_text() == f"[rank {node}] größe * a file of {node}\n"
        for where, printed in (("memory", False), ("a file", False), ("the terminal", True)):
            assert (f"größe * {where} of {node}" in flow.text) is printed
            assert f"[rank {node}] error in {where} of {node}" in flow.text
