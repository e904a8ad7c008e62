"""Gangs that do not come together as they should: nodes, ports and datastores that are late, taken or gone."""

from __future__ import annotations

import contextlib
import math
import socket
import time

import pytest
from limits import limit_s

HEARTBEAT_S = math.ceil(limit_s(2))
LATE_S = 2.0 * HEARTBEAT_S
STARTED_S = math.ceil(limit_s(3))
DATASTORE_S = 2  # a slow datastore takes so long for a call


@pytest.mark.parametrize("late", [1, 0], ids=["member", "control node"])
def test_a_node_that_starts_late(late, gang, recorder):
    """On Argo Workflows, nothing has the control node's pod start first."""
    gang.start(late={late: LATE_S}, settings={"heartbeat_timeout_s": HEARTBEAT_S})
    gang.await_workers()
    recorder.lasted(
        f"{'a node' if late else 'the control node'} starts later than a node may be silent", gang.end_well()
    )
    waits, comes = (gang.note(f"node-{node}.json") for node in (1 - late, late))
    if late:  # who comes first waits inside of run(), or for the control node's address
        assert waits["launches"][0]["seconds"] > LATE_S - 1
        assert comes["launches"][0]["seconds"] < waits["launches"][0]["seconds"] - LATE_S / 2
    else:
        assert waits["join_s"] > LATE_S - 1


@pytest.mark.parametrize(
    ("absent", "name", "said"),
    [(1, "a node", "node 1 of 3"), (0, "the control node", "node 0 (the control node)")],
    ids=["member", "control node"],
)
def test_a_node_that_never_starts(absent, name, said, gang, recorder):
    begun_at = time.monotonic()
    gang.start(3, absent=[absent], settings={"all_nodes_started_timeout": STARTED_S})
    outcome = gang.await_end(begun_at, {0, 1, 2} - {absent})
    recorder.silent(f"{name} never starts", outcome, STARTED_S)
    assert outcome.error["class"] == "GangStartTimeout"
    assert f"Waited {STARTED_S} s, but {said} did not arrive" in outcome.error["text"]


def test_a_port_that_is_taken_at_go(gang, recorder):
    """Somebody takes the chosen port before the agent listens on it; the launch moves, which is no restart."""
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as squatter:
        port = squatter.getsockname()[1]
        gang.start(squatted=port)
        gang.await_workers("launch0-1")
        recorder.lasted("the port chosen for the rendezvous is taken at go", gang.end_well())
    for node in range(2):
        assert gang.launch(node)["restarts"] == []
        assert f":{port} " not in gang.launch(node)["command"]
        assert "took the port of the rendezvous" in gang.log(node)


def test_a_datastore_that_is_slow(gang, recorder):
    gang.start(datastore="slow", launches=0)
    recorder.lasted(f"the datastore takes {DATASTORE_S} s a call", gang.end_well())
    assert gang.note("node-1.json")["join_s"] > DATASTORE_S  # it was slow indeed


def test_a_datastore_that_is_gone(gang, recorder):
    """Nobody can find anybody: every node says what it could not do, and none waits longer than for missing nodes."""
    begun_at = time.monotonic()
    gang.start(datastore="gone", settings={"all_nodes_started_timeout": STARTED_S})
    outcome = gang.await_end(begun_at, [0, 1])
    for error in outcome.errors.values():
        assert error["class"] in ("GangError", "GangStartTimeout")
        assert "datastore" in error["text"]
        assert "the datastore is not there" in error["text"]  # what it said itself
    recorder.silent("the datastore is gone", outcome, STARTED_S)
