"""Checkpoints by metaflow-checkpoint: whatever ends a gang, the next one goes on from the last that is complete.

Workers are without torch here; tests/frameworks/test_checkpoints.py has real ones.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

import psutil
import pytest
from flow_runs import FLOWS

REPOSITORY = Path(__file__).parents[2]
STORE = REPOSITORY / "examples" / "checkpoint" / "checkpoints.py"
# Attempt.restart -> what ends it, and after how many steps; the next ones go on from there, or from before.
PLAN = {"0.0": ("raise", 3), "0.1": ("die", 6), "1.0": ("wait", 7)}
BEGAN = {"0.0": 0, "0.1": 2, "1.0": 4, "2.0": 7}


def undisturbed(rank):
    weights = [0.0] * 3
    for step in range(10):
        weights = [0.9 * weight + math.sin(step * (rank + 2) + place) for place, weight in enumerate(weights)]
    return weights


def recipe() -> str:
    """Return what docs/checkpoints.md has for a script."""
    page = (REPOSITORY / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    (block,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "Checkpoint()" in block]
    return block


@pytest.mark.long
def test_restarts_a_lost_node_and_a_preemption_change_nothing_of_what_comes_out(start_flow, tmp_path):
    folder = tmp_path / "flow folder"
    shutil.copytree(FLOWS, folder)
    shutil.copy(STORE, folder)
    (folder / "recipe.py").write_text(recipe())
    flow = start_flow(flow="checkpointed.py", folder=folder, env={"PLAN": json.dumps(PLAN)}, stand_in=True)

    assert flow.await_notes("saved-alone", 1) == [6]
    psutil.Process(flow.note("task-0-1")["pid"]).kill()
    assert flow.await_notes("waits-*", 2) == [7, 7]
    psutil.Process(flow.note("task-1-1")["pid"]).terminate()
    assert flow.wait() == 0, flow.text

    assert {now: flow.notes(f"began-{now}-*") for now in BEGAN} == {now: [step] * 2 for now, step in BEGAN.items()}
    assert [flow.note(f"ended-{rank}") for rank in (0, 1)] == [undisturbed(0), undisturbed(1)]
    assert re.search(r"restart 1 of 1: .* because rank 1 on node 1", flow.text)
    assert "Node 1 (host" in flow.text
    assert "with code 0 in time: 0, 1" in flow.text

    seen = flow.note("seen")
    for one in seen["by functions"]:
        # After 2, 4 and 6 steps, where one part is missing; after 6 and 7; after 8 and 10.
        assert (one["attempts"], one["count"]) == ([0, 1, 2], 13)
        assert one["files"] == ["0.json"]
        assert one["refused"].startswith("current.checkpoint works in the task's")
    assert seen["by functions"][0]["recipe"] == [10, 12, "own"]
    assert [one["task"] for one in seen["by functions"]] == [seen["task"], f"{seen['task']}_node_1"]
    assert seen["by the task"] == 14
    # Both nodes know that they are of one gang, as they do on a cluster.
    assert "control task id is not set" not in flow.text
    flow.await_gone()
