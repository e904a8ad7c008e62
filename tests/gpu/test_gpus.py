"""Gangs on the GPUs of this machine, with NCCL. `make test-gpu` runs them; see CONTRIBUTING.md.

Local nodes share the machine's GPUs, so two nodes with NCCL need two of them. What needs more GPUs than there are is
skipped, and says so.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from flow_runs import FLOWS

from metaflow_extensions.torchrun.plugins.torchrun.machine.accelerators import visible_accelerators

GPUS = visible_accelerators(os.environ)
if not GPUS:
    pytest.skip("No GPU on this machine: nothing was run with CUDA and NCCL.", allow_module_level=True)
# NCCL loads its libraries for many devices, and a first CUDA context takes seconds for each process.
END_S = 300
pytestmark = pytest.mark.timeout(END_S + 60)
two_gpus = pytest.mark.skipif(len(GPUS) == 1, reason="One GPU: NCCL over two nodes needs two, and was not run.")
WORKER = "on_gpu.py"
ONE_GPU = {"CUDA_VISIBLE_DEVICES": GPUS[0]}


@pytest.fixture(scope="module", autouse=True)
def _torch_sees_all_gpus():
    """Fail, and do not skip, where there are GPUs and this PyTorch can't use them."""
    asked = "import torch; print(torch.__version__, torch.cuda.device_count())"
    said = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, timeout=120, check=True)
    version, count = said.stdout.split()
    assert int(count) == len(GPUS), f"torch {version} sees {count} of {len(GPUS)} GPUs: install a build for CUDA"


@pytest.fixture
def run(run_flow, tmp_path):
    """Return a function that runs a flow beside our workers."""
    folder = tmp_path / "gpu flow"
    shutil.copytree(FLOWS, folder)
    shutil.copytree(Path(__file__).parent / "flows", folder, dirs_exist_ok=True)

    def run(*words, **options):
        return run_flow(*words, folder=folder, timeout_s=END_S, **options)

    return run


def launch(what="", **options):
    return {"entrypoint": WORKER, "entrypoint_args": [what] if what else [], **options}


def seen_by(flow, launch=0, restart=0):
    """Return what the ranks of a launch have noted, by rank."""
    return sorted(flow.notes(f"launch{launch}-{restart}-*"), key=lambda seen: seen["rank"])


def ran_over_nccl(seen, ranks):
    """Check that so many ranks, each on a GPU of its own, have added themselves up."""
    assert [each["rank"] for each in seen] == list(range(ranks))
    assert {each["backend"] for each in seen} == {"nccl"}
    assert {each["sum"] for each in seen} == {sum(range(ranks))}
    assert len({each["device"] for each in seen}) == ranks, "two ranks on one GPU"


def test_one_node_has_a_process_for_each_gpu(run):
    flow = run("--nodes", "1", runs_=[launch()])
    ran_over_nccl(seen_by(flow), len(GPUS))
    assert re.search(rf'"gpus": {len(GPUS)}\b', flow.ask("show", "--json"))
    assert f"{len(GPUS)} accelerator" in flow.text


@two_gpus
def test_two_nodes_share_all_gpus_and_meet_over_nccl(run):
    flow = run(runs_=[launch()])
    share = len(GPUS) // 2
    seen = seen_by(flow)
    ran_over_nccl(seen, 2 * share)
    for node in range(2):
        visible = {each["visible"] for each in seen if each["node"] == node}
        assert visible == {",".join(GPUS[node * share : (node + 1) * share])}
    assert f"{len(GPUS)} visible accelerators shared by 2 nodes on this machine" in flow.text


def test_two_nodes_with_one_gpu_use_none_and_say_so(run):
    flow = run(env=ONE_GPU, runs_=[launch()])
    seen = seen_by(flow)
    assert [(each["backend"], each["visible"]) for each in seen] == [("gloo", "")] * 2
    assert "fewer accelerators (1) than nodes here (2): one process" in flow.text


def test_two_ranks_on_one_gpu_fail_with_what_to_change(run):
    flow = run(expect=1, runs_=[launch("first", nproc_per_node=1, env=ONE_GPU)])
    said = {error["message"] for error in flow.errors()}
    assert len(said) == 1
    (message,) = said
    assert "Each process needs a GPU of its own" in message
    assert {error["cause"]["category"] for error in flow.errors()} == {"user"}


def test_init_auto_is_nccl_and_tensors_of_a_gpu_come_back_on_the_cpu(run):
    values = run(flow="gpu_functions.py").note("values")
    assert not values["torch before"], "the task is small until somebody looks at a value"
    seen = values["seen"]
    assert [each["device"] for each in seen] == [f"cuda:{rank}" for rank in range(len(GPUS))]
    for each in seen:
        assert each["backend"] == "nccl"
        assert each["here"] == ["cpu", "cpu"]
        assert each["total"] == [sum(range(len(GPUS)))] * 3


def test_a_hang_in_nccl_tells_where_the_rank_was_that_stayed_away(run):
    flow = run("--nodes", "1", expect=1, runs_=[launch("hang", hang_timeout_s=30)])
    (error,) = flow.errors()
    assert (error["class"], error["cause"]["category"]) == ("LaunchHung", "hang")
    assert re.search(rf"^Rank {len(GPUS) - 1}: on_gpu.py:\d+ in load_batch", error["message"], re.MULTILINE)


def test_no_memory_left_on_a_gpu_is_the_cause(run):
    flow = run("--nodes", "1", expect=1, runs_=[launch("full", nproc_per_node=1)])
    (error,) = flow.errors()
    assert (error["class"], error["cause"]["category"], error["cause"]["rank"]) == ("LaunchFailed", "user", 0)
    assert re.match(
        r"torch\.(cuda\.)?OutOfMemoryError: CUDA out of memory\. Tried to allocate", error["cause"]["exception"]
    )
    assert "on_gpu.py" in error["message"]


def test_spare_workers_have_their_own_gpus_in_each_launch_and_restart(run):
    runs = [launch("again", max_restarts=1), launch()]
    flow = run("--nodes", "1", attrs={"warm": "workers"}, runs_=runs)
    assert "starts cold" not in flow.text
    for number, restart in ((0, 0), (0, 1), (1, 0)):
        ran_over_nccl(seen_by(flow, number, restart), len(GPUS))
