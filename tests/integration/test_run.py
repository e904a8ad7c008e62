"""Launches that go well."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from flow_runs import FLOWS, content_of

from metaflow_extensions.torchrun.plugins.torchrun.machine.accelerators import usable_cpus

HOSTILE = {
    "spaces": "a b  c",
    "quotes": 'it\'s "quoted"',
    "backslash": "a\\b\\\\n",
    "newline": "one\ntwo",
    "unicode": "löss 🔥",
    "dash": "--not-an-option",
    "dollar": "$HOME ${local_rank} $$ $(id)",
    "d": "--",
    "flag": None,
    "bare": "",
    "yes": True,
    "no": False,
    "list": [1, "é", {"a": None}],
    "number": 0.1,
}


@pytest.mark.matrix
def test_a_gang_runs_twice_with_hostile_arguments_and_paths(run_flow):
    """One flow, many assertions: torch makes every flow expensive."""
    script = "sub folder/it's $HOME.py"
    words = ["", "-x", "--nnodes=9", "a\tb", "*", "--"]
    flow = run_flow(
        runs_=[
            {"entrypoint": script, "entrypoint_args": HOSTILE, "nproc_per_node": 2, "env": {"EXTRA": "a b"}},
            {"entrypoint": "pkg.inner.train", "module": True, "entrypoint_args": words, "nproc_per_node": 1},
        ]
    )
    end = flow.note("end")
    first = {w["env"]["RANK"]: w for w in flow.notes("worker-launch0-0-*")}
    second = {w["env"]["RANK"]: w for w in flow.notes("worker-launch1-0-*")}
    assert sorted(first) == ["0", "1", "2", "3"]
    assert sorted(second) == ["0", "1"]
    ids = {w["env"]["TORCHELASTIC_RUN_ID"] for w in (*first.values(), *second.values())}
    (gang,) = {re.fullmatch(r"launch[01]-0-([0-9a-f]{8})", name)[1] for name in ids}
    assert ids == {f"launch0-0-{gang}", f"launch1-0-{gang}"}

    expected = [
        *("--spaces", "a b  c", "--quotes", 'it\'s "quoted"', "--backslash", "a\\b\\\\n", "--newline", "one\ntwo"),
        *("--unicode", "löss 🔥", "--dash=--not-an-option", "--dollar", "$HOME ${local_rank} $$ $(id)", "--d=--"),
        *("--flag", "--bare", "--yes", "true", "--no", "false", "--list", '[1, "é", {"a": null}]', "--number", "0.1"),
    ]
    for worker in first.values():
        assert worker["argv"] == expected
        env = worker["env"]
        # GROUP_RANK is the node's index, and rank 0 is on the control node.
        assert env["GROUP_RANK"] == env["MF_PARALLEL_NODE_INDEX"] == str(int(env["RANK"]) // 2)
        assert env["WORLD_SIZE"] == "4"
        assert env["PYTHONUNBUFFERED"]
        assert env["GLOO_SOCKET_IFNAME"] == env["NCCL_SOCKET_IFNAME"] == "lo"
        assert env["OMP_NUM_THREADS"] == str(max(1, int(usable_cpus() // 4)))
        assert env["EXTRA"] == "a b"
        assert "METAFLOW_TORCHRUN_STARTED_BY" not in env, "what the step's code starts is no task"
        assert env["TORCHELASTIC_RESTART_COUNT"] == "0"
    assert all(worker["argv"] == words for worker in second.values())
    assert "EXTRA" not in second["0"]["env"]

    tasks = {task["node"]: task for task in end["tasks"]}
    assert tasks[0]["facts"] == {
        "num_nodes": 2,
        "node_index": 0,
        "nproc_per_node": 1,
        "world_size": 2,
        "main_addr": "127.0.0.1",
        "is_control": True,
    }
    assert tasks[1]["facts"]["is_control"] is False
    assert [r["launch"] for r in tasks[0]["results"]] == [0, 1]
    assert tasks[1]["results"][0]["exit_codes"] == {"2": 0, "3": 0}
    assert tasks[1]["results"][0]["world_size"] == 4
    assert tasks[0]["results"][0]["restarts"] == []
    events = tasks[0]["results"][0]["events"]
    nodes = {event["kind"]: sorted(event["nodes"]) for event in events}
    assert {"ready": [0, 1], "go": [], "exited": [0, 1], "done": []}.items() <= nodes.items()
    assert [sorted(event["ranks"]) for event in events if event["kind"] == "exited"] == [[0, 1, 2, 3]]
    assert tasks[1]["results"][1]["events"] == [], "they are the control node's"
    assert tasks[0]["results"][0]["duration_s"] > 0
    assert set(end["kinds"]) == {"TorchrunResult"}
    # The Metaflow task must stay small: torch lives in the agent and the workers.
    assert all(note["torch"] is False for note in flow.notes("task-*"))

    assert "] runs: " not in flow.text  # a detail
    assert len(re.findall(r"launch [01] has ended well: ranks 0-[13], trained \d+ s\n", flow.text)) == 2
    # The command is in one piece for a shell, since the newline in an argument is quoted with it.
    shown = tasks[0]["results"][0]["command"]
    assert shlex.split(shown)[-len(expected) :] == [word.replace("$", "$$") for word in expected]


@pytest.fixture(scope="module")
def together(start_shared_flow, tmp_path_factory):
    """Run flows at the same time, and return them by names."""
    folder = tmp_path_factory.mktemp("together")
    (folder / "else where").mkdir()
    gpus = [{"entrypoint": "worker.py"}, {"entrypoint": "worker.py", "env": {"CUDA_VISIBLE_DEVICES": "3"}}]
    arguments = {"entrypoint": "worker.py", "entrypoint_args": ["a b", "$HOME"], "env": {"WORKER_DO": "0:child"}}
    elsewhere = {"entrypoint": "worker.py", "cwd": str(folder / "else where"), "torchrun_args": {"log_dir": "logs"}}
    elsewhere["env"] = {"WORKER_DO": "0:talk"}
    flows = {
        "gpus": start_shared_flow(runs_=gpus, env={"CUDA_VISIBLE_DEVICES": "0,1,2,3,4"}, stand_in=True),
        "with": start_shared_flow("--with", "torchrun:nproc_per_node=2", flow="plain.py", stand_in=True),
        "single": start_shared_flow(flow="single.py", stand_in=True),
        "one node": start_shared_flow(
            "--nodes", "1", runs_=[arguments, elsewhere], env={"METAFLOW_TORCHRUN_DEBUG": "1"}
        ),
    }
    for flow in flows.values():
        flow.wait(160)
        flow.await_gone()
    return flows


def well(flow):
    """Return a flow that has ended well."""
    assert flow.process.returncode == 0, flow.text
    return flow


@pytest.mark.xdist_group("together")
def test_two_local_nodes_never_share_a_gpu_unless_the_call_says_so(together):
    flow = well(together["gpus"])
    first, second = flow.notes("worker-launch0-*"), flow.notes("worker-launch1-*")
    seen = {w["env"]["GROUP_RANK"]: w["env"]["CUDA_VISIBLE_DEVICES"] for w in first}
    assert seen == {"0": "0,1", "1": "2,3"}
    assert len(first) == 4
    assert [w["env"]["CUDA_VISIBLE_DEVICES"] for w in second] == ["3"] * 4


@pytest.mark.xdist_group("together")
def test_with_on_the_command_line_decorates_the_parallel_step_only(together):
    assert len(well(together["with"]).notes("worker-*")) == 4


def test_a_flow_written_for_0_2_runs_unchanged(run_flow):
    flow = run_flow(flow="legacy.py", stand_in=True)
    workers = flow.notes("worker-*")
    assert len(workers) == 4
    assert workers[0]["argv"] == ["--epochs", "3", "--flag", "--name", "a b"]
    warnings = [line.text for line in flow.lines if "has no effect" in line.text and "node 0" in line.text]
    assert len(warnings) == 1  # although it was called twice
    # Both nodes print at the same moment, piece by piece, so that their words may come to stand in one line.
    assert flow.text.count("caught:") == flow.text.count("The entrypoint 'missing.py' does not exist") == 2


@pytest.mark.xdist_group("together")
def test_single_node_multi_gpu_needs_no_gang(together):
    flow = well(together["single"])
    assert len(flow.notes("worker-*")) == 3
    assert flow.note("end") == {"world_size": 3, "exit_codes": {"0": 0, "1": 0, "2": 0}}
    cards = flow.home.parent.rglob(f"runs/{flow.run_id}/steps/start/tasks/*/cards/*.html")
    assert ["3 ranks have ended well" in content_of(card.read_text()) for card in cards] == [True, True]


@pytest.mark.xdist_group("together")
def test_the_printed_command_can_be_pasted(together, tmp_path):
    flow = well(together["one node"])
    command = next(line.text.split(" runs: ")[1] for line in flow.lines if "] runs: " in line.text)
    (log_dir,) = (word.partition("=")[2] for word in shlex.split(command) if word.startswith("--log-dir="))
    command = command.replace(log_dir, str(tmp_path / "logs"))
    result = subprocess.run(
        ["bash", "-c", command],
        env={"PATH": "/usr/bin:/bin", "GANG_OUT": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    (worker,) = (json.loads(path.read_text()) for path in tmp_path.glob("worker-*-0"))
    assert worker["argv"] == ["a b", "$HOME"]


@pytest.mark.xdist_group("together")
def test_grandchildren_left_after_success_are_stopped_and_named(together):
    assert "that the workers had left running" in well(together["one node"]).text


@pytest.mark.xdist_group("together")
def test_the_working_directory_can_be_chosen(together):
    (worker,) = well(together["one node"]).notes("worker-launch1-*")
    assert Path(worker["cwd"]).name == "else where"
    assert Path(worker["file"]).name == "worker.py"  # found beside the flow
    assert list(Path(worker["cwd"]).iterdir()) == []
    assert together["one node"].text.count("torchrun_args log-dir has no effect") == 1
    assert "[rank 0] heard from afar" in together["one node"].text
    assert worker["env"]["OMP_NUM_THREADS"] == str(max(1, int(usable_cpus())))


def test_the_working_directory_hides_nothing_and_a_module_is_found_beside_the_flow(run_flow, tmp_path):
    """As with torchrun and a script elsewhere; a step imports what lies beside its flow."""
    flow, hiding, empty = tmp_path / "flows" / "gang.py", tmp_path / "hiding", tmp_path / "empty"
    shutil.copytree(FLOWS, flow.parent)
    shutil.copy(Path(__file__).parents[1] / "spares.py", flow.parent)
    hiding.mkdir()
    empty.mkdir()
    for name in ("random", "queue", "timeit", "pprint", "torch"):
        (hiding / f"{name}.py").write_text("raise AssertionError('of the working directory')")
    module = {"entrypoint": "pkg.inner.train", "module": True, "cwd": str(empty), "warm": "workers"}
    runs = [{"entrypoint": "worker.py", "warm": "workers"}, module]
    ended = run_flow("--nodes", "1", folder=hiding, flow=flow, runs_=runs, attrs={"nproc_per_node": 1})
    assert len(ended.notes("worker-launch*")) == 2
    assert "of the working directory" not in ended.text
    first, _, second = ended.text.partition("launch 0 has ended well")
    assert "torchrun starts cold" not in first
    assert "torchrun starts cold: PYTHONPATH had another value" in second, "the flow's folder stands there"
