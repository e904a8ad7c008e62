"""Flows on a Metaflow that has renamed, everywhere, all that they can do without; see tests/renamed.

``tests/unit/test_renamed.py`` takes one name after the other.
"""

from __future__ import annotations

from flow_runs import LEFT_OUT_TOGETHER, RENAMING, STAND_IN

RENAMED = {"PYTHONPATH": f"{RENAMING}:{STAND_IN}", "RENAMED": " ".join(LEFT_OUT_TOGETHER.split())}


def test_a_gang_fails_with_its_cause_and_each_loss_has_a_line(run_flow):
    """It needs none of the names, and neither do its cards: they end as Metaflow has them."""
    env = {**RENAMED, "GANG_CARD": "own"}
    flow = run_flow(expect=1, env=env, attrs={"nproc_per_node": 2}, do="1:raise", timeout_s=170)
    assert {error["class"] for error in flow.errors()} == {"LaunchFailed"}, flow.text
    assert "Rank 1 on node 0" in flow.text
    assert "ValueError: bad löss" in flow.text
    lines = [line.text.partition("[torchrun] ")[2] for line in flow.lines if "[torchrun] Left out: " in line.text]
    for what in ("with @torchrun is entered", "Kubernetes and AWS Batch", "results can't be stored", "the last card"):
        assert any(what in line for line in lines), f"{what}:\n{flow.text}"
    others = [line for line in flow.text.splitlines() if "Error: " in line and "Left out: " not in line]
    assert all("bad löss" in line for line in others), others


def test_a_flow_without_a_step_of_ours_never_notices_us(run_flow):
    flow = run_flow(flow="without.py", env=RENAMED, timeout_s=170)
    assert "[torchrun]" not in flow.text
    helped = run_flow(flow="without.py", command="--help", env=RENAMED, timeout_s=170)
    assert "torchrun" in helped.text, "the commands of all extensions are read for that"
    assert "Error" not in helped.text
