"""The backends that gangs run on, as far as tests ask them."""

from __future__ import annotations

import os
import re
from typing import Any

import boto3
from kubernetes import client, config
from limits import eventually

# As Metaflow (2.19) prints it: "... [JOB] Task is starting (status SUBMITTED)..."
JOB_LINE = re.compile(r"\[([0-9a-f-]{36})\] Task is starting")
ACTIVE = ("SUBMITTED", "PENDING", "RUNNABLE", "STARTING", "RUNNING")


class Cluster:
    """Kubernetes, and what a test asks its API server."""

    name = "kubernetes"
    # Guaranteed quality of service is what sets a memory limit (Metaflow 2.19).
    small, small_is = {"memory": 900, "cpu": 0.25, "qos": "Guaranteed"}, "858.3 MiB"

    def __init__(self) -> None:
        config.load_kube_config()
        self.core = client.CoreV1Api()
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

    def await_pods(self, run: Any, count: int) -> list[Any]:
        """Wait until `count` pods of the run's gang are running."""

        def running() -> list[Any]:
            found = [pod for pod in self.pods(run) if pod.status.phase == "Running"]
            return found if len(found) >= count else []

        return eventually(running, lambda: f"{count} pods:\n{run.text}", 120)

    def delete(self, pod: Any, grace_s: int = 30) -> None:
        self.core.delete_namespaced_pod(pod.metadata.name, self.namespace, grace_period_seconds=grace_s)

    def await_gone(self, run: Any) -> None:
        """Wait until no pod of the run is running or about to."""

        def left() -> list[str]:
            return [pod.metadata.name for pod in self.pods(run) if pod.status.phase in ("Pending", "Running")]

        eventually(lambda: not left(), lambda: f"the end of {left()}", 20)

    @staticmethod
    def on(**attributes: Any) -> dict[str, Any]:
        """Return the part of a plan that sends the gang here, with the attributes of ``@kubernetes``."""
        return {"KUBERNETES": attributes}


class Queue:
    """AWS Batch, and what a test asks it."""

    name = "batch"
    small, small_is = {"memory": 900}, "900 MiB"

    def __init__(self) -> None:
        self.client = boto3.client("batch")

    def jobs(self, run: Any, states: tuple[str, ...] = (*ACTIVE, "SUCCEEDED", "FAILED")) -> list[dict[str, Any]]:
        """Return the jobs of a run, described; Metaflow tells their ids in its output."""
        ids = {found[1] for line in run.lines if (found := JOB_LINE.search(line.text))}
        assert ids, f"no job was submitted:\n{run.text}"
        found: list[dict[str, Any]] = self.client.describe_jobs(jobs=sorted(ids))["jobs"]
        return [job for job in found if job["status"] in states]

    def await_gone(self, run: Any) -> None:
        """Wait until no job of the run is active."""
        eventually(lambda: not self.jobs(run, ACTIVE), lambda: f"the end of {self.jobs(run, ACTIVE)}", 60)

    @staticmethod
    def on(**attributes: Any) -> dict[str, Any]:
        """Return the part of a plan that sends the gang here, with the attributes of ``@batch``."""
        return {"BATCH": attributes}
