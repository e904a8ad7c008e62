"""The Jobs of a gang's pods, which bring a pod again, and the job set, which ends with the control node."""

import json

import pytest
from metaflow.plugins.kubernetes.kubernetes_jobsets import JobSetSpec, KubernetesArgoJobSet, KubernetesJobSet

from metaflow_extensions.torchrun.plugins.torchrun.compat import job_sets


@pytest.fixture(autouse=True)
def dumped(monkeypatch):
    """Have Metaflow's method return no more than what becomes the backoffLimit; the whole of it needs Kubernetes' client."""
    monkeypatch.setattr(job_sets, "_steps", set())
    monkeypatch.setattr(JobSetSpec, "dump", lambda spec: spec._kwargs["retries"])
    monkeypatch.setattr(KubernetesJobSet, "dump", lambda job_set: {"spec": {"successPolicy": None}})
    monkeypatch.setattr(KubernetesArgoJobSet, "dump", lambda job_set: "spec:\n  successPolicy: null\n")


def limits(step):
    """Return the backoffLimit of the control node's Job, and of the others'."""
    return tuple(JobSetSpec(None, name=name, step_name=step, retries=0).dump() for name in ("control", "worker"))


def test_the_pods_of_a_step_come_again_but_the_control_nodes_does_not():
    assert limits("train-it") == (0, 0)
    job_sets.bring_pods_again("train_it")
    job_sets.bring_pods_again("other")
    assert limits("train-it") == limits("train_it") == limits("other") == (0, 30)
    assert limits("plain") == (0, 0)


def policy(cls, step):
    """Return the success policy of a job set."""
    job_set = cls.__new__(cls)
    job_set._worker_spec = JobSetSpec(None, name="worker", step_name=step)
    dumped = job_set.dump()
    return dumped["spec"]["successPolicy"] if cls is KubernetesJobSet else json.loads(dumped.split(": ", 1)[1])


@pytest.mark.parametrize("cls", [KubernetesJobSet, KubernetesArgoJobSet])
def test_the_job_set_of_such_a_step_ends_with_its_control_node(cls):
    job_sets.bring_pods_again("train_it")
    assert policy(cls, "train-it") == {"operator": "Any", "targetReplicatedJobs": ["control"]}
    assert policy(cls, "plain") is None
