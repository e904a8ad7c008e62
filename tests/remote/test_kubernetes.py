"""Gangs on a Kubernetes cluster with JobSets."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes import client, config
from remote_flows import EXAMPLES, check_gang, check_said

GPU = "nvidia.com/gpu"
pytestmark = pytest.mark.kubernetes


class Cluster:
    """What a test asks the API server."""

    def __init__(self) -> None:
        config.load_kube_config()
        self.core = client.CoreV1Api()
        self.custom = client.CustomObjectsApi()
        self.namespace = os.environ.get("METAFLOW_KUBERNETES_NAMESPACE", "default")

    def pods(self, run: Any) -> list[Any]:
        """Return the pods of a run that are not gone, the control node's first."""
        found = self.core.list_namespaced_pod(self.namespace).items
        mine = [p for p in found if (p.metadata.annotations or {}).get("metaflow/run_id") == run.run_id]
        return sorted(mine, key=lambda pod: (self.node_of(pod), pod.metadata.name))

    @staticmethod
    def node_of(pod: Any) -> int:
        labels = pod.metadata.labels or {}
        role = labels.get("jobset.sigs.k8s.io/replicatedjob-name", "control")
        return 0 if role == "control" else 1 + int(labels["jobset.sigs.k8s.io/job-index"])

    def await_pods(self, run: Any, count: int, timeout_s: float = 120) -> list[Any]:
        """Wait until `count` pods of the run's gang are running."""
        deadline = time.monotonic() + timeout_s
        while True:
            running = [pod for pod in self.pods(run) if pod.status.phase == "Running"]
            if len(running) >= count:
                return running
            assert time.monotonic() < deadline, f"{len(running)} of {count} pods:\n{run.text}"
            time.sleep(0.3)

    def await_gone(self, run: Any, timeout_s: float = 20) -> None:
        """Wait until no pod of the run is running or about to."""
        deadline = time.monotonic() + timeout_s
        while left := [pod for pod in self.pods(run) if pod.status.phase in ("Pending", "Running")]:
            assert time.monotonic() < deadline, [pod.metadata.name for pod in left]
            time.sleep(0.3)


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def on_kubernetes(**attributes: Any) -> dict[str, Any]:
    return {"KUBERNETES": attributes}


# --- what runs ------------------------------------------------------------------------------------


def test_hello_unchanged(run_remote, cluster):
    flow = run_remote("--with", "kubernetes", "--nodes", "4", flow="flow.py", source=EXAMPLES / "hello")
    check_said(flow, "all-reduce over 8 ranks: ok")
    cluster.await_gone(flow)


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


def test_nodes_that_start_20_s_apart_meet_and_wait_for_each_others_ends(run_remote, cluster):
    flow = run_remote(LATE_S=20, HOOK="after:1:sleep:15", **on_kubernetes())
    check_gang(flow, 2)
    check_said(flow, "waiting until node 1 ended the step")
    cluster.await_gone(flow)


def test_a_function_and_its_values(run_remote, cluster):
    flow = run_remote(flow="remote_function.py", name="RemoteFunction", **on_kubernetes())
    check_said(flow, "VALUES 0/0/0 1/0/1 2/1/2 3/1/3")
    for node in (0, 1):
        check_said(flow, f"CAUGHT on node {node}: 'rank 3 misses a key' LaunchFailed raised by rank 3 on node 1 (host ")
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


class Requests(threading.Thread):
    """Notes what the containers of a run's pods request, while it runs."""

    def __init__(self, cluster: Cluster, run: Any) -> None:
        super().__init__(daemon=True)
        self.cluster, self.run_, self.gpus, self.over = cluster, run, {}, threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.5):
            with contextlib.suppress(FileNotFoundError):  # the run has no id yet
                for pod in self.cluster.pods(self.run_):
                    limits = pod.spec.containers[0].resources.limits or {}
                    self.gpus[pod.metadata.annotations["metaflow/step_name"]] = int(limits.get(GPU, "0"))


def run_and_note_requests(cluster, flow) -> dict[str, int]:
    """Wait for the end of a flow; return step -> GPUs that its submitted pods requested."""
    requests = Requests(cluster, flow)
    requests.start()
    try:
        assert flow.wait() == 0, flow.text
    finally:
        requests.over.set()
        requests.join(10)
    return requests.gpus


@pytest.mark.xdist_group("gpus")
def test_processes_per_node_are_the_requested_gpus(start_remote, cluster, gpus):
    """Checked on the pods that were submitted and on the processes that ran in them."""
    flow = start_remote(flow="remote_gpus.py", name="RemoteGpus", **on_kubernetes())
    requested = run_and_note_requests(cluster, flow)
    assert requested == {"plain": 4, "merged": 2, "other": 8, "none": 0}
    found = json.loads(next(line.text for line in flow.lines if "FOUND " in line.text).split("FOUND ", 1)[1])
    assert found == {"plain": [4, 4], "merged": [2, 2], "other": [8, 8], "none": [1, 1]}


@pytest.mark.xdist_group("gpus")
def test_gpus_requested_on_the_command_line_count(start_remote, cluster, gpus):
    flow = start_remote("--with", "kubernetes:gpu=2", NODES=2, RUN={})
    requested = run_and_note_requests(cluster, flow)
    assert requested["train"] == 2
    assert [task["nproc"] for task in flow.gathered()] == [2, 2]
    check_gang(flow, 2, nproc=2)
    check_said(flow, "processes per node: 2 (@kubernetes requests gpu=2)")


# --- what fails -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("do", "expected"),
    [
        pytest.param("0:raise", ["Rank 0 on node 0", "ValueError: bad loss on rank 0"], id="control-node"),
        pytest.param("1:raise,3:raise", ["on node ", "ValueError: bad loss on rank "], id="both"),
    ],
)
def test_a_failing_worker_is_named_in_the_control_nodes_log(run_remote, cluster, do, expected):
    flow = run_remote(expect=1, do=f"{do},*:sleep", **on_kubernetes())
    check_said(flow, *expected)
    cluster.await_gone(flow)


def test_out_of_memory_is_said(run_remote, cluster):
    """Guaranteed quality of service is what sets a memory limit (Metaflow 2.19)."""
    flow = run_remote(expect=1, do="3:oom,*:sleep", **on_kubernetes(memory=900, cpu=0.25, qos="Guaranteed"))
    check_said(flow, "Rank 3 on node 1", "ran out of memory: the node's memory limit of 858.3 MiB was reached")
    cluster.await_gone(flow)


@pytest.mark.parametrize("how", ["wiped", "deleted"])
def test_a_pod_that_vanishes_is_named(start_remote, cluster, how):
    """All its processes are killed at once, or the API server deletes it without grace."""
    flow = start_remote(do="3:nap,3:wipe,*:sleep" if how == "wiped" else "*:sleep", **on_kubernetes())
    # Of lines that come together, Metaflow's terminal shows one (2.19); the next with further output.
    flow.await_line(" of 4 runs")
    if how == "deleted":
        pods = cluster.await_pods(flow, 2)
        victim = next(pod for pod in pods if cluster.node_of(pod) == 1)
        cluster.core.delete_namespaced_pod(victim.metadata.name, cluster.namespace, grace_period_seconds=0)
    begin = time.monotonic()
    assert flow.wait(60) == 1
    assert time.monotonic() - begin < 40
    check_said(flow, "Node 1 (host")
    cluster.await_gone(flow)


def test_a_spot_notice_stops_the_gang_in_time(run_remote, cluster):
    flow = run_remote(expect=1, HOOK="before:1:spot", do="*:sleep", **on_kubernetes())
    check_said(flow, "Node 1 (host", "was preempted: a spot notice says", "2026-11-21T10:00:00Z")
    cluster.await_gone(flow)


@pytest.mark.parametrize("node", [1, 0])
def test_a_pod_that_is_deleted_with_some_grace_lets_all_ranks_save(start_remote, cluster, node):
    """As a drain does it; the kubelet's SIGTERM reaches nothing but process 1, a shell of Metaflow's."""
    flow = start_remote(do="*:save", **on_kubernetes())
    flow.await_line(" of 4 runs")
    victim = next(pod for pod in cluster.await_pods(flow, 2) if cluster.node_of(pod) == node)
    cluster.core.delete_namespaced_pod(victim.metadata.name, cluster.namespace, grace_period_seconds=30)
    assert flow.wait(60) == 1
    check_said(flow, f"Node {node} (host", "was preempted: its pod got SIGTERM", "code 0 in time: 0, 1, 2, 3")
    cluster.await_gone(flow)


@pytest.mark.parametrize("node", [1, 0])
def test_a_pod_that_is_replaced_lets_all_ranks_save(start_remote, cluster, node):
    """Where the task can't see its pod's SIGTERM, the task that comes to replace it tells."""
    blind = 'environment:vars={"TORCHRUN_POD_SHELL": "none"}'
    flow = start_remote("--with", blind, do="*:save", **on_kubernetes())
    flow.await_line(" of 4 runs")
    victim = next(pod for pod in cluster.await_pods(flow, 2) if cluster.node_of(pod) == node)
    cluster.core.delete_namespaced_pod(victim.metadata.name, cluster.namespace, grace_period_seconds=60)
    assert flow.wait(90) == 1
    check_said(flow, f"node {node} (host", "is being replaced", f"Node {node} (host", "code 0 in time: 0, 1, 2, 3")
    cluster.await_gone(flow)


@pytest.mark.parametrize("how", ["ctrl-c", "sigterm", "sigterm-to-all"])
def test_an_interrupted_run_leaves_no_pod(start_remote, cluster, how):
    """Schedulers send SIGTERM to the run alone; `timeout` and systemd to all its processes."""
    flow = start_remote(do="*:sleep", **on_kubernetes())
    # Of lines that come together, Metaflow's terminal shows one (2.19); the next with further output.
    flow.await_line(" of 4 runs")
    cluster.await_pods(flow, 2)
    if how == "sigterm":
        flow.process.terminate()
    else:
        os.killpg(flow.process.pid, signal.SIGINT if how == "ctrl-c" else signal.SIGTERM)
    assert flow.wait(60) == 1
    cluster.await_gone(flow)


# --- again ----------------------------------------------------------------------------------------


def test_retry_brings_a_new_gang(run_remote, cluster):
    flow = run_remote(do="3:kill-first", RETRY=True, **on_kubernetes())
    check_gang(flow, 2)
    assert [task["attempt"] for task in flow.gathered()] == [1, 1]
    check_said(flow, "Rank 3 on node 1", "killed by SIGKILL")
    cluster.await_gone(flow)


def test_resume_runs_the_gang_again(run_remote, cluster):
    failed = run_remote(expect=1, do="3:raise,*:sleep", **on_kubernetes())
    check_said(failed, "Rank 3 on node 1", "ValueError: bad loss on rank 3")
    cluster.await_gone(failed)
    plan = failed.folder / "plan.py"
    plan.write_text(plan.read_text().replace("3:raise,*:sleep", ""))
    resumed = run_remote(command="resume", folder=failed.folder)
    check_gang(resumed, 2)
    cluster.await_gone(resumed)


def test_gangs_in_a_foreach_do_not_meet(run_remote, cluster):
    flow = run_remote(flow="remote_foreach.py", name="RemoteForeach", **on_kubernetes())
    check_said(flow, "SEEN a0/4 a1/4 b0/4 b1/4")
    cluster.await_gone(flow)
