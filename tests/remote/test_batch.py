"""What gangs do on AWS Batch alone; see test_backends.py for the rest.

There a node's end ends nothing, except node 0's, which ends all.
"""

from __future__ import annotations

import json
import os
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from backends import Queue
from remote_flows import check_gang, check_said

pytestmark = pytest.mark.batch


@pytest.fixture
def queue() -> Queue:
    return Queue()


class Submissions:
    """Passes requests on to the endpoint of AWS and keeps the jobs that are submitted.

    DescribeJobs of the rig does not repeat a node's overrides, where Metaflow (2.19) requests GPUs.
    """

    def __init__(self, upstream: str) -> None:
        self.jobs: list[dict[str, Any]] = []
        submissions = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if self.path == "/v1/submitjob":
                    submissions.jobs.append(json.loads(body))
                passed = urllib.request.Request(
                    upstream + self.path, body or None, dict(self.headers), method=self.command
                )
                with urllib.request.urlopen(passed, timeout=60) as answer:
                    data = answer.read()
                    self.send_response(answer.status)
                    self.send_header("Content-Type", answer.headers.get("Content-Type", "application/json"))
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)

            do_GET = do_PUT = do_HEAD = do_DELETE = do_POST  # noqa: N815 - as http.server wants them

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def submissions(monkeypatch) -> Iterator[Submissions]:
    submissions = Submissions(os.environ["AWS_ENDPOINT_URL"])
    thread = threading.Thread(target=submissions.server.serve_forever, kwargs={"poll_interval": 0.1})
    thread.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL_BATCH", submissions.url)
    yield submissions
    submissions.server.shutdown()
    submissions.server.server_close()
    thread.join()


@pytest.mark.parametrize(
    ("attributes", "resources", "requested", "neuron_devices", "nproc"),
    [
        ({"gpu": 8}, None, "8", 0, 8),
        ({}, {"gpu": 2}, "2", 0, 2),
        ({"trainium": 1}, None, None, 1, 2),
        ({"gpu": 0}, None, None, 0, 1),
    ],
    ids=["plain", "merged", "other", "none"],
)
def test_processes_per_node_are_the_requested_accelerators(
    run_remote, queue, submissions, attributes, resources, requested, neuron_devices, nproc
):
    """Checked on the job that was submitted and on the processes that ran in it."""
    flow = run_remote(NODES=1, RUN={}, RESOURCES=resources, **queue.on(**attributes))
    assert [gpus_of(job) for job in submissions.jobs] == [requested]
    assert [len(neuron_devices_of(job)) for job in queue.jobs(flow)] == [neuron_devices]
    check_gang(flow, 1, nproc=nproc)


def gpus_of(job: dict[str, Any]) -> str | None:
    """Return the GPUs that a submitted job requests for its first node."""
    overrides = job.get("containerOverrides") or job["nodeOverrides"]["nodePropertyOverrides"][0]["containerOverrides"]
    gpus = [r["value"] for r in overrides.get("resourceRequirements", []) if r["type"] == "GPU"]
    return gpus[0] if gpus else None


def neuron_devices_of(job: dict[str, Any]) -> list[str]:
    """Return the paths of the Neuron devices that a job maps into its first node."""
    container = job["nodeProperties"]["nodeRangeProperties"][0]["container"]
    devices = (container.get("linuxParameters") or {}).get("devices") or []
    return [device["hostPath"] for device in devices if "neuron" in device["hostPath"]]


@pytest.mark.parametrize(
    ("hook", "expected"),
    [
        pytest.param("after:1:raise", "ValueError: step code failed after run", id="after-run"),
        pytest.param("unstorable:1", "this artifact can't be stored", id="unstorable"),
    ],
)
def test_a_node_that_fails_after_its_last_launch_fails_the_run(run_remote, queue, hook, expected):
    """By itself, Metaflow 2.19 reports success when a worker node fails after its artifacts were set."""
    flow = run_remote(expect=1, HOOK=hook, **queue.on())
    check_said(flow, "Node 1 (host", expected)
