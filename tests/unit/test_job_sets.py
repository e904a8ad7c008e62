"""The Jobs of a gang's pods, which bring a pod again."""

import pytest
from metaflow.plugins.kubernetes.kubernetes_jobsets import JobSetSpec

from metaflow_extensions.torchrun.plugins.torchrun.compat import job_sets


@pytest.fixture(autouse=True)
def dumped(monkeypatch):
    """Have Metaflow's method return no more than what becomes the backoffLimit; the whole of it needs Kubernetes' client."""
    monkeypatch.setattr(job_sets, "_steps", set())
    monkeypatch.setattr(JobSetSpec, "dump", lambda spec: spec._kwargs["retries"])


def limits(step):
    """Return the backoffLimit of the control node's Job, and of the others'."""
    return tuple(JobSetSpec(None, name=name, step_name=step, retries=0).dump() for name in ("control", "worker"))


def test_the_pods_of_a_step_come_again_but_the_control_nodes_does_not():
    assert limits("train-it") == (0, 0)
    job_sets.bring_pods_again("train_it")
    job_sets.bring_pods_again("other")
    assert limits("train-it") == limits("train_it") == limits("other") == (0, 30)
    assert limits("plain") == (0, 0)
