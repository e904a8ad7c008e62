"""The Jobs of a gang's pods, which bring a pod again."""

import pytest
import yaml
from kubernetes import client
from metaflow.plugins.kubernetes.kubernetes_jobsets import JobSetSpec, KubernetesArgoJobSet

from metaflow_extensions.torchrun.plugins.torchrun.compat import job_sets

# What a job set is made of, as far as this test does not say it.
NAMES = """use_tmpfs tmpfs_size shared_memory disk gpu gpu_vendor image image_pull_policy image_pull_secrets service_account
node_selector tolerations persistent_volume_claims port timeout_in_seconds subdomain"""
ABOUT = dict.fromkeys(NAMES.split())


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    monkeypatch.setattr(job_sets, "_steps", {})
    monkeypatch.setattr(JobSetSpec, "dump", JobSetSpec.dump)


def limits(step):
    """Return the backoffLimit of the control node's Job, and of the others'."""
    about = {**ABOUT, "cpu": "1", "memory": "1", "disk": "1", "qos": "Burstable", "command": ["true"]}
    made = KubernetesArgoJobSet(client, name="js", namespace="default", step_name=step, **about)
    for spec in (made.control, made.worker):
        spec.replicas(1)
    jobs = {each["name"]: each["template"]["spec"] for each in yaml.safe_load(made.dump())["spec"]["replicatedJobs"]}
    return jobs["control"]["backoffLimit"], jobs["worker"]["backoffLimit"]


def test_the_pods_of_a_step_come_again_but_the_control_nodes_does_not():
    assert limits("train-it") == (0, 0)
    job_sets.bring_pods_again("train_it", 3)
    job_sets.bring_pods_again("other", 9)
    assert limits("train-it") == limits("train_it") == (0, 6)
    assert limits("other") == (0, 9)
    assert limits("plain") == (0, 0)
