"""Gangs on AWS Batch, as multi-node parallel jobs.

There a node's end ends nothing, except node 0's, which ends all.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import boto3
import pytest
from remote_flows import EXAMPLES, check_gang, check_said

pytestmark = pytest.mark.batch
# As Metaflow (2.19) prints it: "... [JOB] Task is starting (status SUBMITTED)..."
JOB_LINE = re.compile(r"\[([0-9a-f-]{36})\] Task is starting")
ACTIVE = ("SUBMITTED", "PENDING", "RUNNABLE", "STARTING", "RUNNING")


class Queue:
    """What a test asks AWS Batch."""

    def __init__(self) -> None:
        self.client = boto3.client("batch")

    def jobs(self, run: Any, states: tuple[str, ...] = (*ACTIVE, "SUCCEEDED", "FAILED")) -> list[dict[str, Any]]:
        """Return the jobs of a run, described; Metaflow tells their ids in its output."""
        ids = {found[1] for line in run.lines if (found := JOB_LINE.search(line.text))}
        assert ids, f"no job was submitted:\n{run.text}"
        found: list[dict[str, Any]] = self.client.describe_jobs(jobs=sorted(ids))["jobs"]
        return [job for job in found if job["status"] in states]

    def await_over(self, run: Any, timeout_s: float = 60) -> None:
        """Wait until no job of the run is active."""
        deadline = time.monotonic() + timeout_s
        while left := self.jobs(run, ACTIVE):
            assert time.monotonic() < deadline, [(job["jobId"], job["status"]) for job in left]
            time.sleep(0.5)


@pytest.fixture
def queue() -> Queue:
    return Queue()


def on_batch(**attributes: Any) -> dict[str, Any]:
    return {"BATCH": attributes}


# --- what runs ------------------------------------------------------------------------------------


def test_hello_unchanged(run_remote):
    flow = run_remote("--with", "batch", flow="flow.py", source=EXAMPLES / "hello")
    check_said(flow, "all-reduce over 4 ranks: ok")


def test_the_decorator_in_the_flow(run_remote, queue):
    """The control node's end would end all, so it waits until the others' results are stored."""
    flow = run_remote(NODES=3, HOOK="after:1:sleep:15", **on_batch())
    check_gang(flow, 3)
    check_said(flow, "waiting until node 1 ended the step")
    queue.await_over(flow)


def test_a_function_and_its_values(run_remote):
    flow = run_remote(flow="remote_function.py", name="RemoteFunction", **on_batch())
    check_said(flow, "VALUES 0/0/0 1/0/1 2/1/2 3/1/3")
    for node in (0, 1):
        check_said(flow, f"CAUGHT on node {node}: 'rank 3 misses a key' LaunchFailed raised by rank 3 on node 1 (host ")


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


def test_processes_per_node_are_the_requested_accelerators(run_remote, queue, submissions):
    """Checked on the jobs that were submitted and on the processes that ran in them."""
    flow = run_remote(flow="remote_gpus.py", name="RemoteGpus", **on_batch())
    assert [gpus_of(job) for job in submissions.jobs] == ["8", "2", None, None]
    described = sorted(queue.jobs(flow), key=lambda job: job["createdAt"])
    assert [len(neuron_devices_of(job)) for job in described] == [0, 0, 1, 0]
    found = json.loads(next(line.text for line in flow.lines if "FOUND " in line.text).split("FOUND ", 1)[1])
    assert found == {"plain": [8, 8], "merged": [2, 2], "other": [2, 2], "none": [1, 1]}


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


# --- what fails -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("do", "expected"),
    [
        pytest.param("0:raise", ["Rank 0 on node 0", "ValueError: bad loss on rank 0"], id="control-node"),
        pytest.param("1:raise,3:raise", ["on node ", "ValueError: bad loss on rank "], id="both"),
    ],
)
def test_a_failing_worker_fails_the_run_and_is_named(run_remote, queue, do, expected):
    flow = run_remote(expect=1, do=f"{do},*:sleep", **on_batch())
    check_said(flow, *expected)
    queue.await_over(flow)
    # The other node has had the time to store its own log, which says the same.
    for task in flow.tasks():
        assert expected[0] in task["err"], task


def test_out_of_memory_is_said(run_remote):
    flow = run_remote(expect=1, do="3:oom,*:sleep", **on_batch(memory=900))
    check_said(flow, "Rank 3 on node 1", "ran out of memory: the node's memory limit of 900 MiB was reached")


def test_a_node_whose_processes_are_all_killed_is_named(run_remote, queue):
    flow = run_remote(expect=1, do="3:nap,3:wipe,*:sleep", **on_batch())
    check_said(flow, "Node 1 (host")
    queue.await_over(flow)


@pytest.mark.parametrize(
    ("hook", "expected"),
    [
        pytest.param("after:1:raise", "ValueError: step code failed after run", id="after-run"),
        pytest.param("unstorable:1", "this artifact can't be stored", id="unstorable"),
    ],
)
def test_a_node_that_fails_after_its_last_launch_fails_the_run(run_remote, hook, expected):
    """By itself, Metaflow 2.19 reports success when a worker node fails after its artifacts were set."""
    flow = run_remote(expect=1, HOOK=hook, **on_batch())
    check_said(flow, "Node 1 (host", expected)


@pytest.mark.parametrize("how", ["ctrl-c", "sigterm"])
def test_an_interrupted_run_leaves_no_job(start_remote, queue, how):
    """Ctrl-C reaches all of the run's processes, a scheduler's SIGTERM the run alone."""
    flow = start_remote(do="*:sleep", **on_batch())
    # Of lines that come together, Metaflow's terminal shows one (2.19); the next with further output.
    flow.await_line(" of 4 runs")
    if how == "sigterm":
        flow.process.terminate()
    else:
        os.killpg(flow.process.pid, signal.SIGINT)
    assert flow.wait(60) == 1
    queue.await_over(flow)


# --- again ----------------------------------------------------------------------------------------


def test_retry_brings_a_new_gang(run_remote):
    flow = run_remote(do="3:kill-first", RETRY=True, **on_batch())
    check_gang(flow, 2)
    assert [task["attempt"] for task in flow.gathered()] == [1, 1]
    check_said(flow, "Rank 3 on node 1", "killed by SIGKILL")


def test_resume_runs_the_gang_again(run_remote):
    failed = run_remote(expect=1, do="3:raise,*:sleep", **on_batch())
    check_said(failed, "Rank 3 on node 1", "ValueError: bad loss on rank 3")
    plan = failed.folder / "plan.py"
    plan.write_text(plan.read_text().replace("3:raise,*:sleep", ""))
    resumed = run_remote(command="resume", folder=failed.folder)
    check_gang(resumed, 2)
