"""Flows on a Metaflow that has renamed, everywhere, all that they can do without; see tests/renamed.

``tests/unit/test_renamed.py`` takes one name after the other.
"""

from __future__ import annotations

from flow_runs import RENAMING, STAND_IN

NAMES = """
_card_component_store _card_creator_args _card_creator _latest_user_data _card_proc _last_layout_change _render_seq
_last_render _get_card_process CardProcessManager UserComponent with_default_component_id render_safely UI_URL
KUBERNETES_PORT KUBERNETES_SANDBOX_INIT_SCRIPT UBF_CONTROL UNPACK_KEY TimeoutException TASK_LOG_SOURCE LOG_SOURCES
LINE_PARSER Parallel LintWarn _checks METADATA_DONE_SUFFIX metadata_name_for_attempt get_latest_run_id
CommandException print_metaflow_exception print_unknown_exception default_storage_impl DEFAULT_DATASTORE
SPIN_ALLOWED_DECORATORS from_conf persist ubf_iter command_options decospecs statically_defined split_parents
parallel_foreach out_funcs func_lineno secs base_env
"""
RENAMED = {"PYTHONPATH": f"{RENAMING}:{STAND_IN}", "RENAMED": " ".join(NAMES.split())}


def test_a_gang_fails_with_its_cause_and_each_loss_has_a_line(run_flow):
    """It needs none of the names, and neither do its cards: they end as Metaflow has them."""
    env = {**RENAMED, "GANG_CARD": "own"}
    flow = run_flow(expect=1, env=env, attrs={"nproc_per_node": 2}, do="1:raise", timeout_s=170)
    assert {error["class"] for error in flow.errors()} == {"LaunchFailed"}, flow.text
    assert "Rank 1 on node 0" in flow.text
    assert "ValueError: bad löss" in flow.text
    lines = [line.text.partition("[torchrun] ")[2] for line in flow.lines if "[torchrun] Left out: " in line.text]
    for what in ("with @torchrun is entered", "Kubernetes and AWS Batch", "results that can't be", "the last card"):
        assert any(what in line for line in lines), f"{what}:\n{flow.text}"
    others = [line for line in flow.text.splitlines() if "Error: " in line and "Left out: " not in line]
    assert all("bad löss" in line for line in others), others


def test_a_flow_without_a_step_of_ours_never_notices_us(run_flow):
    flow = run_flow(flow="without.py", env=RENAMED, timeout_s=170)
    assert "[torchrun]" not in flow.text
    helped = run_flow(flow="without.py", command="--help", env=RENAMED, timeout_s=170)
    assert "torchrun" in helped.text, "the commands of all extensions are read for that"
    assert "Error" not in helped.text
