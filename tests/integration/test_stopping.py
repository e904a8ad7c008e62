"""`metaflow_torchrun.stopping` and a profile in real launches: a command, and a loss that is told of before."""

import json
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


def test_a_command_ends_a_launch_and_the_run_goes_on(start_flow, tmp_path):
    flow = begin(start_flow)
    see_a_profile(flow, tmp_path / "größe.json")
    said = re.search(r"All ranks of .* stop at call (\d+) of stopping\(\)\.", flow.ask("stop"))
    assert flow.wait() == 0, flow.text
    assert steps(flow) == [int(said[1]) - 1] * 4
    assert [result["stopped"] for task in flow.note("end")["tasks"] for result in task["results"]] == [True, True]
    assert f"all ranks stop at call {said[1]} of stopping()" in flow.ask("show")


def see_a_profile(flow, path):
    """See what one rank of node 1 does while all go on."""
    assert f"{path} (" in flow.ask("profile", "--rank", "2", "--seconds", "0.5", "--to", str(path))
    trace = json.loads(path.read_text())["traceEvents"]
    assert "gloo:all_reduce" in {event.get("name") for event in trace}
    assert {"ph", "ts", "pid", "tid"} <= trace[0].keys(), "what Chrome's viewer needs"
    assert "no such rank runs" in flow.ask("profile", "--rank", "9", expect=1)
    assert "Missing option" in flow.ask("profile", expect=2), "never all by accident"
    assert "name a file in a folder" in flow.ask("profile", "--rank", "0", "--to", "/no/such/folder/x", expect=1)


def test_before_a_loss_all_ranks_save_the_same_step(start_flow):
    flow = begin(start_flow)
    os.kill(flow.note("task-1")["pid"], signal.SIGTERM)
    assert flow.wait() == 1
    assert len(steps(flow)) == 4
    assert len(set(steps(flow))) == 1
    assert "In time, ranks 0, 1, 2, 3 exited with code 0." in flow.text


def test_where_rank_0_alone_asks_a_command_stops_nothing_and_a_loss_ends_all_in_time(start_flow):
    flow = begin(start_flow, "rank0")
    assert "on nodes 0, 1, not all ranks have called metaflow_torchrun.stopping()" in flow.ask("stop", expect=1)
    assert flow.process.poll() is None
    at = time.monotonic()
    os.kill(flow.note("task-1")["pid"], signal.SIGTERM)
    assert flow.wait() == 1
    assert time.monotonic() - at < limit_s(ATTRS["grace_s"])
