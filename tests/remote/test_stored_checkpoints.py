"""examples/checkpoint with its checkpoints in S3, and its nodes in pods: the same weights as under plain torchrun."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path

import pytest
from backends import Cluster
from checkpoint_example import EXAMPLE, FEWER, end_line, train_plainly
from remote_flows import ONE_THREAD, RemoteFlow, check_said

STEPS = 24


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    return train_plainly(tmp_path_factory.mktemp("plain") / "checkpoint")


@pytest.mark.s3
@pytest.mark.xdist_group("s3")
def test_checkpoints_in_s3(run_flow, tmp_path, plain):
    folder = tmp_path / "checkpoint"
    shutil.copytree(EXAMPLE, folder)
    # @checkpoint heeds this setting alone, not the option --datastore (0.2.14).
    env = {"METAFLOW_DEFAULT_DATASTORE": "s3"}
    words = (*FEWER, "--die-at", "10")
    flow = run_flow(*words, flow="flow.py", folder=folder, keep_settings=True, env=env, timeout_s=240)
    assert "goes on after step 8" in flow.text
    assert end_line(plain) in flow.text, flow.text
    assert not list((tmp_path / "home").rglob("mf.checkpoints")), "they are on this machine's disk"


def delete_pod_of_node_1(cluster: Cluster, flow: RemoteFlow, known: set[str], grace_s: int) -> None:
    """Delete a pod that is none of those `known`, and note that it is known now."""
    deadline = time.monotonic() + 60
    while not (names := [pod.metadata.name for pod in cluster.pods(flow) if cluster.node_of(pod) == 1]) or (
        set(names) <= known
    ):
        assert time.monotonic() < deadline, flow.text
        time.sleep(0.2)
    for name in set(names) - known:
        cluster.core.delete_namespaced_pod(name, cluster.namespace, grace_period_seconds=grace_s)
        known.add(name)


@pytest.mark.kubernetes
@pytest.mark.metadata_service
@pytest.mark.minutes
@pytest.mark.timeout(900)  # three gangs, one after the other
def test_a_lost_pod_and_one_that_is_drained(start_remote, tmp_path):
    plain = train_plainly(tmp_path / "plain", steps=STEPS)
    cluster, known = Cluster(), set[str]()
    options = ("--with", "kubernetes", *ONE_THREAD, *FEWER, "--steps", str(STEPS), "--pause", "1")
    flow = start_remote(*options, flow="flow.py", name="CheckpointFlow", source=EXAMPLE, metadata="service")
    flow.await_line("step 6: loss", timeout_s=200)
    delete_pod_of_node_1(cluster, flow, known, grace_s=0)
    flow.await_line("goes on after step", timeout_s=200)
    flow.await_line("step 12: loss", timeout_s=100)
    delete_pod_of_node_1(cluster, flow, known, grace_s=30)
    assert flow.wait(400) == 0, flow.text
    check_said(flow, "code 0 in time: 0, 1", end_line(plain, steps=STEPS))
    first, second = [int(number) for number in re.findall(r"goes on after step (\d+)", flow.text)]
    # The kubelet leaves 2 s even to the first pod, so its ranks may have saved once more.
    assert 4 <= first < second
    assert second >= 12
    cluster.await_gone(flow)
