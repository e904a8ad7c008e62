"""`metaflow_torchrun.stopping` in real launches: a command, and a loss that is told of before."""

import os
import re
import signal
import time

from limits import limit_s

ATTRS = {"nproc_per_node": 2, "grace_s": 8}


def begin(start_flow, who="all"):
    flow = start_flow(runs_=[{"entrypoint": "stops.py", "entrypoint_args": [who]}], attrs=ATTRS)
    flow.await_notes("steps-*", 4)
    return flow


def steps(flow):
    return [note["step"] for note in flow.notes("saved-*")]


def test_a_command_ends_a_launch_and_the_run_goes_on(start_flow):
    flow = begin(start_flow)
    said = re.search(r"All ranks of .* stop at call (\d+) of stopping\(\)\.", flow.ask("stop"))
    assert flow.wait() == 0, flow.text
    assert steps(flow) == [int(said[1]) - 1] * 4
    assert [result["stopped"] for task in flow.note("end")["tasks"] for result in task["results"]] == [True, True]
    assert f"all ranks stop at call {said[1]} of stopping()" in flow.ask("show")


def test_before_a_loss_all_ranks_save_the_same_step(start_flow):
    flow = begin(start_flow)
    os.kill(flow.note("task-1")["pid"], signal.SIGTERM)
    assert flow.wait() == 1
    assert len(steps(flow)) == 4
    assert len(set(steps(flow))) == 1
    assert "In time, ranks 0, 1, 2, 3 exited with code 0." in flow.text


def test_where_rank_0_alone_asks_a_command_stops_nothing_and_a_loss_ends_all_in_time(start_flow):
    flow = begin(start_flow, "rank0")
    assert "not all ranks there have called metaflow_torchrun.stopping()" in flow.ask("stop", expect=1)
    assert flow.process.poll() is None
    at = time.monotonic()
    os.kill(flow.note("task-1")["pid"], signal.SIGTERM)
    assert flow.wait() == 1
    assert time.monotonic() - at < limit_s(ATTRS["grace_s"])
