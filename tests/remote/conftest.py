"""Runs flows on a real backend, which the environment names; nothing here knows the rigs.

What must be set is Metaflow's own: see ``REQUIRED``. A test whose backend is not set fails: these tests
are asked for by name (``make test-remote``), never met by chance.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from flow_runs import Running
from remote_flows import RemoteFlow

HERE = Path(__file__).parent
FLOWS = HERE / "flows"
REQUIRED = {
    "kubernetes": ["KUBECONFIG", "METAFLOW_DATASTORE_SYSROOT_S3", "METAFLOW_KUBERNETES_CONTAINER_IMAGE"],
    "batch": ["METAFLOW_BATCH_JOB_QUEUE", "METAFLOW_DATASTORE_SYSROOT_S3", "METAFLOW_DEFAULT_METADATA"],
    "metadata_service": ["METAFLOW_SERVICE_URL"],
    "s3": ["METAFLOW_DATASTORE_SYSROOT_S3"],
    "azure": ["METAFLOW_DATASTORE_SYSROOT_AZURE", "METAFLOW_AZURE_STORAGE_BLOB_SERVICE_ENDPOINT"],
    "gs": ["METAFLOW_DATASTORE_SYSROOT_GS"],
    "s3_faulty": ["METAFLOW_DATASTORE_SYSROOT_S3", "RIG_S3_REQUESTS", "RIG_S3_FAULTS"],
}
# What `plan.py` says unless a test says otherwise; flows/remote_gang.py reads it.
PLAN: dict[str, Any] = {
    "NODES": 2,
    "RUN": {"nproc_per_node": 2},
    "DO": "",
    "HOOK": "",
    "LATE_S": 0,
    "RETRY": False,
    "KUBERNETES": None,
    "BATCH": None,
    "TORCHRUN": {},
    "CARD": False,
    "TIMEOUT_S": None,
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in Path(str(item.fspath)).parents:
            item.add_marker(pytest.mark.timeout(420))


StartRemote = Callable[..., RemoteFlow]


@pytest.fixture(autouse=True)
def backend_is_set(request: pytest.FixtureRequest) -> None:
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
        metadata: str | None = None,
        **plan: Any,
    ) -> RemoteFlow:
        # Metaflow packs the folder of the flow for the pods, so each flow has one of its own.
        place = tmp_path / f"flow-{len(runs)}"
        shutil.copytree(source, place)
        shutil.copy(HERE.parent / "spares.py", place)
        wanted = {**PLAN, **plan}
        assert not set(wanted) - set(PLAN)
        if source is FLOWS:
            (place / "plan.py").write_text("".join(f"{key} = {value!r}\n" for key, value in wanted.items()))
        env = {
            "METAFLOW_DATASTORE_SYSROOT_LOCAL": str(tmp_path / "home"),
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1",
            **({} if metadata is None else {"METAFLOW_DEFAULT_METADATA": metadata}),
        }
        options = ("--run-id-file", str(place / "run-id"))
        run = RemoteFlow([sys.executable, flow, "--no-pylint", "run", *options, *arguments], place, env, name)
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
        Running.wait(run, 10)


@pytest.fixture
def run_remote(start_remote: StartRemote) -> StartRemote:
    """Return a function that runs a flow to its end."""

    def run(*arguments: Any, expect: int = 0, timeout_s: float = 300, **options: Any) -> RemoteFlow:
        flow = start_remote(*arguments, **options)
        assert flow.wait(timeout_s) == expect, flow.text
        return flow

    return run
