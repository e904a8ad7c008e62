"""Python functions as entrypoints, in real flows; tests/unit/test_function_worker.py looks at single workers."""

from __future__ import annotations

import re


def test_functions_of_a_flow_in_launches_of_different_widths(run_flow):
    """One flow, many assertions: torch makes every launch expensive."""
    flow = run_flow(flow="functions.py")
    end = flow.note("end")
    losses = [1.0, 1 / 2, 1 / 3]
    assert end["trained"] == [
        *([rank, rank // 2, losses, 0, ""] for rank in range(3)),
        [3, 1, losses, 64 << 20, "03"],
    ]
    assert end["same"] == [True] * 4, "a class of the flow is another one in the workers"
    assert end["own"] == [[0, 1], [2, 3]]
    assert end["local"] == [1, 3]
    assert "of node 1, has the values of ranks 2, 3, not of 0" in end["missing"]

    # Widths change from launch to launch, and no worker outlives its own.
    assert end["worlds"] == [2, 2]
    assert end["alive"] == [[], []]

    for failure in end["failures"]:
        assert (failure["class"], failure["is"], failure["batch"]) == ("BadBatch", True, 17)
        (note,) = failure["notes"]
        assert re.fullmatch(r"raised by rank 3 on node 1 \(host \S+\)", note)
        kind, rank, text = failure["cause"]
        assert (kind, rank, failure["is ours"]) == ("LaunchFailed", 3, True)
        assert "Traceback (most recent call last)" in text
        assert "in fail_on" in text
        assert "batch 17 is bad" in text

    assert end["restarted"] == [[1, 1], [1, 1]]
    assert "restart 1 of 1" in flow.text

    # The gradient is the mean of 0 and 1: both ranks took part.
    assert end["reduced"] == [[2, "gloo", [[0.5, 0.5, 0.5]], "Linear"]] * 2
    assert len(re.findall(r"process group at the end: False", flow.text)) == 2
    # Values stay what they are until somebody looks: no torch in the task for functions that have none.
    assert [task["torch"] for task in flow.notes("task-*")] == [False, False]


def test_different_sources_are_refused_and_what_a_function_raises_is_retried(run_flow):
    flow = run_flow(flow="functions_retried.py")
    refusals = [line.text for line in flow.lines if "refused: " in line.text]
    assert len(refusals) == 2
    assert all("The nodes differ in the contents of the entrypoint (node 0: " in line for line in refusals)
    assert "attempts: [1, 1]" in flow.text
    # The first attempt ended on both nodes by the function's own exception.
    assert len(re.findall(r"KeyError: 'only in the first attempt'", flow.text)) >= 2
    assert re.search(r"alone: \[40, 41\] \[.*only in the first attempt.*raised by rank 1 on node 0", flow.text)
