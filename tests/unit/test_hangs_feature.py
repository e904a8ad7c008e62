"""Launches that hang: what the control node decides, and what a node tells it."""

import time
from pathlib import Path

import pytest
from fake_node import FakeNode

from metaflow_extensions.torchrun.plugins.torchrun.features.hangs.feature import Diagnostics, HangKeeper, Hangs
from metaflow_extensions.torchrun.plugins.torchrun.gang.keepers import Failing, Remarks
from metaflow_extensions.torchrun.plugins.torchrun.gang.policy import LaunchPolicy
from metaflow_extensions.torchrun.plugins.torchrun.gang.protocol import Failed, Told
from metaflow_extensions.torchrun.plugins.torchrun.gang.wire import to_plain
from metaflow_extensions.torchrun.plugins.torchrun.settings import parse_settings


def keeper(**policy):
    found = HangKeeper()
    found.begin(0, policy, 100.0)
    return found


def told(data):
    return Told(0, 0, "hangs", data)


# --- on the control node ----------------------------------------------------------------------------


def test_silence_of_all_ranks_is_a_hang():
    kept = keeper(timeout_s=30.0)
    kept.begin(0, {"timeout_s": 30.0}, 119.0)
    kept.handle(1, told({"age_s": 1.0}), 120.0)
    kept.handle(0, told({"age_s": 9.0}), 121.0)  # older than what node 1 has told
    for at_s in range(120, 150):
        assert kept.tick(float(at_s), None) == Remarks()
    failing = Failing("hang", "no rank wrote anything or exited for 30 s")
    assert kept.tick(149.1, None) == Remarks(failing=failing)
    kept.begin(0, {"timeout_s": 30.0}, 149.1)
    assert kept.tick(179.0, None) == Remarks()
    kept.begin(0, {}, 200.0)
    assert kept.tick(999.0, None) == Remarks(), "nobody asks for it"


def test_time_in_which_the_control_node_itself_was_stopped_is_no_silence():
    kept = keeper(timeout_s=30.0)
    kept.begin(0, {"timeout_s": 30.0}, 100.0)
    assert kept.tick(101.0, None) == kept.tick(900.0, None) == kept.tick(902.0, None) == Remarks()


def test_where_the_ranks_were_is_told():
    kept = keeper(timeout_s=30.0)
    for node in (1, 0):
        found = Diagnostics(f"host-{node}", None if node else "/tmp/stacks", {node: f"train.py:{node}3 in step"})
        kept.handle(node, told(to_plain(found)), 101.0)
    assert kept.detail("hang").splitlines() == [
        "rank 0 in step at train.py:03, rank 1 in step at train.py:13.",
        "Rank 0 was at train.py:03 in step.",
        "Rank 1 was at train.py:13 in step.",
        "Stacks of node 0 (host host-0): /tmp/stacks",
        "Stacks of node 1 (host host-1): in its log only",
    ]
    assert (kept.detail("timeout"), kept.find_out_s("timeout"), kept.find_out_s("hang")) == ("", 0.0, 15.0)
    kept.begin(0, {}, 200.0)
    assert kept.detail("hang") == ""


def test_where_thousands_of_ranks_hang_is_told_by_place():
    kept = keeper(timeout_s=5.0)
    for node in range(300):
        place = "train.py:9 in load" if node == 17 else "train.py:12 in step"
        where = {str(node * 2 + local_rank): place for local_rank in range(2)}
        kept.handle(node, told({"host": f"host-{node}", "file": f"/logs/{node}.txt", "where": where}), 101.0)
    detail = kept.detail("hang")
    assert detail.startswith("598 ranks in step at train.py:12, 2 ranks in load at train.py:9.")
    assert "Ranks 0-33, 36-599 were at train.py:12 in step.\nRanks 34, 35 were at train.py:9 in load." in detail
    assert "Stacks of node 0 (host host-0): /logs/0.txt" in detail
    assert "236 more such lines are left out." in detail


@pytest.mark.parametrize(("given", "attribute", "policy"), [(None, None, {}), (None, 9, 9.0), ("5", 9, 5.0)])
def test_a_call_decides_before_the_attribute(given, attribute, policy):
    settings = parse_settings({"hang_timeout_s": attribute}, "train")
    found = Hangs().policy({"hang_timeout_s": given}, settings)
    assert found == (policy and {"timeout_s": policy})


# --- on a node --------------------------------------------------------------------------------------


def node_with(tmp_path, timeout_s, **more):
    policy = LaunchPolicy(features={"hangs": {"timeout_s": timeout_s}})
    return FakeNode(tmp_path, policy=policy, features=(Hangs(),), **more)


@pytest.mark.parametrize(("kind", "has_failed"), [("hang", False), ("hang", True), ("timeout", False)])
def test_a_hang_is_looked_into_before_the_workers_are_stopped(kind, has_failed, tmp_path):
    node = node_with(tmp_path, 5.0)
    agent = node.running()
    assert str(agent.env["TORCHRUN_STACKS_FOLDER"]).startswith(str(node.agent_folder(agent)))
    if has_failed:
        node.worker_ended(agent, 0, 1)
        node.expect(Failed)
    node.stop(kind=kind)
    is_looked_into = kind == "hang" and not has_failed
    if is_looked_into:
        found = node.expect(Told).data
        assert sorted(found["where"]) == ["0", "1"]
        assert Path(found["file"]).parent.name.startswith("torchrun-hang-node0-launch0-0-")
    node.ends(agent)
    assert len([text for text in node.texts("note") if "what the workers were doing" in text]) == is_looked_into


def test_the_gang_hears_of_output_and_of_ends_now_and_then(tmp_path):
    node = node_with(tmp_path, 1000.0)
    agent = node.running()
    now = time.monotonic()
    node.worker_ended(agent, 0, 0, at=now)
    assert node.expect(Told).data["age_s"] == pytest.approx(0.0, abs=50)
    node.worker_ended(agent, 1, 0, at=now + 99.0)
    node.worker_ended(agent, 1, 0, at=now + 101.0)
    assert node.expect(Told).data["age_s"] == pytest.approx(-101.0, abs=50), "a tenth of the limit later"
    node.ends(agent)


def test_a_launch_without_the_limit_has_nothing_of_it(tmp_path):
    node = FakeNode(tmp_path, features=(Hangs(),))
    agent = node.running()
    assert not {"TORCHRUN_STACKS_FOLDER", "TORCHRUN_HOOKS"} & set(agent.env)
    node.worker_ended(agent, 0, 0, at=time.monotonic())
    node.stop(kind="timeout")
    node.ends(agent)
