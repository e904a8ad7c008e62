"""`check_links`: what it measures, and whom it names."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from flow_runs import FlowRun
from gangs import Gang
from hosts import Host, Switch

MASTER_PORT, CHANNEL_PORT = 29612, 29613
PINNED = f"{MASTER_PORT}-{CHANNEL_PORT}"
PORTS = {"master_port": MASTER_PORT, "channel_port": CHANNEL_PORT}
FIGURES = r"[\d.]+ ms, [\d.]+ GB/s"
REDUCED = FIGURES + r" \(bus [\d.]+ GB/s\)"


# --- on this machine ------------------------------------------------------------------------------


@pytest.mark.matrix
def test_it_measures_and_then_the_script_runs(run_flow: Callable[..., FlowRun]) -> None:
    # Forked workers, so that PyTorch is imported once for each node and not six times.
    launches = [{"entrypoint": "check_links"}, {"entrypoint": "worker.py"}]
    run = run_flow(attrs={"nproc_per_node": 2, "warm": "workers"}, runs_=launches)
    for node, rank in ((0, 0), (1, 2)):
        line = rf"\[rank {rank}\] preflight: node {node} \(host \S+\): all-reduce over 4 ranks: {REDUCED}$"
        assert len(re.findall(line, run.text, re.MULTILINE)) == 1, run.text
    results = [task["results"] for task in run.note("end")["tasks"]]
    assert [[result["launch"] for result in each] for each in results] == [[1], [1]]
    assert sorted(rank for (result,) in results for rank in result["exit_codes"]) == sorted("0123", key=int)


# --- on hosts of their own ------------------------------------------------------------------------


@pytest.fixture
def trio(make_gang: Callable[..., Gang], make_host: Callable[[str], Host]) -> Gang:
    """Return a gang of three, on hosts that a switch connects."""
    hosts = [make_host(f"host-{letter}") for letter in "abc"]
    Switch(make_host("switch"), hosts)
    return make_gang(hosts)


def forbid_chosen_ports(hosts: list[Host]) -> None:
    """Leave the last host the two pinned ports only, in both directions; what else is sent fails at once."""
    last = "10.77.0.3"
    for host in hosts:
        to_last = [] if host is hosts[-1] else ["to", last]
        for preference, what in (("10", ["dport", PINNED]), ("11", ["sport", PINNED])):
            host.ip("rule", "add", "pref", preference, *to_last, "ipproto", "tcp", *what, "lookup", "main")
        host.ip("rule", "add", "pref", "20", *to_last, "ipproto", "tcp", "prohibit")


def test_a_node_that_its_neighbours_cannot_reach_is_named_on_every_node(trio: Gang) -> None:
    forbid_chosen_ports(list(trio.hosts))
    trio.start(3, settings=PORTS, entrypoint="check_links")
    assert [process.wait(60) for process in trio.processes.values()] == [1, 1, 1], trio.told
    for node in range(3):
        log = trio.log(node)
        assert "LaunchFailed: Rank 0 on node 0 (host host-a) failed with PreflightError: node 2 (host host-c)" in log
        assert "node 1 to node 2: [Errno 13]" in log
        assert "max_restarts" not in log
        assert trio.error(node)["cause"]["category"] == "network"
