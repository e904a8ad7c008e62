"""A launch that goes on after the loss of nodes: by spares, or with fewer nodes."""

from dataclasses import replace

import pytest
from test_state import GRACE_S, GangOf, crash, preemption

from metaflow_extensions.torchrun.plugins.torchrun.errors import TorchrunPreempted
from metaflow_extensions.torchrun.plugins.torchrun.gang.cause import Cause
from metaflow_extensions.torchrun.plugins.torchrun.gang.launch import change_of_nodes
from metaflow_extensions.torchrun.plugins.torchrun.gang.nodes import NodeState
from metaflow_extensions.torchrun.plugins.torchrun.gang.messages import (
    Abort,
    Bye,
    Go,
    Join,
    Prepares,
    Restart,
    Stop,
    Store,
    TaskEnded,
    Verdict,
)


def launched(num_nodes=4, max_restarts=3, **rules):
    gang = GangOf(num_nodes, **{"spare_nodes": 1, **rules})
    gang.all_ready(max_restarts=max_restarts)
    return gang


def groups(gang, node=0):
    return [go.group.nodes for go in gang.got(node, Go)]


def ended(gang, *nodes, generation=0):
    for node in nodes:
        gang.ended(node, ok=False, generation=generation)


def test_a_spare_waits_and_takes_the_place_of_a_lost_node_at_once():
    gang = launched()
    assert groups(gang) == groups(gang, 3) == [(0, 1, 2)]
    gang.lost(1)
    ended(gang, 0, 2)
    (restart,) = gang.got(3, Restart)
    assert (restart.number, restart.of, restart.pause_s, restart.left, restart.came) == (1, 3, 0.0, (1,), (3,))
    assert gang.state.due_at == gang.now
    gang.pass_time(0.0)
    assert groups(gang) == groups(gang, 3) == [(0, 1, 2), (0, 2, 3)]
    assert len(gang.got(1, Go)) == 1
    for node in (0, 2, 3):
        gang.ended(node, generation=1)
    assert gang.same_verdict(0, 2, 3) is None
    assert [each.node for each in gang.records if each.kind in ("left_out", "taken_in")] == [1, 3]


def test_a_spare_that_was_not_needed_leaves_and_the_next_launch_does_not_wait_for_it():
    gang = launched()
    gang.failed(1, crash(1))
    ended(gang, 0, 1, 2)
    gang.pass_time(31.0)
    for node in (0, 1, 2):
        gang.ended(node, generation=1)
    assert gang.same_verdict(0, 1, 2, 3) is None
    assert "node 3 leaves: launch 0 has ended well without it" in gang.notes(0)
    for node in (0, 1, 2):
        gang.ready(node, launch=1)
    assert groups(gang)[2:] == [(0, 1, 2)]
    gang.leave(3, crash(3, kind="step"))
    assert gang.state.without == set(), "its task may take its time to end"
    assert not gang.got(0, Stop)[1:]


def test_a_spare_stays_when_the_launch_has_failed():
    gang = launched(max_restarts=0)
    gang.failed(1, crash(1))
    ended(gang, 0, 1, 2)
    assert gang.same_verdict(0, 1, 2, 3) is not None
    for node in range(4):
        gang.ready(node, launch=1)
    assert groups(gang, 3) == [(0, 1, 2)] * 2


def test_without_a_spare_it_goes_on_with_fewer_nodes_down_to_the_least():
    gang = launched(4, spare_nodes=0, min_nodes=3)
    gang.lost(2)
    ended(gang, 0, 1, 3)
    gang.pass_time(0.0)
    assert groups(gang) == [(0, 1, 2, 3), (0, 1, 3)]
    gang.lost(1)
    ended(gang, 0, 3, generation=1)
    said = str(gang.same_verdict(0, 3))
    assert "Node 1" in said
    assert "can't go on without that node: 2 nodes are left, and it needs 3 (spare_nodes, min_nodes)." in said


def test_the_error_says_that_no_restart_is_left():
    gang = launched(max_restarts=1)
    gang.lost(1)
    ended(gang, 0, 2)
    gang.pass_time(0.0)
    gang.ended(0, crash(0), generation=1)
    ended(gang, 2, 3, generation=1)
    assert "go on without" not in str(gang.same_verdict(0, 2, 3))
    gang = launched(4, max_restarts=0)
    gang.lost(1)
    ended(gang, 0, 2)
    said = str(gang.same_verdict(0, 2, 3))
    assert "can't go on without that node: max_restarts=0 allows no more restarts." in said
    assert "With max_restarts=N" not in said


@pytest.mark.parametrize("rules", [{"spare_nodes": 0}, {"max_restarts": 0}])
def test_by_default_and_without_restarts_a_loss_ends_the_launch(rules):
    gang = launched(**rules)
    gang.lost(1)
    ended(gang, 0, 2, *([3] if rules.get("spare_nodes") == 0 else []))
    assert "Node 1" in str(gang.same_verdict(0, 2, 3))


def test_a_node_that_was_told_to_end_and_whose_step_ends_well_is_left_out():
    gang = launched()
    gang.failed(1, preemption(1))
    gang.give_up(1, preemption(1))
    gang.done(1)
    ended(gang, 0, 2)
    gang.pass_time(0.0)
    assert groups(gang) == [(0, 1, 2), (0, 2, 3)]


def test_the_loss_of_a_node_while_others_gather_lets_a_failed_command_end_the_launch():
    gang = GangOf(4, spare_nodes=1)
    gang.join(*range(4))
    gang.say(1, Prepares(0, 2))
    gang.failed(1, crash(1, kind="command"))
    for node in (0, 2):
        gang.ready(node)
    gang.lost(3)
    assert "before_run" in str(gang.same_verdict(0, 1, 2))


def test_another_port_is_tried_without_the_node_that_was_lost_meanwhile():
    gang = launched()
    taken = Cause("agent", 0, "host-0", exit_code=2, detail="EADDRINUSE")
    gang.failed(0, taken)
    gang.ended(0, taken, ok=False)
    gang.pass_time(1.0)
    gang.lost(1)
    ended(gang, 2)
    gang.pass_time(0.0)
    assert groups(gang) == [(0, 1, 2), (0, 2, 3)]
    assert gang.state.restarts_left == 3


def test_a_spare_that_is_told_to_end_while_it_waits_stops_nobody():
    gang = launched()
    gang.give_up(3, preemption(3))
    gang.leave(3, failed=True)
    assert not gang.got(0, Stop)
    for node in range(3):
        gang.ended(node)
    assert gang.same_verdict(0, 1, 2) is None
    assert gang.state.broken is None


def test_a_node_that_is_told_to_end_hears_that_alone_and_uses_up_no_restart():
    gang = launched(4, max_restarts=1)
    gang.failed(1, preemption(1))
    ended(gang, 0, 1, 2)
    assert isinstance(gang.verdict(1), TorchrunPreempted)
    gang.pass_time(0.0)
    gang.leave(1, failed=True)
    assert groups(gang) == [(0, 1, 2), (0, 2, 3)]
    assert gang.state.restarts_left == 1
    assert gang.state.broken is None
    assert not gang.got(0, Stop)[1:]


@pytest.mark.parametrize("how", ["lost", "told to end", "never comes"])
def test_a_node_that_goes_before_the_launch_begins_is_replaced_without_a_restart(how):
    gang = GangOf(4, spare_nodes=1, join=False, started_timeout_s=60.0)
    gang.join(0, 2, 3, *([] if how == "never comes" else [1]))
    for node in (0, 2, 3):
        gang.ready(node, max_restarts=0)
    if how == "lost":
        gang.lost(1)
    elif how == "told to end":
        gang.leave(1, preemption(1))
    else:
        gang.pass_time(61.0)
    assert groups(gang) == [(0, 2, 3)]
    assert not gang.got(0, Restart)


def test_a_loss_while_all_store_starts_the_workers_again():
    gang = launched(4)
    for node in range(3):
        gang.ended(node, stores=True)
    assert gang.got(0, Store)[0].group.nodes == (0, 1, 2)
    gang.lost(1)
    gang.pass_time(0.0)
    assert groups(gang) == [(0, 1, 2), (0, 2, 3)]


def test_the_control_node_is_not_replaced():
    gang = launched(4)
    gang.failed(0, preemption(0))
    ended(gang, 0, 1, 2)
    assert isinstance(gang.same_verdict(0, 1, 2, 3), TorchrunPreempted)


def test_a_node_whose_step_ends_because_another_cut_its_connection_is_left_out():
    gang = launched()
    gang.leave(1, Cause("lost", 1, "host-1", exception="nothing arrived from it"))
    ended(gang, 0, 2)
    gang.pass_time(0.0)
    assert groups(gang) == [(0, 1, 2), (0, 2, 3)]
    assert gang.state.nodes[1] is NodeState.OUT


def test_a_node_that_is_left_out_and_has_called_the_next_launch_is_answered():
    gang = launched()
    gang.give_up(1, preemption(1))
    gang.ready(1, launch=1)
    ended(gang, 0, 2)
    (verdict,) = [each for each in gang.got(1, Verdict) if each.launch == 1]
    assert isinstance(verdict.error, TorchrunPreempted)
    assert "The other nodes go on without it." in str(verdict.error)
    assert "@retry" not in str(verdict.error), "this run goes on"


def test_more_losses_in_the_pause_are_told_too():
    gang = launched(4)
    gang.failed(1, crash(1))
    ended(gang, 0, 1, 2)
    gang.lost(2)
    gang.pass_time(2.0)
    assert groups(gang) == [(0, 1, 2), (0, 1, 3)]
    last = gang.got(0, Restart)[-1]
    assert (last.number, last.left, last.came, last.size) == (1, (2,), (3,), 3)
    assert [each.kind for each in gang.records].count("restart") == 1


def test_a_crash_counts_even_if_a_node_was_told_to_end_after_it():
    gang = launched(max_restarts=1)
    gang.failed(2, crash(2), age_s=5.0)
    gang.failed(1, preemption(1))
    ended(gang, 0, 1, 2)
    gang.pass_time(2.0)
    assert gang.state.restarts_left == 0


def test_why_nothing_goes_on_is_what_was_missing():
    gang = launched()
    gang.state._launch.policy = replace(gang.state._launch.policy, restart_on=frozenset({"user"}))
    gang.lost(1)
    ended(gang, 0, 2)
    assert "can't go on without that node: restart_on does not have 'node_lost'." in str(gang.same_verdict(0, 2, 3))
    gang = launched()
    gang.lost(1)
    gang.give_up(2, crash(2, kind="call"))
    ended(gang, 0)
    assert "the call of run has ended on node 2, too" in str(gang.same_verdict(0, 3))


def test_a_node_that_comes_too_late_hears_so():
    gang = GangOf(4, spare_nodes=1, join=False, started_timeout_s=60.0)
    gang.join(0, 1, 2)
    for node in range(3):
        gang.ready(node, max_restarts=1)
    gang.pass_time(61.0)
    assert groups(gang) == [(0, 1, 2)]
    refused, _ = gang.state.turn_away(Join(3, "host-3", "a task", "a place"))
    assert "it has not joined in time (all_nodes_started_timeout), and the others go on" in str(refused.error)


@pytest.mark.parametrize(
    ("left", "came", "said"),
    [
        ((), (), ""),
        ((1,), (3,), "node 3, a spare, takes the place of node 1"),
        ((1, 2), (3, 4), "nodes 3, 4, spares, take the places of nodes 1, 2"),
        ((1, 2), (3,), "node 3, a spare, takes part; the launch goes on without nodes 1, 2, on 3 nodes"),
        ((1,), (), "the launch goes on without node 1, on 3 nodes"),
        ((1,), (1,), "node 1 is started again"),
        ((1, 2), (2, 3), "node 2 is started again; node 3, a spare, takes the place of node 1"),
    ],
)
def test_the_change_of_nodes_is_told(left, came, said):
    assert change_of_nodes(left, came, 3) == said


def test_a_node_that_is_lost_while_others_store_and_has_nothing_to_store_costs_nothing():
    gang = launched(max_restarts=0, spare_nodes=1)
    for node in range(3):
        gang.ended(node, stores=node == 0)
    gang.lost(1)
    assert gang.is_undecided()
    gang.stored(0)
    assert gang.same_verdict(0, 2, 3) is None
    assert gang.state.broken is None


def test_a_node_whose_workers_do_not_end_in_time_is_lost():
    gang = launched()
    gang.failed(2, crash(2))
    ended(gang, 0, 2)
    gang.pass_time(46.0)
    gang.pass_time(31.0)
    assert groups(gang) == [(0, 1, 2), (0, 2, 3)]
    said = gang.verdict(1)
    assert "it did not report in time that its workers had ended" in str(said)
    gang = launched(spare_nodes=0)
    gang.failed(2, crash(2))
    ended(gang, 0, 2, 3)
    gang.pass_time(46.0)
    assert "Node 1 did not report in time" in str(gang.same_verdict(0, 1, 2, 3))


def test_each_lost_node_is_named():
    gang = launched(5, spare_nodes=2)
    gang.lost(1)
    gang.lost(2, "its task was killed by SIGTERM")
    ended(gang, 0)
    assert any(note.startswith("node 2 (host host-2) failed: its task was killed by SIGTERM") for note in gang.notes(0))


def test_a_control_node_that_leaves_tells_the_others_how_it_ends():
    """Their workers may need longer to end than the channel stays open."""
    gang = GangOf(2)
    gang.all_ready()
    gang.give_up(0, preemption(0))
    gang.leave(0, preemption(0))
    assert "node 0 (host host-0) was preempted" in str(gang.verdict(1))
    sent = [type(message) for message in gang.sent[1]]
    assert sent.index(Verdict) < sent.index(Bye)


def test_a_node_that_has_not_called_run_hears_with_what_the_control_node_leaves():
    gang = GangOf(3)
    gang.ready(0)
    gang.ready(1)
    gang.give_up(1, preemption(1))
    gang.leave(0, failed=True)
    assert "node 1 (host host-1) was preempted" in str(gang.got(2, Abort)[0].error)
    sent = [type(message) for message in gang.sent[2]]
    assert sent.index(Abort) < sent.index(Bye)


@pytest.mark.parametrize("first", ["the supervisor", "the control node of a local run"])
def test_a_spare_waits_until_the_supervisor_of_a_lost_task_has_ended_its_workers(first):
    """They may save for all of their grace, and must not live beside those of the same ranks."""
    gang = GangOf(4, spare_nodes=1)
    gang.all_ready(max_restarts=1)
    said = "its task was killed by SIGKILL"
    tell = [lambda: gang.say(1, TaskEnded(said)), lambda: gang.post(gang.state.lost(1, said, is_connected=True))]
    for each in tell if first == "the supervisor" else reversed(tell):
        each()
    ended(gang, 0, 2)
    gang.pass_time(5.0)
    assert groups(gang) == [(0, 1, 2)]
    gang.post(gang.state.disconnected(1, "its connection was closed"))
    gang.pass_time(0.0)
    assert groups(gang) == [(0, 1, 2), (0, 2, 3)]


def test_a_spare_waits_no_longer_than_nodes_have_to_stop():
    gang = GangOf(4, spare_nodes=1)
    gang.all_ready(max_restarts=1)
    gang.say(1, TaskEnded("its task was killed by SIGKILL"))
    ended(gang, 0, 2)
    gang.pass_time(GRACE_S + 16.0)
    gang.pass_time(0.0)
    assert groups(gang) == [(0, 1, 2), (0, 2, 3)]


def test_the_loss_of_the_control_nodes_task_ends_the_launch_as_soon_as_the_others_have_ended():
    """Its supervisor holds the gang only until they know."""
    gang = GangOf(3)
    gang.all_ready()
    gang.say(0, TaskEnded("its task was killed by SIGKILL"))
    ended(gang, 1, 2)
    assert "Node 0 (host host-0) failed: its task was killed by SIGKILL" in str(gang.same_verdict(1, 2))
