"""A launch goes on after the loss of a node: by a spare, by its pod that comes again, or with fewer nodes."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from backends import Cluster
from kubernetes import client
from remote_flows import check_said
from test_backends import backend  # noqa: F401 - a fixture
from test_kubernetes import offered

ONE = {"nproc_per_node": 1}
LOSE_1 = "1:nap,1:wipe-once,*:talk-once"  # every process of rank 1's node is killed; the workers of the others go on


def check(flow: Any, by_node: dict[int, list[str]], left: list[int], came: list[int]) -> None:
    """Check which nodes the join got, each with the ranks that it had in the end, and what the restart tells."""
    tasks = flow.gathered()
    assert {task["node"]: [*task["results"][0]["exit_codes"]] for task in tasks} == by_node
    result = tasks[0]["results"][0]
    assert result["world_size"] == sum(map(len, by_node.values()))
    assert [(each["left"], each["came"]) for each in result["restarts"]] == [(left, came)]


# --- Kubernetes and AWS Batch ---------------------------------------------------------------------


def test_a_spare_takes_the_place_of_a_node(run_remote, backend):  # noqa: F811
    flow = run_remote(
        NODES=3, DO=LOSE_1, RUN=ONE, TORCHRUN={"max_restarts": 1, "spare_nodes": 1}, metadata="service", **backend.on()
    )
    (spare, lost) = map(int, re.findall(r"node (\d), a spare, takes the place of node (\d)", flow.text)[0])
    assert {spare, lost} == {1, 2}  # who comes last is the spare
    check(flow, {0: ["0"], spare: ["1"]}, [lost], [spare])
    backend.await_gone(flow)


def test_a_spare_that_is_not_needed_leaves(run_remote, backend):  # noqa: F811
    more = {"max_restarts": 1, "spare_nodes": 1}
    flow = run_remote(NODES=3, RUN=ONE, TORCHRUN=more, metadata="service", **backend.on())
    assert "Waiting for batch secondary tasks" not in flow.text, "Metaflow waits 600 s for so many tasks"
    (spare,) = re.findall(r"node ([12]) leaves: launch 0 has ended well without it", flow.text)
    assert [task["node"] for task in flow.gathered()] == [0, 3 - int(spare)]
    backend.await_gone(flow)


@pytest.mark.batch
def test_on_batch_fewer_nodes_go_on(run_remote):
    from backends import Queue

    begin = time.monotonic()
    more = {"max_restarts": 1, "min_nodes": 2}
    flow = run_remote(NODES=3, DO=LOSE_1, RUN=ONE, TORCHRUN=more, metadata="service", **Queue().on())
    assert time.monotonic() - begin < 300, "Metaflow waits 600 s for a task that never ends"
    check_said(flow, "the launch goes on without node 1, on 2 nodes")
    check(flow, {0: ["0"], 2: ["1"]}, [1], [])


# --- Kubernetes -----------------------------------------------------------------------------------


def evict(cluster: Cluster, pod: Any) -> None:
    about = client.V1ObjectMeta(name=pod.metadata.name, namespace=cluster.namespace)
    eviction = {"apiVersion": "policy/v1beta1", "kind": "Eviction", "metadata": about}
    cluster.core.create_namespaced_pod_eviction(pod.metadata.name, cluster.namespace, eviction)


def start_three(start_remote: Any, cluster: Cluster, **plan: Any) -> tuple[Any, Any]:
    """Start a gang of three nodes; return its run, and the pod of node 1 when all ranks run."""
    flow = start_remote(NODES=3, DO="*:talk-once", RUN=ONE, **plan)
    for rank in range(3):
        flow.await_line(f"[rank {rank}] word ")
    (pod,) = [each for each in cluster.await_pods(flow, 3) if cluster.node_of(each) == 1]
    return flow, pod


@pytest.mark.kubernetes
@pytest.mark.parametrize(
    "lose", [Cluster.delete, evict, partial(Cluster.delete, grace_s=0)], ids=["deleted", "evicted", "vanished"]
)
def test_the_pod_comes_again_and_the_launch_goes_on(start_remote, lose: Callable[[Cluster, Any], None]):
    cluster = Cluster()
    flow, pod = start_three(start_remote, cluster, TORCHRUN={"max_restarts": 1}, **cluster.on())
    lose(cluster, pod)
    assert flow.wait(180) == 0, flow.text
    check_said(flow, "node 1 is started again")
    check(flow, {0: ["0"], 1: ["1"], 2: ["2"]}, [1], [1])
    assert len(re.findall(r"\[rank 1\] rank 1 of 3 runs", flow.text)) == 2
    cluster.await_gone(flow)


@pytest.mark.kubernetes
@pytest.mark.minutes
def test_the_pod_that_has_run_out_of_memory_comes_again(run_remote):
    """Kubernetes waits 10 s before it starts a pod again that has failed."""
    cluster = Cluster()
    flow = run_remote(
        NODES=2, DO="1:oom-once,*:talk-once", RUN=ONE, TORCHRUN={"max_restarts": 1}, **cluster.on(**cluster.small)
    )
    check_said(flow, "restart 1 of 1: ")
    assert {task["node"] for task in flow.gathered()} == {0, 1}
    cluster.await_gone(flow)


@pytest.mark.kubernetes
@pytest.mark.minutes
@pytest.mark.xdist_group("gpus")
@pytest.mark.timeout(600)
def test_a_pod_that_finds_no_machine_keeps_no_run_open(start_remote):
    """The others go on without it, and end well; the job set ends with the control node."""
    cluster, resource = Cluster(), "torchrun.example/place"
    needs = {"extended_resources": {resource: "1"}}
    with offered(cluster, resource, 3) as offer:
        more = {"max_restarts": 1, "min_nodes": 2, "all_nodes_started_timeout": 60}
        flow, pod = start_three(start_remote, cluster, TORCHRUN=more, **cluster.on(**needs))
        offer(0)
        cluster.delete(pod)
        flow.await_line("; the others go on without it", 180)
        assert flow.wait(180) == 0, flow.text
    check(flow, {0: ["0"], 2: ["1"]}, [1], [])
    cluster.await_gone(flow)
