"""What gangs do on Kubernetes alone; see test_backends.py for the rest."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from backends import Cluster
from limits import eventually, limit_s
from remote_flows import check_gang, check_said
from seen_afterwards import Seen, check_failed

pytestmark = pytest.mark.kubernetes


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@contextmanager
def offered(cluster, resource, count) -> Iterator[Callable[[int], None]]:
    """Have one node say that it has so much of a resource; what is yielded changes how much.

    As that changes the node, its tests are in one group of pytest-xdist.
    https://kubernetes.io/docs/tasks/administer-cluster/extended-resource-node/
    """
    name = cluster.core.list_node().items[0].metadata.name
    path = "/status/capacity/" + resource.replace("/", "~1")

    def patch(change: dict[str, str], allocatable: str | None) -> None:
        cluster.core.patch_node_status(name, [{"path": path, **change}])
        now = lambda: cluster.core.read_node_status(name).status.allocatable.get(resource)  # noqa: E731
        eventually(lambda: now() == allocatable, "the kubelet takes the patched capacity over", 60)

    def offer(count: int) -> None:
        patch({"op": "add", "value": str(count)}, str(count))

    offer(count)
    try:
        yield offer
    finally:
        patch({"op": "remove"}, None)


# --- what fails -----------------------------------------------------------------------------------


@pytest.mark.xdist_group("gpus")
def test_a_pod_without_a_place_is_named_with_the_command_that_tells_why(start_remote, cluster):
    """The only node has place for one of the two."""
    resource = "torchrun.example/place"
    with offered(cluster, resource, 1):
        needs = {"extended_resources": {resource: "1"}}
        flow = start_remote(TORCHRUN={"all_nodes_started_timeout": 30}, **cluster.on(**needs))
        reminder = flow.await_line("waits for node 1 to start. ")
        namespace, label = re.search(r"kubectl -n (\S+) describe pods -l (\S+)", reminder).groups()
        (pod,) = cluster.core.list_namespaced_pod(namespace, label_selector=label).items
        assert cluster.node_of(pod) == 1
        assert [f"Insufficient {resource}" in condition.message for condition in pod.status.conditions] == [True]
        assert flow.wait(120) == 1, flow.text
        check_said(flow, "Waited 30 s, but node 1 of 2 did not arrive", "GangStartTimeout")
        check_said(flow, f"Kubernetes says of node 1's pod {pod.metadata.name}: Unschedulable: 0/1 nodes are")
        assert "can't begin" not in flow.text, flow.text
        assert flow.text.count(f"describe pods -l {label}") >= 2  # in the error, too
        cluster.await_gone(flow)
        assert "Waited 30 s, but node 1 of 2 did not arrive" in Seen(flow).show().splitlines()[2]


def test_a_pod_that_vanishes_is_named_at_once_and_afterwards(start_remote, cluster):
    """The API server deletes it without grace, the kubelet with 2 s, and the job starts another pod for the same task."""
    flow = start_remote(DO="*:talk", CARD=True, metadata="local", **cluster.on())
    # Of lines that come together, Metaflow's terminal shows one (2.19); the next with further output. On a busy machine
    # one node begins much later than the other.
    for rank in range(4):
        flow.await_line(f"[rank {rank}] word ")
    flow.await_line("] word 30")
    delete_pod(cluster, flow, 1, grace_s=0)
    deleted = time.time()
    assert flow.wait(150) == 1
    check_said(flow, "Node 1 (host")
    cluster.await_gone(flow)
    seen = Seen(flow)
    gang = check_failed(seen, cause="Node 1 (host ", states=["failed", "failed or lost"])
    assert gang["nodes"][0]["exit_codes"] == {"0": -15, "1": -15}
    told = next(event["time"] for event in gang["events"] if event["kind"] in {"lost", "failed"})
    assert told - deleted < limit_s(15), "a broken connection tells it, not the heartbeat's 30 s"
    for rank in range(2):  # those of ranks 2 and 3 are in the control node's log alone, since node 1 has a log again
        words = seen.words(rank)
        assert words
        assert words == list(range(len(words)))
    (page,) = seen.cards()  # though the pods have metadata of their own alone
    assert "Failed (trained " in page
    assert gang["nodes"][1]["host"] in page


def delete_pod(cluster, flow, node, grace_s) -> None:
    cluster.delete(next(pod for pod in cluster.await_pods(flow, 2) if cluster.node_of(pod) == node), grace_s)


@pytest.mark.minutes
@pytest.mark.timeout(600)
def test_a_gang_whose_pods_are_all_deleted_runs_once_an_attempt_and_its_record_stays(start_remote, cluster):
    """No task sees its pod's SIGTERM, and the replacements come when all are gone: nobody has told of the end."""
    blind = 'environment:vars={"TORCHRUN_POD_SHELL": "none"}'
    flow = start_remote("--with", blind, DO="*:talk-first", RETRY=True, **cluster.on())
    for rank in range(4):
        flow.await_line(f"[rank {rank}] word ", 200)
    seen = Seen(flow)
    while "go" not in [event["kind"] for event in seen.data()["events"]]:  # it is stored every ten seconds
        time.sleep(1.0)
    for pod in cluster.await_pods(flow, 2):
        cluster.delete(pod, 0)
    assert flow.wait(480) == 0, flow.text
    check_gang(flow, 2)
    assert [task["attempt"] for task in flow.gathered()] == [1, 1]
    cluster.await_gone(flow)
    first = seen.data("--attempt", "0")
    text = seen.show("--attempt", "0")
    assert re.match(r"Failed .*: The control node's pod", text.splitlines()[2]), text
    assert (first["outcome"], [node["state"] for node in first["nodes"]]) == ("failed", ["lost", "stopped"]), text
    # What Kubernetes says of a pod comes when it comes, also after the replacement's word.
    kinds = [event["kind"] for event in first["events"] if event["kind"] != "told"]
    joined = [node for event in first["events"] if event["kind"] == "joined" for node in event["nodes"]]
    assert (sorted(joined), kinds.count("go"), kinds[-1]) == ([0, 1], 1, "lost"), text
    assert seen.data()["outcome"] == "done"


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
    assert flow.wait(150) == 1
    check_said(flow, f"Node {node} (host", "was preempted: its pod got SIGTERM", "ranks 0, 1, 2, 3 exited with code 0")
    cluster.await_gone(flow)


def test_a_control_node_that_vanishes_while_its_results_are_stored_has_not_ended_well(start_remote, cluster):
    flow = start_remote(HOOK="slow-to-store:0", **cluster.on())
    flow.await_line("is being pickled", 240)
    delete_pod(cluster, flow, 0, grace_s=0)
    assert flow.wait(150) == 1
    seen = Seen(flow)
    assert seen.data()["outcome"] == "failed"
    check_said(flow, "The control node's pod")
    cluster.await_gone(flow)


@pytest.mark.minutes
def test_gangs_in_a_foreach_do_not_meet(run_remote, cluster):
    flow = run_remote(flow="remote_foreach.py", name="RemoteForeach", **cluster.on())
    check_said(flow, "SEEN a0/4 a1/4 b0/4 b1/4")
    cluster.await_gone(flow)
