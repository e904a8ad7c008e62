"""Runs flows on a real backend, which the environment names; nothing here knows the rigs.

What must be set is Metaflow's own: see ``REQUIRED``. A test whose backend is not set fails: these tests
are asked for by name (``make test-remote``), never met by chance.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from flow_runs import heed_ctrl_c

HERE = Path(__file__).parent
FLOWS = HERE / "flows"
EXAMPLES = HERE.parent.parent / "examples"
REQUIRED = {
    "kubernetes": ["KUBECONFIG", "METAFLOW_DATASTORE_SYSROOT_S3", "METAFLOW_KUBERNETES_CONTAINER_IMAGE"],
    "batch": ["METAFLOW_BATCH_JOB_QUEUE", "METAFLOW_DATASTORE_SYSROOT_S3", "METAFLOW_DEFAULT_METADATA"],
}
# What `plan.py` says unless a test says otherwise; flows/remote_gang.py reads it.
PLAN: dict[str, Any] = {
    "NODES": 2,
    "ATTRS": {},
    "RUN": {"nproc_per_node": 2},
    "ENV": {},
    "HOOK": "",
    "LATE_S": 0,
    "RETRY": False,
    "KUBERNETES": None,
    "BATCH": None,
}
# Reads what Metaflow has kept of a run, in a process of its own: its client keeps settings in globals.
_TELL = """
import json, sys
from metaflow import Step, namespace
namespace(None)
tasks = []
for task in Step(sys.argv[1]):
    facts = {m.name: m.value for m in task.metadata}
    tasks.append({"id": task.id, "successful": task.successful, "out": task.stdout, "err": task.stderr, "facts": facts})
print("TOLD " + json.dumps(tasks))
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in Path(str(item.fspath)).parents:
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(420))


@dataclass
class Line:
    """One line of a flow's output and when it arrived."""

    text: str
    at: float


@dataclass
class RemoteFlow:
    """A flow that runs, or has run, on a remote backend."""

    process: subprocess.Popen[str]
    folder: Path
    env: dict[str, str]
    flow_name: str
    lines: list[Line] = field(default_factory=list)
    thread: threading.Thread | None = None

    @property
    def text(self) -> str:
        return "\n".join(line.text for line in self.lines)

    @property
    def run_id(self) -> str:
        return (self.folder / "run-id").read_text().strip()

    def wait(self, timeout_s: float = 300) -> int:
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired as late:
            os.killpg(self.process.pid, signal.SIGABRT)  # all its processes show where they are
            self.process.wait(10)
            time.sleep(1)
            raise AssertionError(f"still running after {timeout_s} s:\n{self.text}") from late
        if self.thread is not None:
            self.thread.join(10)
        return code

    def await_line(self, words: str, timeout_s: float = 120) -> Line:
        """Wait for a line of the control node's log, which is what Metaflow shows."""
        deadline = time.monotonic() + timeout_s
        while True:
            for line in list(self.lines):
                if words in line.text:
                    return line
            assert self.process.poll() is None, f"ended without {words!r}:\n{self.text}"
            assert time.monotonic() < deadline, f"no {words!r} in {timeout_s} s:\n{self.text}"
            time.sleep(0.1)

    def gathered(self) -> list[dict[str, Any]]:
        """Return what the gang's nodes left as artifacts, as the join read it, by node."""
        line = next(line.text for line in self.lines if "GATHERED " in line.text)
        found: list[dict[str, Any]] = json.loads(line.split("GATHERED ", 1)[1])
        return sorted(found, key=lambda task: task["node"])

    def tasks(self, step: str = "train") -> list[dict[str, Any]]:
        """Return what Metaflow's client says of a step's tasks: success, logs, metadata."""
        told = subprocess.run(
            [sys.executable, "-c", _TELL, f"{self.flow_name}/{self.run_id}/{step}"],
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=120,
        )
        for line in told.stdout.splitlines():
            if line.startswith("TOLD "):
                found: list[dict[str, Any]] = json.loads(line[5:])
                return found
        raise AssertionError(told.stdout + told.stderr)


def check_said(flow: RemoteFlow, *words: str) -> None:
    """Check that the control node's log, as the terminal shows it, holds these words; show it all if not."""
    missing = [text for text in words if text not in flow.text]
    assert not missing, f"not said: {missing}\n{flow.text}"


def check_gang(flow: RemoteFlow, nodes: int, nproc: int = 2) -> None:
    """Check the artifacts of a gang that ran to its end."""
    tasks = flow.gathered()
    assert [task["node"] for task in tasks] == list(range(nodes))
    for task in tasks:
        (result,) = task["results"]
        first = task["node"] * nproc
        assert result["world_size"] == nodes * nproc
        assert result["exit_codes"] == {str(rank): 0 for rank in range(first, first + nproc)}


StartRemote = Callable[..., RemoteFlow]


@pytest.fixture(autouse=True)
def _backend_is_set(request: pytest.FixtureRequest) -> None:
    for marker, names in REQUIRED.items():
        if request.node.get_closest_marker(marker) is not None:
            missing = [name for name in names if not os.environ.get(name)]
            assert not missing, f"no {marker} to test on: set {', '.join(missing)}"


@pytest.fixture
def start_remote(tmp_path: Path) -> Iterator[StartRemote]:
    """Return a function that starts a flow in a folder of its own; at the end of the test none runs."""
    runs: list[RemoteFlow] = []

    def start(
        *arguments: str,
        flow: str = "remote_gang.py",
        name: str = "RemoteGang",
        source: Path = FLOWS,
        command: str = "run",
        before: tuple[str, ...] = (),
        do: str = "",
        folder: Path | None = None,
        **plan: Any,
    ) -> RemoteFlow:
        # Metaflow packs the folder of the flow for the pods, so each flow has one of its own.
        place = folder or tmp_path / f"flow-{len(runs)}"
        if folder is None:
            shutil.copytree(source, place)
        wanted = {**PLAN, **plan}
        assert not set(wanted) - set(PLAN)
        wanted["ENV"] = {"WORKER_DO": do, **wanted["ENV"]}
        if source is FLOWS and folder is None:
            (place / "plan.py").write_text("".join(f"{key} = {value!r}\n" for key, value in wanted.items()))
        env = {
            "METAFLOW_DATASTORE_SYSROOT_LOCAL": str(tmp_path / "home"),
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1",
        }
        process = subprocess.Popen(
            [sys.executable, flow, "--no-pylint", *before, command, "--run-id-file", str(place / "run-id"), *arguments],
            cwd=place,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=heed_ctrl_c,
        )
        run = RemoteFlow(process, place, env, name)
        run.thread = threading.Thread(target=_collect, args=(run,), daemon=True)
        run.thread.start()
        runs.append(run)
        return run

    yield start
    for run in runs:
        if run.process.poll() is None:
            os.killpg(run.process.pid, signal.SIGINT)  # Metaflow then stops what it has started remotely
            try:
                run.process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(run.process.pid, signal.SIGKILL)
                run.process.wait(10)
        assert run.thread is not None
        run.thread.join(10)
        assert run.process.stdout is not None
        run.process.stdout.close()


def _collect(run: RemoteFlow) -> None:
    assert run.process.stdout is not None
    for line in run.process.stdout:
        run.lines.append(Line(line.rstrip("\n"), time.time()))


@pytest.fixture
def run_remote(start_remote: StartRemote) -> StartRemote:
    """Return a function that runs a flow to its end."""

    def run(*arguments: Any, expect: int = 0, timeout_s: float = 300, **options: Any) -> RemoteFlow:
        flow = start_remote(*arguments, **options)
        assert flow.wait(timeout_s) == expect, flow.text
        return flow

    return run
