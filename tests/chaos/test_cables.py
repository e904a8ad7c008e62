"""Gangs whose network is cut; each node runs on a host of its own, see tests/hosts.py."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable

import pytest
from gangs import END_S, Gang
from hosts import Host, Switch
from limits import limit_s

HEARTBEAT_S = math.ceil(limit_s(2))


@pytest.fixture
def hosts(make_host: Callable[[str], Host]) -> list[Host]:
    return [make_host(f"host-{letter}") for letter in "abc"]


@pytest.fixture
def switch(hosts: list[Host], make_host: Callable[[str], Host]) -> Switch:
    """Return the bridge that connects the hosts."""
    return Switch(make_host("switch"), hosts)


@pytest.mark.parametrize("cut", [0, 2], ids=["control node", "member"])
def test_a_cut_that_is_mended_too_late(cut, make_gang, hosts, switch, recorder):
    """Both sides give up within the time that silence may last, and stay so when they can talk again."""
    gang = make_gang(hosts)
    gang.start(3, settings={"heartbeat_timeout_s": HEARTBEAT_S}, launches=2)
    gang.await_workers()
    struck_at = time.monotonic()
    switch.cut(cut)
    together = [node for node in range(3) if node != cut]
    gang.await_launch(0)  # both sides give up
    switch.mend(cut)
    gang.begin_launch(1)  # now all call run() again, with nothing between them
    outcome = gang.await_end(struck_at, together)
    recorder.silent(f"cut of {'the control node' if cut == 0 else 'one node'}, mended too late", outcome, HEARTBEAT_S)
    silence = f"nothing arrived from it for {HEARTBEAT_S} s (heartbeat_timeout_s)"
    for launch in range(2):
        (said,) = {gang.launch(node, launch)["text"] for node in together}
        alone = gang.launch(cut, launch)["text"]
        assert f"Node 0 (the control node) is lost: {silence}" in (said if cut == 0 else alone)
        assert re.search(rf"\(host host-[bc]\) failed: {re.escape(silence)}", alone if cut == 0 else said)
    assert gang.lost_bytes([cut]) == 0


def test_a_cut_while_a_spare_waits(make_gang, hosts, switch, recorder):
    """The spare takes the node's place. The gang doesn't take back the node's task; another one is a spare."""
    gang = make_gang(hosts)
    gang.start(
        3,
        settings={"heartbeat_timeout_s": HEARTBEAT_S, "spare_nodes": 1},
        launches=2,
        absent=[2],
        stand_in=True,
        max_restarts=1,
    )
    gang.await_workers(num_nodes=2)
    gang.start_node(2)  # who comes last is the spare
    switch.cut(1)
    gang.await_workers("launch0-1", num_nodes=2)
    switch.mend(1)
    replace_node_1(gang)
    gang.let_go()
    gang.begin_launch(1)  # of nodes 0 and 2
    outcome = gang.await_end(time.monotonic(), [0, 2])
    recorder.lasted("cut of one node; a spare comes, and the node is not taken back", outcome)
    silence = f"node 1 (host host-b) failed: nothing arrived from it for {HEARTBEAT_S} s (heartbeat_timeout_s)"
    for node in (0, 2):
        assert gang.note(f"node-{node}.json").get("ended_well"), gang.told
        assert [launch["nodes"] for launch in gang.launches(node)] == [[0, 2]] * 2
        ((left, came),) = [(each["left"], each["came"]) for each in gang.launch(node)["restarts"]]
        assert (left, came) == ([1], [2])
        told = f": all workers start again, because {silence}; node 2, a spare, takes the place of node 1\n"
        assert told in gang.log(node)
    assert "node 1 leaves: launch 0 has ended well without it\n" in gang.log(0)
    on = [[gang.note(f"worker-launch0-{generation}-{rank}")["node"] for rank in (0, 1)] for generation in (0, 1)]
    assert on == [[0, 1], [0, 2]]


def replace_node_1(gang: Gang) -> None:
    """Let the task of node 1 call `run` again, and then another task come in its place, while the others train."""
    gang.await_that(lambda: gang.launches(1), "the end of the launch on node 1")
    gang.begin_launch(1)
    assert gang.processes[1].wait(limit_s(END_S)) == 1
    silence = f"nothing arrived from it for {HEARTBEAT_S} s (heartbeat_timeout_s)"
    assert [f"is lost: {silence}" in launch["text"] for launch in gang.launches(1)] == [True, True]
    assert gang.lost_bytes([1]) == 0
    (gang.out / "node-1.json").unlink()
    gang.start_node(1)  # the next spare
    assert gang.await_note("node-1.json")["join_s"] > 0
