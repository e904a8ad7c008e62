"""Gangs on Kubernetes with JobSets and on AWS Batch as multi-node parallel jobs: what both must do."""

from __future__ import annotations

import os
import re
import signal

import pytest
from backends import Cluster, Queue
from flow_runs import FLOWS
from remote_flows import EXAMPLES, check_gang, check_said
from seen_afterwards import Seen, check_failed


def on(backend, *more):
    """Return the parameters of a test on a backend, with the backend's mark."""
    return pytest.param(backend, *more, marks=getattr(pytest.mark, backend.name), id="-".join([backend.name, *more]))


@pytest.fixture(params=[on(Cluster), on(Queue)])
def backend(request, backend_is_set):
    return request.param()


# --- what runs ------------------------------------------------------------------------------------


def test_hello_unchanged(run_remote, backend):
    flow = run_remote("--with", backend.name, "--nodes", "3", flow="flow.py", source=EXAMPLES / "hello")
    check_said(flow, "all-reduce over 6 ranks: ok")
    backend.await_gone(flow)


def test_nodes_that_start_20_s_apart_meet_and_wait_for_each_others_ends(run_remote, backend):
    """On AWS Batch they start together; there the control node's end would end all."""
    flow = run_remote(NODES=3, LATE_S=20, HOOK="after:1:sleep:15", **backend.on())
    check_gang(flow, 3)
    # On a busy machine node 2 has not stored its results yet either.
    assert re.search("waiting until nodes? 1(, 2)? ended the step", flow.text)
    backend.await_gone(flow)


def test_workers_become_of_spares_and_again_after_a_restart(run_remote, backend):
    """An agent and two workers of each node; all of them wait for the next ones before one is killed."""
    settings = {"warm": "workers", "max_restarts": 1, "nproc_per_node": 2}
    ready = {"HOOK": "before:*:await-spares:3", "DO": "*:say-torch,*:await-spares-3,3:nap,3:kill-once"}
    flow = run_remote(**ready, TORCHRUN=settings, **backend.on())
    check_gang(flow, 2)
    assert flow.text.count("] torch was imported before") == 8  # the stored cause has it, too
    check_said(flow, "restart 1 of 1: ", "killed by SIGKILL")
    backend.await_gone(flow)


def test_functions_give_their_values_back_and_raise_their_own_exceptions(run_remote, backend):
    flow = run_remote("--with", backend.name, flow="functions.py", name="FunctionsFlow", source=FLOWS)
    told = flow.told("NOTE end")
    assert [value[:2] for value in told["trained"]] == [[0, 0], [1, 0], [2, 1], [3, 1]]
    assert told["trained"][3][3] == 2 << 20, "more than the gang's channel would carry"
    assert told["restarts"] == [1, 1]
    for failure in told["failures"]:
        assert (failure["class"], failure["is"], failure["batch"], failure["cause"][1]) == ("BadBatch", True, 17, 1)
    backend.await_gone(flow)


def test_what_the_workers_leave_is_read_by_later_steps_and_on_the_command_line(run_remote, backend):
    flow = run_remote("--with", backend.name, flow="outputs.py", name="OutputsFlow", source=FLOWS)
    end = flow.told("NOTE end")
    assert len(end["of all"][0]) == len(end["failed"][0]) == 6
    assert end["failed"][1]["1 failing 模型/shards/1.bin"] == "111111111"
    seen = Seen(flow)
    assert "python outputs.py torchrun outputs " in seen.show()
    listed = seen.outputs("--launch", "0", "--node", "1").splitlines()[
        1:4
    ]  # after them, what the launch has said of its patterns
    assert [line.split(maxsplit=3)[3] for line in listed] == [
        "good 模型/config *.json", "good 模型/shards/1.bin", "good-1.json",
    ]  # fmt: skip
    backend.await_gone(flow)


# --- what is seen while it runs -------------------------------------------------------------------


def test_every_rank_of_a_gang_that_runs_is_asked_for_its_stacks_from_elsewhere(start_remote, backend):
    flow = start_remote(DO="*:talk", **backend.on())
    flow.await_line("[rank 3] word ")
    seen = Seen(flow)
    ranks = {rank: each for node in seen.stacks()["nodes"].values() for rank, each in node["ranks"].items()}
    assert sorted(ranks) == ["0", "1", "2", "3"]
    assert all("worker.py" in each["where"] for each in ranks.values()), ranks
    assert seen.stacks()["since_s"] > 0
    os.killpg(flow.process.pid, signal.SIGINT)
    flow.wait()
    backend.await_gone(flow)


# --- what fails -----------------------------------------------------------------------------------


def test_out_of_memory_is_said(run_remote, backend):
    flow = run_remote(expect=1, DO="3:oom,*:sleep", **backend.on(**backend.small))
    limit = f"the node's memory limit of {backend.small_is} was reached"
    check_said(flow, "Rank 3 on node 1", f"ran out of memory: {limit}")
    backend.await_gone(flow)


@pytest.mark.parametrize("node", [0, 1])
def test_out_of_memory_of_a_task_itself_is_told_by_the_backend(run_remote, backend, node):
    """The control node can't tell its own end; of another one's it hears that the connection was closed."""
    flow = run_remote(expect=1, DO="*:sleep", HOOK=f"before:{node}:oom", **backend.on(**backend.small))
    says, code = isinstance(backend, Cluster), r".*\(exit code 137\)"  # AWS Batch is not asked
    if node == 0 and not says:  # only its own message tells of a control node there, see docs/limits.md
        assert re.search(r"AWS Batch error:(?s:.*)container in task exited", flow.text), flow.text
        return
    told = rf"(Kubernetes says of node {node}'s|The control node's) pod \S+(:| ended unexpectedly:) {code}"
    told = told if says else r"Node 1 \(host"
    assert re.search(told, flow.text), flow.text
    last = [line.text for line in flow.lines][-2:]
    assert last[1].endswith(f"torchrun show {flow.run_id}"), flow.text
    # Of node 0, node 1 tells, if its own pod lives so long.
    assert re.search(rf"[Nn]ode {node} \(host" + "|The control node's" * (node == 0), last[0]), flow.text
    backend.await_gone(flow)
    seen = Seen(flow)
    assert seen.data()["outcome"] == "failed"
    assert not says or "(exit code 137)" in seen.show()


@pytest.mark.metadata_service
def test_a_node_whose_processes_are_all_killed_is_named_at_once_and_afterwards(run_remote, backend):
    flow = run_remote(expect=1, DO="3:nap,3:wipe,*:talk", CARD=True, metadata="service", **backend.on())
    check_said(flow, "Node 1 (host")
    backend.await_gone(flow)
    if isinstance(backend, Cluster):
        seen = Seen(flow)
        gang = check_failed(seen, cause="Node 1 (host ", states=["failed", "lost"])
        assert gang["reports"][-1]["cause"]["kind"] == "lost"
        assert [node["exit_codes"] for node in gang["nodes"]] == [{"0": -15, "1": -15}, {}]
        words = seen.words(0)
        assert words == list(range(len(words)))
        assert len(words) > 10
        # The pod has a second or two to make its last card, which is too little on a busy machine.
        (page,) = seen.cards(create=True)
        assert "its connection to the control node was closed" in page
        assert page.count("tr-cell tr-lost") == 2


@pytest.mark.parametrize(
    ("backend", "how"),
    [
        *(on(Cluster, how) for how in ("ctrl-c", "sigterm", "sigterm-to-all")),
        *(on(Queue, how) for how in ("ctrl-c", "sigterm")),
    ],
    indirect=["backend"],
)
def test_an_interrupted_run_leaves_nothing(start_remote, backend, how):
    """Ctrl-C reaches all of the run's processes, a scheduler's SIGTERM the run alone, that of `timeout` or systemd all."""
    flow = start_remote(DO="*:sleep", **backend.on())
    # Of lines that come together, Metaflow's terminal shows one (2.19); the next with further output.
    flow.await_line(" of 4 runs")
    if how == "sigterm":
        flow.process.terminate()
    else:
        os.killpg(flow.process.pid, signal.SIGINT if how == "ctrl-c" else signal.SIGTERM)
    assert flow.wait(60) == 1
    backend.await_gone(flow)


@pytest.mark.minutes
def test_the_steps_timeout_ends_the_gang_before_the_backend_ends_its_jobs(run_remote, backend):
    """Metaflow (2.19) makes it the jobs' own limit; a busy machine needs most of a minute for their start."""
    flow = run_remote(expect=1, TIMEOUT_S=150, DO="*:save", TORCHRUN={"grace_s": 5}, **backend.on())
    check_said(flow, "longer than the step's @timeout of 150 s allows (it counts from", "LaunchTimeout")
    assert "was preempted" not in flow.text, flow.text
    backend.await_gone(flow)


# --- again ----------------------------------------------------------------------------------------


@pytest.mark.metadata_service
def test_retry_brings_a_new_gang_and_both_are_seen_afterwards(run_remote, backend):
    flow = run_remote(DO="3:kill-first", RETRY=True, CARD=True, metadata="service", **backend.on())
    check_gang(flow, 2)
    assert [task["attempt"] for task in flow.gathered()] == [1, 1]
    check_said(flow, "Rank 3 on node 1", "killed by SIGKILL")
    backend.await_gone(flow)
    if isinstance(backend, Cluster):
        seen = Seen(flow)
        first = check_failed(seen, "--attempt", "0", cause="Rank 3 on node 1 (host ", states=["failed", "failed"])
        assert (first["last_attempt"], first["nodes"][1]["exit_codes"]["3"]) == (1, -9)
        second = seen.data()
        assert (second["attempt"], second["outcome"], second["reports"]) == (1, "done", [])
        assert "4 ranks on 2 nodes have ended well: trained " in seen.show()
        killed, well = sorted(seen.cards(), key=lambda page: "have ended well" in page)
        assert "was killed by SIGKILL" in killed
        assert "failed, SIGKILL" in killed
        assert "4 ranks on 2 nodes have ended well: trained " in well
