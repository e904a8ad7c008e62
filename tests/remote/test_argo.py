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
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from kubernetes import client, config
from limits import eventually

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
        self.log = ""  # of all steps but the gang's
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
        self.log += log
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
        """Take everything back that is not gone."""
        for gang in self.gangs:
            about = {**JOBSETS, "namespace": self.namespace, "name": gang.name, "propagation_policy": "Foreground"}
            with suppress(client.ApiException):
                self.custom.delete_namespaced_custom_object(**about)
        for name in self.pods:
            with suppress(client.ApiException):
                self.core.delete_namespaced_pod(name, self.namespace, grace_period_seconds=0)


def _needed(task: dict[str, Any]) -> list[str]:
    depends = task.get("depends") or ""
    assert re.fullmatch(r"(\S+\.Succeeded( && )?)*", depends), f"depends: {depends!r} is not imitated"
    return [word.removesuffix(".Succeeded") for word in depends.split(" && ") if word]


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
    assert workflow.run() == {}
    assert [gang.state for gang in workflow.gangs] == ["Failed", "Completed"]
    first, second = workflow.gangs
    assert first.name != second.name
    (seen,) = re.findall(r"SEEN (.*)", workflow.log)
    nodes = {node: about for node, *about in json.loads(seen)}
    (other,) = [
        node for node, (_, took_part, *_) in nodes.items() if took_part and node
    ]  # of the two that may be the spare
    control = f"control-{second.entropy}-0"
    assert nodes == {
        0: [1, 4, {"0": 0, "1": 0}, control, control],
        other: [1, 4, {"2": 0, "3": 0}, control, f"worker-{second.entropy}-{other - 1}"],
        3 - other: [1, None, None, control, f"worker-{second.entropy}-{2 - other}"],
    }, "the spare's has no result"
    said = workflow.logs(second)
    for rank in range(4):
        assert f"[rank {rank}] rank {rank} of 4 runs" in said
