"""Files of workers that `run` stores, on one real flow: read in later steps, by the client, and on the command line."""

from __future__ import annotations

import re

import pytest
from flow_runs import READ_OUTPUTS, ask

pytestmark = pytest.mark.xdist_group("outputs")


@pytest.fixture(scope="module")
def flow(start_shared_flow):
    flow = start_shared_flow(flow="outputs.py", stand_in=True)
    assert flow.wait() == 0, flow.text
    return flow


@pytest.fixture
def run(flow):
    return flow.run_id


def of_node(node, kind="good"):
    return {
        f"{node} {kind} 模型/config *.json": "{}",
        f"{node} {kind} 模型/shards/{node}.bin": str(node) * 9,
        f"{node} {kind}-{node}.json": '{"node": ',
    }


def test_later_steps_read_the_outputs(flow):
    end = flow.note("end")
    assert end["of all"] == [{**of_node(0), **of_node(1)}, of_node(1)]
    assert end["of control"] == [of_node(0, "other")] * 2
    assert end["of function"] == {"0 written": "0"}
    assert end["failed"] == [{**of_node(0, "failing"), **of_node(1, "failing")}, of_node(1, "failing")]


def test_the_client_reads_them_without_the_flow(flow, run, tmp_path):
    """In another folder. (Metaflow's client wants a local datastore where it was, 2.19.)"""
    told = ask(READ_OUTPUTS, f"OutputsFlow/{run}", str(tmp_path / "there"), folder=tmp_path, env=flow.env)
    assert told["alone"] == [[0], ["alone-0.json"]]
    assert told["shown"] == "<Outputs: 6 files, 6.0 MB of nodes 0, 1>"
    assert told["part"] == "111"
    assert told["sizes"] == {
        **{f"good 模型/shards/{node}.bin": 3_000_000 for node in (0, 1)},
        "good 模型/config *.json": 2,
        "good-0.json": 11,
        "good-1.json": 11,
    }


def test_the_command_line_lists_and_fetches_them_of_a_launch_that_has_failed_too(flow, run, tmp_path):
    ask = flow.ask
    shown = ask("show", f"{run}/train")
    assert f"python outputs.py torchrun outputs {run}/train" in shown
    assert "nodes 0, 1: stored 3 files, 3.0 MB" in shown
    listed = ask("outputs", f"{run}/train").splitlines()
    assert [line.split(maxsplit=3)[-1] for line in listed if re.match(r" +0 ", line)] == [
        "failing 模型/config *.json",
        "failing 模型/shards/0.bin",
        "failing-0.json",
    ]
    assert "The files are in" in ask("outputs", f"{run}/train", "--to", str(tmp_path / "there"))
    assert (tmp_path / "there" / "failing 模型" / "shards" / "1.bin").read_bytes() == b"1" * 3_000_000
    assert "Launch 9 has stored no outputs. Launches that have: 0, 1, 2, 3." in ask(
        "outputs", f"{run}/train", "--launch", "9", expect=1
    )


def test_a_resumed_run_shows_the_gang_its_logs_and_its_outputs_of_the_run_it_was_cloned_from(
    flow, run, start_shared_flow
):
    resumed = start_shared_flow("end", "--origin-run-id", run, command="resume", flow="outputs.py", stand_in=True)
    assert resumed.wait() == 0, resumed.text
    clone, ask = resumed.run_id, flow.ask
    shown = ask("show", clone)
    named = rf"OutputsFlow, run {run}, step train, task \d+, which run {clone} has cloned as task \d+, as of .*\n"
    assert re.match(named, shown), shown
    assert shown.splitlines()[1:] == ask("show", run).splitlines()[1:]
    assert f"torchrun outputs {run}/train" in shown
    assert ask("logs", clone) == ask("logs", run) != ""
    assert ask("outputs", clone) == ask("outputs", run)
