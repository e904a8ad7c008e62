"""A launch goes on after the loss of a node: on Kubernetes its pod comes again, on AWS Batch the others go on."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from backends import Cluster
from kubernetes import client
from remote_flows import check_said

TALK = {"DO": "*:talk-once", "RUN": {"nproc_per_node": 1}}


def delete(cluster: Cluster, pod: Any) -> None:
    cluster.core.delete_namespaced_pod(pod.metadata.name, cluster.namespace, grace_period_seconds=30)


def evict(cluster: Cluster, pod: Any) -> None:
    about = client.V1ObjectMeta(name=pod.metadata.name, namespace=cluster.namespace)
    cluster.core.create_namespaced_pod_eviction(
        pod.metadata.name, cluster.namespace, {"apiVersion": "policy/v1beta1", "kind": "Eviction", "metadata": about}
    )


def vanish(cluster: Cluster, pod: Any) -> None:
    cluster.core.delete_namespaced_pod(pod.metadata.name, cluster.namespace, grace_period_seconds=0)


@pytest.mark.kubernetes
@pytest.mark.parametrize("lose", [delete, evict, vanish])
def test_the_pod_comes_again_and_the_launch_goes_on(start_remote, lose: Callable[[Cluster, Any], None]):
    cluster = Cluster()
    flow = start_remote(NODES=3, TORCHRUN={"max_restarts": 1}, **TALK, **cluster.on())
    for rank in range(3):
        flow.await_line(f"[rank {rank}] word ")
    (pod,) = [each for each in cluster.await_pods(flow, 3) if cluster.node_of(each) == 1]
    lose(cluster, pod)
    assert flow.wait(180) == 0, flow.text
    check_said(flow, "node 1 is started again")
    tasks = flow.gathered()
    assert [task["node"] for task in tasks] == [0, 1, 2]
    (result,) = tasks[0]["results"]
    (restart,) = result["restarts"]
    assert (restart["left"], restart["came"], result["world_size"]) == ([1], [1], 3)
    assert sorted(node for task in tasks for node in task["results"][0]["exit_codes"]) == ["0", "1", "2"]
    assert len(re.findall(r"\[rank 1\] rank 1 of 3 runs", flow.text)) == 2
    cluster.await_gone(flow)
