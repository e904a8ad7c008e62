"""What gangs do on Kubernetes alone; see test_backends.py for the rest."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest
from backends import Cluster
from remote_flows import EXAMPLES, check_gang, check_said

GPU = "nvidia.com/gpu"
pytestmark = pytest.mark.kubernetes


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


# --- what runs ------------------------------------------------------------------------------------


def test_torch_ddp_unchanged(run_remote, cluster):
    flow = run_remote("--with", "kubernetes", flow="flow.py", source=EXAMPLES / "torch-ddp")
    check_said(flow, "4 ranks over gloo ended with the same weights: ok")
    cluster.await_gone(flow)


def test_min_gpt_unchanged(run_remote, cluster):
    # A tenth of the steps learns enough to tell.
    small = ("--steps", "60", "--nproc", "1")
    flow = run_remote("--with", "kubernetes", *small, flow="flow.py", source=EXAMPLES / "min-gpt")
    before, after = map(float, re.search(r"(\d\.\d+) before, (\d\.\d+) after training", flow.text).groups())
    assert after < before - 1.0
    cluster.await_gone(flow)


# --- processes per node ---------------------------------------------------------------------------


@pytest.fixture
def gpus(cluster) -> Iterator[None]:
    """Have a node that offers 8 GPUs: a real one, or one that only says so (no worker here uses any).

    Its tests are in one group of pytest-xdist, since it changes the node.
    https://kubernetes.io/docs/tasks/administer-cluster/extended-resource-node/
    """
    nodes = cluster.core.list_node().items
    if any(int(node.status.capacity.get(GPU, "0")) >= 8 for node in nodes):
        yield
        return
    name, path = nodes[0].metadata.name, "/status/capacity/" + GPU.replace("/", "~1")

    def offer(change: dict[str, str], offered: bool) -> None:
        cluster.core.patch_node_status(name, [{"path": path, **change}])
        deadline = time.monotonic() + 60
        while (GPU in cluster.core.read_node_status(name).status.allocatable) is not offered:
            assert time.monotonic() < deadline, "the kubelet did not take the patched capacity over"
            time.sleep(0.5)

    offer({"op": "add", "value": "8"}, offered=True)
    yield
    offer({"op": "remove"}, offered=False)


@pytest.mark.xdist_group("gpus")
@pytest.mark.parametrize(
    ("attributes", "resources", "nproc"),
    [
        ({"gpu": 4}, None, 4),
        ({}, {"gpu": 2}, 2),
        ({"extended_resources": {GPU: "8"}}, None, 8),
        ({"gpu": 0}, None, 1),
    ],
    ids=["plain", "merged", "other", "none"],
)
def test_processes_per_node_are_the_requested_gpus(run_remote, cluster, gpus, attributes, resources, nproc):
    """That they are those which Metaflow requests is tested in tests/unit/test_accelerators.py."""
    plan = cluster.on(cpu=0.25, memory=1024, **attributes)
    check_gang(run_remote(NODES=1, RUN={}, RESOURCES=resources, **plan), 1, nproc=nproc)


@pytest.mark.xdist_group("gpus")
def test_gpus_requested_on_the_command_line_count(run_remote, cluster, gpus):
    flow = run_remote("--with", "kubernetes:gpu=2", NODES=2, RUN={})
    check_gang(flow, 2)
    check_said(flow, "processes per node: 2 (@kubernetes requests gpu=2)")


# --- what fails -----------------------------------------------------------------------------------


def test_a_pod_that_vanishes_is_named(start_remote, cluster):
    """The API server deletes it without grace."""
    flow = start_remote(DO="*:sleep", **cluster.on())
    # Of lines that come together, Metaflow's terminal shows one (2.19); the next with further output.
    flow.await_line(" of 4 runs")
    delete_pod(cluster, flow, 1, grace_s=0)
    begin = time.monotonic()
    assert flow.wait(60) == 1
    assert time.monotonic() - begin < 40
    check_said(flow, "Node 1 (host")
    cluster.await_gone(flow)


def delete_pod(cluster, flow, node, grace_s) -> None:
    victim = next(pod for pod in cluster.await_pods(flow, 2) if cluster.node_of(pod) == node)
    cluster.core.delete_namespaced_pod(victim.metadata.name, cluster.namespace, grace_period_seconds=grace_s)


def test_a_spot_notice_stops_the_gang_in_time(run_remote, cluster):
    flow = run_remote(expect=1, HOOK="before:1:spot", DO="*:sleep", **cluster.on())
    check_said(flow, "Node 1 (host", "was preempted: a spot notice says", "2026-11-21T10:00:00Z")
    cluster.await_gone(flow)


@pytest.mark.parametrize("node", [1, 0])
def test_a_pod_that_is_deleted_with_some_grace_lets_all_ranks_save(start_remote, cluster, node):
    """As a drain does it; the kubelet's SIGTERM reaches nothing but process 1, a shell of Metaflow's."""
    flow = start_remote(DO="*:save", **cluster.on())
    flow.await_line(" of 4 runs")
    delete_pod(cluster, flow, node, grace_s=30)
    assert flow.wait(60) == 1
    check_said(flow, f"Node {node} (host", "was preempted: its pod got SIGTERM", "code 0 in time: 0, 1, 2, 3")
    cluster.await_gone(flow)


@pytest.mark.parametrize("node", [1, 0])
def test_a_pod_that_is_replaced_lets_all_ranks_save(start_remote, cluster, node):
    """Where the task can't see its pod's SIGTERM, the task that comes to replace it tells."""
    blind = 'environment:vars={"TORCHRUN_POD_SHELL": "none"}'
    flow = start_remote("--with", blind, DO="*:save", **cluster.on())
    flow.await_line(" of 4 runs")
    delete_pod(cluster, flow, node, grace_s=60)
    assert flow.wait(90) == 1
    check_said(flow, f"node {node} (host", "is being replaced", f"Node {node} (host", "code 0 in time: 0, 1, 2, 3")
    cluster.await_gone(flow)


def test_gangs_in_a_foreach_do_not_meet(run_remote, cluster):
    flow = run_remote(flow="remote_foreach.py", name="RemoteForeach", **cluster.on())
    check_said(flow, "SEEN a0/4 a1/4 b0/4 b1/4")
    cluster.await_gone(flow)
