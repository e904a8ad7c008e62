"""Gangs whose flows keep their data in a local folder, S3, Azure Blob Storage or Google Cloud Storage.

The tasks run on this machine; the stores are those that Metaflow's settings in the environment name.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import metaflow
import pytest
from checkpoint_example import EXAMPLE, FEWER, end_line, train_plainly
from flow_runs import FLOWS, READ_OUTPUTS, FlowRun, ask
from limits import limit_s
from pages import blocks_of

# The faults of one test would hit another one's requests to S3.
IN_TURN = pytest.mark.xdist_group("s3")
STORES = [
    "local",
    pytest.param("s3", marks=[pytest.mark.s3, IN_TURN]),
    pytest.param("azure", marks=pytest.mark.azure),
    pytest.param("gs", marks=pytest.mark.gs),
]
RECORD = "torchrun_gang.json"
# Written again every 10 s, as long as something happens; looked for every 2 s.
VIEW, REQUEST = "torchrun_view.json", "torchrun_request.json"
SPEAKER = """
import os, worker
print("größe", os.environ["RANK"])
worker.main()
"""
# A member that finds no record asks again after about 0.15, 0.3, 0.6, … s, so often while it is so late.
LATE_S, LOOKS = 5.0, 8

# argv: flow/run/step.
TELL = """
import json, sys
from metaflow import Step, Task, namespace

pathspec = sys.argv[1]
namespace(None)
tasks = {}
for task in Step(pathspec):
    data = task.data if task.finished else None
    tasks[task.id] = {
        "successful": task.successful,
        "out": task.stdout,
        "store": task.metadata_dict["ds-type"],
        "first_err": Task(task.pathspec, attempt=0).stderr,
        "node": getattr(data, "node", None),
        "attempt": getattr(data, "attempt", None),
        "results": [vars(result) for result in getattr(data, "results", [])],
    }
print("TOLD " + json.dumps(tasks))
"""
RunFlow = Callable[..., FlowRun]


@pytest.fixture
def run_on(run_flow: RunFlow, tmp_path: Path) -> RunFlow:
    """Return a function that runs the gang's flow on a datastore to its end."""
    folder = tmp_path / "flow folder"
    shutil.copytree(FLOWS, folder)
    (folder / "speaker.py").write_text(SPEAKER, encoding="utf-8")

    def run(store: str, *arguments: str, **options: Any) -> FlowRun:
        before = ("--datastore", store, "--metadata", "local")
        return run_flow(*arguments, before=before, folder=folder, keep_settings=True, **options)

    return run


# --- every store --------------------------------------------------------------------------------


@pytest.mark.parametrize("store", STORES)
def test_a_gang_fails_is_tried_again_and_leaves_results_and_logs(run_on: RunFlow, tmp_path: Path, store: str) -> None:
    flow = run_on(store, runs_=[{"entrypoint": "speaker.py", "nproc_per_node": 2}], hook="retry", do="2:once")
    first, second = (flow.note(f"error-{node}-0.0") for node in (0, 1))
    assert all(first[fact] == second[fact] for fact in ("class", "message", "cause"))
    cause = first["cause"]
    assert (cause["node"], cause["rank"]) == (1, 2)
    assert "only the first time" in cause["exception"]
    assert not flow.notes("error-*-1.*")

    joined = sorted(flow.note("end")["tasks"], key=lambda task: task["node"])
    assert [(task["node"], task["attempt"]) for task in joined] == [(0, 1), (1, 1)]
    assert [task["results"][0]["exit_codes"] for task in joined] == [{"0": 0, "1": 0}, {"2": 0, "3": 0}]

    told = ask(TELL, f"GangFlow/{flow.run_id}/train", folder=tmp_path, env=flow.env)
    tasks = sorted(told.values(), key=lambda task: task["node"])
    assert {task["store"] for task in tasks} == {store}
    assert [(task["node"], task["attempt"], task["successful"]) for task in tasks] == [(0, 1, True), (1, 1, True)]
    assert [task["results"] for task in tasks] == [task["results"] for task in joined]
    # All nodes of a local run write to the control task's log.
    for rank in range(4):
        assert f"[rank {rank}] größe {rank}" in tasks[0]["out"]
    assert "only the first time" in tasks[0]["first_err"]
    assert "only the first time" not in tasks[0]["out"]


@pytest.mark.parametrize("store", STORES)
def test_outputs_are_read_by_later_steps_and_by_the_client(run_on: RunFlow, tmp_path: Path, store: str) -> None:
    flow = run_on(store, flow="outputs.py", stand_in=True, timeout_s=240)
    end = flow.note("end")
    assert len(end["of all"][0]) == len(end["failed"][0]) == 6
    assert end["failed"][1]["1 failing 模型/shards/1.bin"] == "111111111"
    told = ask(READ_OUTPUTS, f"OutputsFlow/{flow.run_id}", str(tmp_path / "there"), folder=tmp_path, env=flow.env)
    assert (told["alone"], told["part"]) == ([[0], ["alone-0.json"]], "111")
    large = {f"good 模型/shards/{node}.bin": 3_000_000 for node in (0, 1)}
    small = {"good 模型/config *.json": 2, "good-0.json": 11, "good-1.json": 11}
    assert told["sizes"] == {**large, **small}


# --- S3 under watch -----------------------------------------------------------------------------


class Faults:
    """Tells the S3 before which it stands to be slow, to fail, or to refuse."""

    def __init__(self) -> None:
        self._url = os.environ["RIG_S3_FAULTS"]
        self._direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def _ask(self, method: str, data: bytes | None = None) -> dict[str, Any]:
        request = urllib.request.Request(self._url, data=data, method=method)
        with self._direct.open(request, timeout=10) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def set(self, **faults: Any) -> None:
        self._ask("POST", json.dumps(faults).encode())

    def clear(self) -> None:
        self._ask("DELETE")

    def count(self, what: str) -> int:
        return int(self._ask("GET")["counters"][what])


@pytest.fixture
def faults(backend_is_set: None) -> Iterator[Faults]:
    """Offer the faults; none are set before the test, nor after."""
    told = Faults()
    told.clear()
    yield told
    told.clear()


def requests(flow: FlowRun) -> list[tuple[str, str, str]]:
    """Return method, path and status of the requests for the train step's own objects."""
    lines = [line.split() for line in Path(os.environ["RIG_S3_REQUESTS"]).read_text().splitlines()]
    inside = f"/{flow.run_id}/train/"
    return [(method, path.split(inside)[1], status) for method, path, status in lines if inside in path]


def record_requests(flow: FlowRun) -> Counter[tuple[str, str]]:
    return Counter((method, status) for method, path, status in requests(flow) if RECORD in path)


def other_requests(flow: FlowRun) -> dict[str, int]:
    """Return task id's part after the control task's -> number of requests but for those whose number grows with time."""
    ours = (RECORD, VIEW, REQUEST)
    tasks = Counter(path.split("/")[0] for _, path, _ in requests(flow) if not any(name in path for name in ours))
    return {task.partition("_node_")[2]: count for task, count in tasks.items()}


@pytest.mark.s3_faulty
@IN_TURN
def test_the_requests_of_a_node_do_not_grow_with_the_gang_nor_fast_with_waiting(
    run_on: RunFlow, faults: Faults
) -> None:
    others = {}
    faults.set(delay_s=LATE_S, match=f"^PUT .*{RECORD}")
    for nodes in (2, 4):
        flow = run_on("s3", "--nodes", str(nodes))
        record = record_requests(flow)
        members = nodes - 1
        assert record.pop(("PUT", "200")) == 1
        assert record.pop(("GET", "200")) == members
        assert record.pop(("GET", "404"), 0) <= LOOKS * members
        assert not record
        others[nodes] = other_requests(flow)
        assert len(others[nodes]) == nodes
    assert others[4][""] == others[2][""]
    assert {others[4][str(node)] for node in (1, 2, 3)} == {others[2]["1"]}


# --- an S3 that is slow, fails, or is away ------------------------------------------------------


def check_done(flow: FlowRun) -> None:
    """Check that the gang has done its work, and that the record was written and read once."""
    assert sorted(task["node"] for task in flow.note("end")["tasks"]) == [0, 1]
    record = record_requests(flow)
    assert record["PUT", "200"] == 1
    assert record["GET", "200"] == 1


@pytest.mark.s3_faulty
@IN_TURN
@pytest.mark.parametrize("match", [RECORD, "/train/"], ids=["the record", "anything"])
def test_requests_that_fail_delay_a_gang(run_on: RunFlow, faults: Faults, match: str) -> None:
    faults.set(fail=3, match=match)
    flow = run_on("s3", timeout_s=150)
    assert faults.count("failed") == 3
    check_done(flow)


@pytest.mark.s3_faulty
@IN_TURN
def test_a_node_that_s3_never_answers_is_named_in_time(run_on: RunFlow, faults: Faults) -> None:
    """Metaflow would ask S3 for more than an hour; the control node does not wait for that."""
    faults.set(fail=-1, match=f"^GET .*{RECORD}")
    begin = time.monotonic()
    flow = run_on("s3", attrs={"all_nodes_started_timeout": 8, "grace_s": 5}, expect=1)
    assert time.monotonic() - begin < limit_s(60)
    assert "Waited 8 s, but node 1 of 2 did not arrive" in flow.text
    assert record_requests(flow)["GET", "503"] >= 1
    flow.await_gone()


# --- pages and examples -------------------------------------------------------------------------


@pytest.mark.s3
def test_the_download_with_metaflows_client(tmp_path):
    root = f"{os.environ['METAFLOW_DATATOOLS_S3ROOT']}/guides"
    with metaflow.S3(s3root=root) as s3:
        s3.put_many([("0.bin", "zero"), ("some/1.bin", "one")])
    (code,) = [block.text for block in blocks_of("docs/from-one-gpu.md") if "s3.get_all()" in block.text]
    around: dict = {}
    exec(code, around)
    around["download"](root, str(tmp_path / "here"))
    assert (tmp_path / "here" / "0.bin").read_text() == "zero"
    assert (tmp_path / "here" / "some" / "1.bin").read_text() == "one"


@pytest.mark.s3
@IN_TURN
def test_checkpoints_in_s3(run_flow, tmp_path):
    """examples/checkpoint with its checkpoints in S3: the same weights as under plain torchrun."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(EXAMPLE, folder)
    # @checkpoint heeds this setting alone, not the option --datastore (0.2.14).
    env = {"METAFLOW_DEFAULT_DATASTORE": "s3"}
    words = (*FEWER, "--die-at", "10")
    flow = run_flow(*words, flow="flow.py", folder=folder, keep_settings=True, env=env, timeout_s=240)
    assert "goes on after step 8" in flow.text
    assert end_line(train_plainly(tmp_path / "plain")) in flow.text, flow.text
    assert not list((tmp_path / "home").rglob("mf.checkpoints")), "they are on this machine's disk"
