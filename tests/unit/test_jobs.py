"""What the process that looks after a job on Kubernetes tells of its end, and the job sets that it makes."""

import json
from types import SimpleNamespace

import pytest
from gang_views import Story
from metaflow.datastore import FlowDataStore
from metaflow.plugins.datastores.local_storage import LocalStorage
from metaflow.plugins.kubernetes import kubernetes
from metaflow.plugins.kubernetes.kubernetes_jobsets import JobSetSpec, KubernetesArgoJobSet, KubernetesJobSet
from test_registry import KNOWN

from metaflow_extensions.torchrun.plugins.torchrun.compat import jobs
from metaflow_extensions.torchrun.plugins.torchrun.registry import Registry
from metaflow_extensions.torchrun.plugins.torchrun.submit.jobs import Job

WHERE = ["--run-id", "7", "--task-id", "3", "--num-parallel", "2", "--retry-count"]
LEFT = Story().running().crashed().left(how="failed").view


@pytest.fixture
def datastore(tmp_path):
    return FlowDataStore("GangFlow", storage_impl=LocalStorage, ds_root=str(tmp_path))


@pytest.fixture
def registry(datastore):
    registry = Registry(datastore, "7", "train", "3", 1)
    registry.save_view(KNOWN)
    return registry


def job_of(datastore, attempt=1):
    return Job(datastore, "train", ["flow.py", "kubernetes", "step", "train", *WHERE, str(attempt)])


@pytest.fixture
def job(datastore):
    return job_of(datastore)


def condition(kind, reason=None, message=None, status="True"):
    return SimpleNamespace(type=kind, reason=reason, message=message, status=status)


def pod(
    node, name, ended=None, waits=None, before=None, reason=None, message=None, disruption=None, unschedulable=None
):
    """Return a pod; `ended` and `before` are the end of its container, and of the one before it, as reason and code."""

    def state(end=None, waits=None):
        terminated = end and SimpleNamespace(reason=end[0], exit_code=end[1])
        waiting = waits and SimpleNamespace(reason=waits, message="no such image" if waits == "ErrImagePull" else None)
        return SimpleNamespace(terminated=terminated, waiting=waiting, running=None)

    labels = {"jobset.sigs.k8s.io/replicatedjob-name": "control" if node == 0 else "worker"}
    labels["jobset.sigs.k8s.io/job-index"] = str(max(0, node - 1))
    container = SimpleNamespace(state=state(ended, waits), last_state=state(before))
    no_place = unschedulable and ("Unschedulable", unschedulable)
    conditions = [condition("PodScheduled", *no_place, status="False") if no_place else condition("PodScheduled")]
    conditions += [condition("DisruptionTarget", *disruption)] if disruption else []
    containers = [container] if ended or waits or before else []
    phase = "Pending" if unschedulable or (waits and not before) else "Running"
    status = SimpleNamespace(
        reason=reason, message=message, conditions=conditions, container_statuses=containers, phase=phase
    )
    return SimpleNamespace(metadata=SimpleNamespace(name=name, labels=labels), status=status)


class Pods:
    """Answers as a `RunningJobSet` and what it reaches of the cluster."""

    def __init__(self, *pods):
        self._name, self._namespace, self._jobset = "js", "ns 🙂", {}
        self._client, self.items = self, list(pods)

    def get(self):
        return self

    def CoreV1Api(self):  # noqa: N802
        return self

    def list_namespaced_pod(self, namespace, label_selector, _request_timeout):
        assert (namespace, label_selector) == ("ns 🙂", "jobset.sigs.k8s.io/jobset-name=js")
        assert _request_timeout < 60
        return self


def failing(found):
    """Return the error of Metaflow's object that waits for the job, with another one in its way (`_sync_metadata`)."""

    class Metaflows(kubernetes.Kubernetes):
        def __init__(self):
            self._job = found

        def wait(self):
            try:
                raise RuntimeError("Task crashed")
            finally:
                raise KeyError("no completed attempts")

    Metaflows.__name__ = "Kubernetes"
    with pytest.raises(KeyError) as info:
        Metaflows().wait()
    return info.value


ERROR, OOM, KILLED = ("Error", 1), ("OOMKilled", 137), ("Error", 137)


def test_a_control_node_without_memory_is_named_and_its_record_gets_that_end(job, registry):
    said = job.tell(failing(Pods(pod(0, "c-1", OOM), pod(1, "w-1", ERROR))))
    stored = registry.load_view()
    assert said == f"[torchrun] {stored.error}\n"
    assert all(words in said for words in ("control node's pod c-1", "OOMKilled (exit code 137)"))
    assert stored.outcome == "failed"


def test_another_node_without_memory_is_named_and_what_the_control_node_has_told_stays(job, registry):
    registry.save_view(LEFT)
    said = job.tell(failing(Pods(pod(0, "c-1", ERROR), pod(1, "w-1", OOM))))
    assert said.endswith("node 1's pod w-1: OOMKilled (exit code 137)\n")
    stored = registry.load_view()
    last = stored.events.pop()
    assert (stored, last.kind, f"[torchrun] {last.text}\n") == (LEFT, "told", said)
    assert job.tell(failing(Pods(pod(0, "c-1", ERROR)))) == "", "that is the program's own end"


STARTS, VANISHED = "did not start", "it was deleted, evicted or killed, or its memory ran out"
EARLY = "failed before it had joined its gang (exit code {})"


@pytest.mark.parametrize(
    ("pods", "joined", "not_joined"),
    [
        ([pod(0, "c-2", before=ERROR)], VANISHED, VANISHED),
        ([], VANISHED, VANISHED),
        ([pod(0, "c-1", KILLED)], "unexpectedly: exit code 137", EARLY.format(137)),
        ([pod(0, "c-1", ERROR)], "unexpectedly: exit code 1", EARLY.format(1)),
        ([pod(0, "c-1", reason="Evicted", message="no disk")], "Evicted: no disk.", "unexpectedly: Evicted: no disk."),
        ([pod(0, "c-1", disruption=("Preempted", "by x"))], "unexpectedly: Preempted: by x.", "Preempted: by x."),
        (
            [pod(0, "c-1", waits="ErrImagePull")],
            "unexpectedly: it waits: ErrImagePull: no",
            f"{STARTS}: it waits: ErrIm",
        ),
        (
            [pod(0, "c-1", KILLED, reason="DeadlineExceeded", message="active for too long")],
            "too long (the limit is the step's @timeout",
            "too long (the limit is the step's @timeout",
        ),
        ([pod(0, "c-1", waits="PodInitializing")], VANISHED, f"{STARTS}: Kubernetes has nothing of it"),
        ([pod(0, "c-1", waits="CrashLoopBackOff", before=OOM)], "OOMKilled (exit code 137)", "unexpectedly: it waits"),
    ],
)
def test_what_the_cluster_knows_of_a_control_node_that_is_gone(datastore, pods, joined, not_joined):
    for attempt, known in enumerate((None, KNOWN)):
        registry = Registry(datastore, "7", "train", "3", attempt)
        if known is not None:
            registry.save_view(known)
        job_of(datastore, attempt).tell(failing(Pods(*pods)))
        stored = registry.load_view()
        said = stored.error.partition("\n")[0]
        assert (not_joined if known is None else joined) in said
        is_own_fault = STARTS in said or "failed before" in said
        assert stored.reports[-1].error == ("GangError" if is_own_fault else "TorchrunPreempted")
    assert f"The control node's {f'pod {pods[0].metadata.name}' if pods else 'task'} ended" in said


class Waiting:
    """A process whose main thread waits for a job, as ours does that looks after one."""

    def __init__(self, pods):
        self._job = pods

    def look(self, pending, *pods):
        self._job.items = list(pods)
        return pending.look()


Waiting.__name__ = "Kubernetes"


def test_what_keeps_a_pod_from_starting_is_said_once_it_stays_and_known_when_the_pod_is_gone(job, registry):
    waiting, pending = Waiting(Pods()), job
    here, pulls = pod(0, "c-1"), pod(1, "w-1", waits="ErrImagePull")
    starts, no_place = pod(2, "w-2", waits="ContainerCreating"), pod(2, "w-2", unschedulable="0/1 nodes are available")
    assert waiting.look(pending, here, pulls, starts) == "", "it may come"
    said = "[torchrun] Kubernetes says of node 1's pod w-1: it waits: ErrImagePull: no such image\n"
    assert waiting.look(pending, here, pulls, no_place) == said
    place = "[torchrun] Kubernetes says of node 2's pod w-2: Unschedulable: 0/1 nodes are available\n"
    assert waiting.look(pending, here, pulls, no_place) == place
    assert waiting.look(pending, here, pulls, pod(2, "w-2")) == ""
    assert waiting.look(pending) == ""
    registry.save_view(LEFT)
    assert job.tell(failing(Pods())) == said, "that of node 2 has come"


# --- the job sets that a process makes ----------------------------------------------------------------


@pytest.fixture
def dumped(monkeypatch):
    """Have Metaflow's method return no more than what becomes the backoffLimit; the whole of it needs Kubernetes' client."""
    monkeypatch.setattr(jobs, "_steps", set())
    monkeypatch.setattr(JobSetSpec, "dump", lambda spec: spec._kwargs["retries"])
    monkeypatch.setattr(KubernetesJobSet, "dump", lambda job_set: {"spec": {"successPolicy": None}})
    monkeypatch.setattr(KubernetesArgoJobSet, "dump", lambda job_set: "spec:\n  successPolicy: null\n")


def job_set(cls, step):
    """Return the backoffLimits of the control node's Job and of the others', and the success policy of the job set."""
    made = cls.__new__(cls)
    specs = [JobSetSpec(None, name=name, step_name=step, retries=0) for name in ("control", "worker")]
    made._worker_spec = specs[1]
    dumped = made.dump()
    policy = dumped["spec"]["successPolicy"] if cls is KubernetesJobSet else json.loads(dumped.split(": ", 1)[1])
    return *(spec.dump() for spec in specs), policy


@pytest.mark.usefixtures("dumped")
@pytest.mark.parametrize("cls", [KubernetesJobSet, KubernetesArgoJobSet])
def test_the_pods_of_a_step_come_again_but_the_control_nodes_does_not_and_ends_the_job_set(cls):
    assert job_set(cls, "train-it") == (0, 0, None)
    jobs.bring_pods_again("train_it")
    jobs.bring_pods_again("other")
    ours = (0, 30, {"operator": "Any", "targetReplicatedJobs": ["control"]})
    assert [job_set(cls, step) for step in ("train-it", "train_it", "other")] == [ours] * 3
    assert job_set(cls, "plain") == (0, 0, None)
