"""A gang in a workflow that Metaflow makes for Argo Workflows, run on a Kubernetes cluster with JobSets.

Argo Workflows itself is not needed: `Workflow` stands in for its controller. It fills in the templates, creates what
they describe, waits, takes the outputs over, and retries.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from kubernetes import client, config
from limits import eventually
from metaflow.datastore import FlowDataStore
from metaflow.mflog import TASK_LOG_SOURCE
from metaflow.plugins import DATASTORES

pytestmark = pytest.mark.kubernetes

FLOWS = Path(__file__).parent / "flows"
LIMIT_S = 180.0  # for any one pod or JobSet
JOBSETS = {"group": "jobset.x-k8s.io", "version": "v1alpha2", "plural": "jobsets"}
# Argo takes output parameters from files of an ended container; here it prints them as its last words.
TELL_OUTPUTS = '"$@"; c=$?; for f in /mnt/out/*; do echo "OUTPUT $(basename $f)=$(cat $f)"; done; exit $c'


class Parameters(dict):  # type: ignore[type-arg]
    """Parameters as Argo's expressions name them: ``parameters.workerCount`` and ``parameters['num-parallel']``."""

    __getattr__ = dict.__getitem__


def fill(value: Any, names: dict[str, Any]) -> Any:
    """Fill in Argo's ``{{name}}`` and ``{{=expression}}`` everywhere in `value`; an unknown name is an error.

    ``{{retries}}`` stays until it is known, since Metaflow hands it on as a parameter's value.
    """
    if isinstance(value, dict):
        return {key: fill(item, names) for key, item in value.items()}
    if isinstance(value, list):
        return [fill(item, names) for item in value]
    if not isinstance(value, str):
        return value

    def one(match: re.Match[str]) -> str:
        word = match[1].strip()
        if word.startswith("="):
            return str(_evaluate(word[1:], names))
        if word == "retries" and word not in names:
            return match[0]
        assert word in names, f"the workflow names {word!r}, but only {sorted(names)} are known"
        return str(names[word])

    return re.sub(r"\{\{(.*?)\}\}", one, value)


def _evaluate(expression: str, names: dict[str, Any]) -> Any:
    known: dict[str, Any] = {
        "asInt": int,
        "toBase64": lambda text: base64.b64encode(text.encode()).decode(),
        "sprig": SimpleNamespace(int=int, sub=lambda a, b: a - b),
    }
    for scope in ("inputs", "workflow"):
        prefix = f"{scope}.parameters."
        found = {name.removeprefix(prefix): value for name, value in names.items() if name.startswith(prefix)}
        known[scope] = SimpleNamespace(parameters=Parameters(found))
    return eval(expression, {"__builtins__": {}}, known)


@dataclass
class Gang:
    """One JobSet that the workflow made: one attempt of a gang."""

    name: str
    entropy: str
    state: str = ""


class Workflow:
    """Runs a workflow template as Argo's controller does, as far as Metaflow's templates need it."""

    def __init__(self, template: dict[str, Any], nodes: int) -> None:
        config.load_kube_config()
        self.core, self.custom = client.CoreV1Api(), client.CustomObjectsApi()
        self.name, self.namespace = (
            f"{template['metadata']['name']}-{uuid.uuid4().hex[:5]}",
            template["metadata"]["namespace"],
        )
        self.run_id, self.spec = f"argo-{self.name}", template["spec"]
        self.templates = {entry["name"]: entry for entry in self.spec["templates"]}
        self.names: dict[str, Any] = {
            "workflow.name": self.name,
            "workflow.creationTimestamp": datetime.now(timezone.utc).isoformat(),
            **{f"workflow.parameters.{each['name']}": each["value"] for each in self.spec["arguments"]["parameters"]},
            "workflow.parameters.nodes": str(nodes),
        }
        self.pods: list[str] = []
        self.gangs: list[Gang] = []

    def run(self) -> dict[str, str]:
        """Run everything; return the outputs of all tasks by their names."""
        return self._run_dag(self.templates[self.spec["entrypoint"]], {})

    def _run_template(self, name: str, arguments: dict[str, str]) -> dict[str, str]:
        template = self.templates[name]
        declared = {entry["name"] for entry in (template.get("inputs") or {}).get("parameters") or []}
        attempts = 1 + (template.get("retryStrategy") or {}).get("limit", 0)
        for attempt in range(attempts):
            known = {**self.names, **({"retries": attempt} if "retryStrategy" in template else {})}
            values = {key: value for key, value in arguments.items() if key in declared}
            assert declared == set(values), f"{name} needs {declared}, but is given {set(values)}"
            known |= {f"inputs.parameters.{key}": fill(value, known) for key, value in values.items()}
            if "dag" in template:
                return self._run_dag(template, known)
            run = self._run_container if "container" in template else self._run_jobset
            outputs = run(template, known, last=attempt == attempts - 1)
            if outputs is not None:
                return outputs
        raise AssertionError(f"{name} failed, and no attempt is left")

    def _run_dag(self, template: dict[str, Any], names: dict[str, Any]) -> dict[str, str]:
        known = {**self.names, **names}
        waiting = list(template["dag"]["tasks"])
        done: set[str] = set()
        while waiting:
            task = next(entry for entry in waiting if set(_needed(entry)) <= done)
            waiting.remove(task)
            items = json.loads(fill(task["withParam"], known)) if "withParam" in task else [None]
            assert len(items) == 1, f"{task['name']} fans out to {items}: not imitated"
            scope = {**known, "item": items[0]}
            arguments = {entry["name"]: fill(entry["value"], scope) for entry in task["arguments"]["parameters"]}
            outputs = self._run_template(task["template"], arguments)
            known |= {f"tasks.{task['name']}.outputs.parameters.{key}": value for key, value in outputs.items()}
            done.add(task["name"])
        self.names |= {name: value for name, value in known.items() if name.startswith("tasks.")}
        wanted = (template.get("outputs") or {}).get("parameters") or []
        return {entry["name"]: fill(entry["valueFrom"]["parameter"], known) for entry in wanted}

    def _run_container(self, template: dict[str, Any], names: dict[str, Any], last: bool) -> dict[str, str] | None:
        filled = fill(template, names)
        name = f"{self.name}-{filled['name']}"
        container = filled["container"]
        container["command"] = ["bash", "-c", TELL_OUTPUTS, "--", *container["command"]]
        keys = ("volumes", "nodeSelector", "tolerations", "serviceAccountName", "activeDeadlineSeconds")
        spec = {"containers": [container], "restartPolicy": "Never", **{key: filled[key] for key in keys}}
        self.core.create_namespaced_pod(
            self.namespace, {"metadata": {"name": name, **filled["metadata"]}, "spec": spec}
        )
        self.pods.append(name)
        phase = eventually(lambda: self._phase(name), self._shown, LIMIT_S)
        log = self.core.read_namespaced_pod_log(name, self.namespace)
        if phase != "Succeeded":
            assert not last, f"{name}: {phase}\n{log}"
            return None
        told = dict(line[7:].split("=", 1) for line in log.splitlines() if line.startswith("OUTPUT "))
        wanted = (filled.get("outputs") or {}).get("parameters") or []
        return {entry["name"]: told[os.path.basename(entry["valueFrom"]["path"])] for entry in wanted}

    def _phase(self, name: str) -> str | None:
        phase: str = self.core.read_namespaced_pod_status(name, self.namespace).status.phase
        return phase if phase in ("Succeeded", "Failed") else None

    def _run_jobset(self, template: dict[str, Any], names: dict[str, Any], last: bool) -> dict[str, str] | None:
        resource = fill(template["resource"], names)
        assert resource["action"] == "create"
        manifest = yaml.safe_load(resource["manifest"])
        gang = Gang(manifest["metadata"]["name"], manifest["metadata"]["labels"]["task_id_entropy"])
        self.gangs.append(gang)
        self.custom.create_namespaced_custom_object(namespace=self.namespace, body=manifest, **JOBSETS)
        ended = eventually(lambda: self._ended(gang), self._shown, LIMIT_S)
        assert ended
        gang.state = ended["status"]["terminalState"]
        if resource["successCondition"] != f"status.terminalState == {gang.state}":
            assert not last, f"{gang.name}: {gang.state}\n{self.logs(gang)}"
            return None
        labels = ended["metadata"]["labels"]
        wanted = (template.get("outputs") or {}).get("parameters") or []
        paths = {entry["name"]: entry["valueFrom"]["jsonPath"] for entry in wanted}
        return {key: labels[path.strip("{}").removeprefix(".metadata.labels.")] for key, path in paths.items()}

    def _ended(self, gang: Gang) -> dict[str, Any] | None:
        found = self.custom.get_namespaced_custom_object(namespace=self.namespace, name=gang.name, **JOBSETS)
        return found if (found.get("status") or {}).get("terminalState") else None

    def logs(self, gang: Gang) -> str:
        """Return what the pods of a gang have written that are still known."""
        of_gang = f"jobset.sigs.k8s.io/jobset-name={gang.name}"
        pods = self.core.list_namespaced_pod(self.namespace, label_selector=of_gang).items
        return "\n".join(self.core.read_namespaced_pod_log(pod.metadata.name, self.namespace) for pod in pods)

    def _shown(self) -> str:
        pods = self.core.list_namespaced_pod(self.namespace).items
        mine = [pod for pod in pods if self.name in str(pod.metadata.annotations) or pod.metadata.name in self.pods]
        return "\n".join(f"{pod.metadata.name}: {pod.status.phase}, {pod.status.conditions}" for pod in mine)

    def remove(self) -> None:
        """Take everything back."""
        for gang in self.gangs:
            _unless_gone(
                self.custom.delete_namespaced_custom_object,
                namespace=self.namespace,
                name=gang.name,
                propagation_policy="Foreground",
                **JOBSETS,
            )
        for name in self.pods:
            _unless_gone(self.core.delete_namespaced_pod, name, self.namespace, grace_period_seconds=0)


def _needed(task: dict[str, Any]) -> list[str]:
    depends = task.get("depends") or ""
    assert re.fullmatch(r"(\S+\.Succeeded( && )?)*", depends), f"depends: {depends!r} is not imitated"
    return [word.removesuffix(".Succeeded") for word in depends.split(" && ") if word]


def _unless_gone(delete: Any, *arguments: Any, **options: Any) -> None:
    try:
        delete(*arguments, **options)
    except client.ApiException as error:
        if error.status != 404:
            raise


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the workflow template of the flow."""
    folder = tmp_path_factory.mktemp("argo")
    for name in ("remote_argo.py", "worker.py"):
        shutil.copy(FLOWS / name, folder)
    made = subprocess.run(
        [sys.executable, "remote_argo.py", "--no-pylint", "argo-workflows", "create", "--only-json"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    read: dict[str, Any] = json.loads(made.stdout.replace("__PLACEHOLDER_PRODUCTION_TOKEN__", "torchrun-test"))
    return read


@pytest.fixture
def workflow(template: dict[str, Any]) -> Iterator[Workflow]:
    running = Workflow(template, nodes=3)
    yield running
    running.remove()


def test_a_workflow_runs_with_a_retry_by_argo(workflow):
    outputs = workflow.run()
    assert [gang.state for gang in workflow.gangs] == ["Failed", "Completed"]
    first, second = workflow.gangs
    assert first.name != second.name
    store = _datastore()
    joined = store.get_task_datastore(workflow.run_id, "join", workflow.names["tasks.join.outputs.parameters.task-id"])
    (other,) = [node for node, _, took_part in joined["seen"] if took_part and node]  # of the two that may be the spare
    assert joined["seen"] == [(0, 1, True), *((each, 1, each == other) for each in (1, 2))], "the spare's has no result"
    assert outputs == {}

    tasks = [f"control-{second.entropy}-0", f"worker-{second.entropy}-{other - 1}"]
    for node, task_id in zip((0, other), tasks, strict=True):
        stored = store.get_task_datastore(workflow.run_id, "train", task_id)
        assert (stored["node"], stored["attempt"], stored["control_task_id"]) == (node, 1, tasks[0])
        assert stored["result"].world_size == 4
        assert stored["result"].exit_codes == ({2: 0, 3: 0} if node else {0: 0, 1: 0})
    said = workflow.logs(second)
    for rank in range(4):
        assert f"[rank {rank}] rank {rank} of 4 runs" in said

    records = [_address_record(store, workflow.run_id, tasks[0], attempt) for attempt in (0, 1)]
    assert records[0]["token"] != records[1]["token"]
    # The JobSet ends the other pods with the first that ends, so only that one's log is surely stored.
    logs = "".join(_stored_log(store, workflow.run_id, task_id, 0) for task_id in tasks)
    assert "Rank 3 on node " in logs
    assert "killed by SIGKILL" in logs


def _datastore() -> Any:
    """Return the flow's datastore, as the environment names it: a workflow's runs are unknown to Metaflow's client here."""
    wanted = os.environ.get("METAFLOW_DEFAULT_DATASTORE", "s3")
    storage = next(storage for storage in DATASTORES if wanted == storage.TYPE)
    return FlowDataStore(
        "RemoteArgo", None, storage_impl=storage, ds_root=storage.get_datastore_root_from_config(print)
    )


def _stored_log(store: Any, run_id: str, task_id: str, attempt: int) -> str:
    task = store.get_task_datastore(run_id, "train", task_id, attempt=attempt, allow_not_done=True)
    return b"".join(text for _, text in task.load_logs([TASK_LOG_SOURCE], "stderr")).decode()


def _address_record(store: Any, run_id: str, task_id: str, attempt: int) -> dict[str, Any]:
    """Return the record through which the nodes of an attempt found each other."""
    name = "torchrun_gang.json"
    task = store.get_task_datastore(run_id, "train", task_id, attempt=attempt, data_metadata={}, mode="r")
    record: dict[str, Any] | None = task.load_metadata([name])[name]
    assert record is not None, f"attempt {attempt} left no record"
    return record
