"""`metaflow_torchrun.stopping`: all ranks stop at one call, and none waits for another."""

import asyncio
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from gang_of import GangOf, preemption
from limits import limit_s
from metaflow_torchrun import stopping
from unit_helpers import write

from metaflow_extensions.torchrun.plugins.torchrun.gang import messages as say
from metaflow_extensions.torchrun.plugins.torchrun.gang.limits import NODES_MARGIN_S
from metaflow_extensions.torchrun.plugins.torchrun.gang.questions import NO_WORKERS, PREEMPTED, Question
from metaflow_extensions.torchrun.plugins.torchrun.show.words import sentence
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.call import Call
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.calls import CallCounts

# It calls it again and again, each rank at its own speed; it leaves after so many calls, or when it is told to.
LOOP = """
import os, sys, time
from metaflow_torchrun import stopping
pause_s, calls = float(sys.argv[1]), int(sys.argv[2])
for call in range(1, calls + 1):
    if stopping():
        print(call)
        break
    if pid := call == 3 and os.fork():
        os.waitpid(pid, 0)
    elif call == 3:
        os._exit(stopping())  # a fork of it is no rank
    print(end="", flush=True)
    time.sleep(pause_s)
"""


class Node:
    """Three ranks of a node, as its supervisor sees them."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "metrics").mkdir()
        call = Call("loop.py", (), False, nproc=3, num_nodes=2, node_index=1, python=sys.executable)
        self.workers = SimpleNamespace(call=call, folder=str(folder), codes={})
        self.calls = CallCounts(self.workers)

    def start(self, local_rank, pause_s, calls):
        env = {**os.environ, "TORCHRUN_CALLS": str(self.folder / "metrics" / f"{local_rank}.calls")}
        command = [sys.executable, "-c", LOOP, str(pause_s), str(calls)]
        return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)

    def until_calling(self, *ranks):
        deadline = time.monotonic() + limit_s(20)
        while self.calls.calling() != list(ranks):
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def hold(self, needs_all=True):
        return asyncio.run(self.calls.hold(needs_all))


@pytest.fixture
def node(tmp_path):
    return Node(tmp_path)


def test_all_ranks_stop_at_the_call_that_the_slowest_can_still_reach(node):
    loops = [node.start(rank, pause_s, 10**6) for rank, pause_s in enumerate((0.0, 0.001, 0.02))]
    node.until_calling(3, 4, 5)
    call = node.hold()
    assert node.hold(needs_all=False) == call  # as an order to end that comes after a command's
    node.calls.stop_at(call)
    assert [int(loop.communicate()[0]) for loop in loops] == [call] * 3
    node.calls.stop_at(call + 5)  # a second command
    assert node.hold() == call


def test_where_the_first_order_has_stopped_nothing_a_second_one_counts_anew(node):
    loop = node.start(0, 0.3, 10**6)
    node.until_calling(3)
    while not (waits := node.hold(needs_all=False)) or node.calls._pages[3][2] != waits:
        time.sleep(0.01)  # it waits in that call
    node.calls.stop_at(0)
    time.sleep(0.1)  # it has gone on into the step after it, and can stop at the next call only
    assert node.hold(needs_all=False) == waits + 1
    node.calls.stop_at(waits + 1)
    assert not node.calls.have_stopped()
    assert int(loop.communicate()[0]) == waits + 1
    assert node.calls.have_stopped()


def test_a_rank_that_never_calls_it_keeps_all_others_going_for_a_command(node):
    loops = [node.start(rank, 0.001, 2000) for rank in (0, 2)]
    node.until_calling(3, 5)
    assert node.hold() == 0
    node.workers.codes[4] = 0  # it has ended
    assert node.hold() > 0
    node.calls.stop_at(0)
    for loop, rank in zip(loops, (3, 5), strict=True):
        assert loop.communicate()[0] == ""
        node.workers.codes[rank] = 0
    assert node.calls.calling() == []


def test_without_room_for_a_page_ranks_train_and_are_not_told_to_stop(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    node = Node(tmp_path)
    assert node.start(0, 0.0, 20).communicate()[0] == ""
    assert (node.hold(), node.calls.calling()) == (0, [])


def test_outside_of_a_launch_it_is_false(tmp_path, monkeypatch):
    assert not stopping()
    monkeypatch.setenv("TORCHRUN_CALLS", str(write(tmp_path / "folder" / "file", "")) + "-gone")
    assert subprocess.run([sys.executable, "-c", LOOP, "0", "5"], check=True, stdout=subprocess.PIPE).stdout == b""


@pytest.mark.parametrize(
    ("needs_all", "told", "call", "why"),
    [
        (True, {0: 7, 1: 9}, 9, None),
        (True, {0: 7, 1: None}, 0, "node 1 did not answer in time"),
        (True, {0: 7, 1: 0}, 0, "on node 1, not all ranks have called metaflow_torchrun.stopping()"),
        (
            True,
            {0: 7, 1: "failed: a bug of ours"},
            0,
            "on node 1, not all ranks have called metaflow_torchrun.stopping()",
        ),
        (True, {0: 7, 1: NO_WORKERS}, 7, None),
        (True, {0: NO_WORKERS}, 0, "its workers have ended meanwhile"),
        (False, {0: 7, 1: 0}, 7, None),  # all end in any case
        (False, {0: 7, 1: None}, 7, None),
        (False, {0: 0, 1: 0}, 0, "on nodes 0, 1, not all ranks have called metaflow_torchrun.stopping()"),
    ],
)
def test_the_call_is_the_last_of_those_in_which_the_ranks_wait(needs_all, told, call, why):
    question = Question("stop", (0, 0), told, 4.0)
    for node, found in told.items():
        if found is not None:
            question.keep(node, found)
    assert (question.is_over(3.9, {*told}), question.is_over(4.0, {*told})) == (None not in told.values(), True)
    assert question.agreed_call(needs_all) == (call, why or "")


def running():
    gang = GangOf(2)
    gang.all_ready(max_restarts=1)
    return gang


def stop(gang, asked="id"):
    gang.post(gang.state.ask(asked, "stop", {"needs_all": True}))


def calls(gang, asked, *told):
    for node, call in enumerate(told):
        gang.say(node, say.Report("answer", 0, 0, {"id": asked, "found": call}))


def test_a_command_ends_a_launch_well_for_all():
    gang = running()
    stop(gang)
    assert [(ask.id, ask.what) for ask in gang.got(1, "Ask")] == [("id", "stop")]
    assert gang.state.answers == {}
    calls(gang, "id", 4, 6)
    assert [at.call for node in (0, 1) for at in gang.got(node, "StopAt")] == [6, 6]
    assert gang.state.answers == {"id": {"call": 6, "why": ""}}
    gang.all_ended(stopped=True)
    assert [(end.error, end.stopped) for end in gang.got(1, "Verdict")] == [(None, True)]
    assert "have ended well, stopped by a command: trained" in sentence(gang.state.view)
    stop(gang, "late")
    assert gang.state.answers["late"]["why"] == "no worker runs, or all are about to end"


def test_a_command_stops_nothing_where_a_node_does_not_answer():
    gang = running()
    stop(gang)
    calls(gang, "id", 4)
    gang.pass_time(NODES_MARGIN_S)
    assert [at.call for at in gang.got(0, "StopAt")] == [0]
    assert gang.state.answers["id"]["why"] == "node 1 did not answer in time"
    gang.all_ended()
    assert [end.stopped for end in gang.got(1, "Verdict")] == [False]


def test_before_a_loss_the_ranks_stop_at_one_call():
    gang = running()
    stop(gang)
    gang.failed(1, preemption())
    gang.pass_time(1)
    assert [(ask.id, ask.of["needs_all"]) for ask in gang.got(1, "Ask")] == [("id", True), (PREEMPTED, False)]
    assert gang.state.answers["id"]["why"] == "no worker runs, or all are about to end"
    calls(gang, "id", 9, 9)
    assert gang.got(0, "StopAt") == []
    calls(gang, PREEMPTED, 4, 5)
    assert [at.call for at in gang.got(0, "StopAt")] == [5]
    gang.all_ended(ok=True)
    assert not any(end.stopped for end in gang.got(1, "Verdict"))
