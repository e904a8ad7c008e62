"""Who is in, who is ready, what was decided; with a clock that the test holds."""

import math
import signal
from dataclasses import fields

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from metaflow_extensions.torchrun.plugins.torchrun.errors import (
    GangError,
    GangStartTimeout,
    LaunchFailed,
    LaunchHung,
    LaunchTimeout,
    TorchrunPreempted,
    from_wire,
)
from metaflow_extensions.torchrun.plugins.torchrun.failure import Cause
from metaflow_extensions.torchrun.plugins.torchrun.gang import Gang, Settings
from metaflow_extensions.torchrun.plugins.torchrun.launch_state import names
from metaflow_extensions.torchrun.plugins.torchrun.policy import LaunchPolicy

FACTS = {"nproc": 2, "torch": "2.13.0", "python": "3.11.7", "digest": "abc"}
POLICY = {field.name for field in fields(LaunchPolicy)}
GRACE_S = 30.0


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Table:
    """A gang and the mail of its nodes."""

    def __init__(self, num_nodes=3, started_timeout_s=600.0, taken=(), join=True):
        self.clock = Clock()
        self.ports = iter(range(40001, 41000))
        self.taken = set(taken)
        self.gang = Gang(Settings(num_nodes, started_timeout_s, GRACE_S), self._pick, self.clock)
        self.num_nodes = num_nodes
        self.mail = {node: [] for node in range(num_nodes)}
        if join:
            for node in range(num_nodes):
                self.join(node)

    def _pick(self, pinned):
        return next(self.ports) if pinned is None else None if pinned in self.taken else pinned

    def post(self, outgoing):
        for node, message in outgoing:
            self.mail[node].append(message)

    def join(self, node):
        self.post(self.gang.handle(node, {"type": "join", "node": node, "host": f"host-{node}"}))

    def ready(self, node, launch=0, **said):
        policy = {name: said.pop(name) for name in POLICY & said.keys()}
        message = {"type": "ready", "launch": launch, **FACTS, "policy": LaunchPolicy(**policy).to_wire(), **said}
        self.post(self.gang.handle(node, message))

    def all_ready(self, launch=0, **facts):
        for node in range(self.num_nodes):
            self.ready(node, launch, **facts)

    def failed(self, node, *causes, launch=0, generation=0, age_s=0.0):
        self._report("failed", node, causes, launch, generation, age_s)

    def ended(self, node, *causes, ok=None, launch=0, generation=0, age_s=0.0, **more):
        ok = not causes if ok is None else ok
        self._report("ended", node, causes, launch, generation, age_s, ok=ok, **more)

    def stored(self, node, keys, *causes, launch=0, generation=0):
        self._report("stored", node, causes, launch, generation, 0.0, keys=keys)

    def _report(self, kind, node, causes, launch, generation, age_s, **more):
        entries = [{"cause": cause.to_wire(), "age_s": age_s} for cause in causes]
        message = {"type": kind, "launch": launch, "generation": generation, "causes": entries, **more}
        self.post(self.gang.handle(node, message))

    def leave(self, node, cause=None, failed=None):
        failed = cause is not None if failed is None else failed
        self.post(self.gang.handle(node, {"type": "leave", "cause": cause and cause.to_wire(), "failed": failed}))

    def give_up(self, node, cause, launch=0):
        """Do what a node does whose `run` is ended by an exception of its own."""
        causes = [{"cause": cause.to_wire(), "age_s": 0.0}]
        self.post(self.gang.handle(node, {"type": "failed", "launch": launch, "causes": causes, "given_up": True}))
        ended = {"type": "ended", "launch": launch, "ok": False, "causes": [], "given_up": True}
        self.post(self.gang.handle(node, ended))

    def done(self, node):
        self.post(self.gang.handle(node, {"type": "done"}))

    def lost(self, node, reason="its task was killed by SIGKILL"):
        self.post(self.gang.lost(node, reason))

    def pass_time(self, seconds):
        self.clock.now += seconds
        self.post(self.gang.tick())

    def got(self, node, kind):
        return [message for message in self.mail[node] if message["type"] == kind]

    def verdict(self, node):
        (verdict,) = self.got(node, "verdict")
        return verdict["error"] and from_wire(verdict["error"])

    def same_verdict(self, *nodes):
        """Return the one verdict that all nodes got."""
        verdicts = [self.got(node, "verdict") for node in nodes or range(self.num_nodes)]
        assert all(len(got) == 1 for got in verdicts), verdicts
        assert all(got[0]["error"] == verdicts[0][0]["error"] for got in verdicts)
        error = verdicts[0][0]["error"]
        return error and from_wire(error)

    def abort(self, node):
        (abort,) = self.got(node, "abort")
        return from_wire(abort["error"])


def crash(node=1, text="ValueError: loss is nan", kind="exception", code=1):
    return Cause(kind, node, f"host-{node}", node * 2, 0, code, text)


# --- the good way --------------------------------------------------------------------------------


def test_every_node_is_welcomed_with_what_it_must_know():
    table = Table(3)
    for node in range(3):
        assert table.got(node, "welcome") == [{"type": "welcome", "num_nodes": 3, "grace_s": GRACE_S}]


def test_nothing_goes_before_all_are_ready_then_all_go_at_once_to_one_port():
    table = Table(3)
    table.ready(2)
    table.ready(0)
    assert not any(table.got(node, "go") for node in range(3))
    table.ready(1)
    goes = [table.got(node, "go") for node in range(3)]
    assert goes[0] == goes[1] == goes[2]
    assert len(goes[0]) == 1
    assert (goes[0][0]["launch"], goes[0][0]["generation"], goes[0][0]["port"]) == (0, 0, 40001)


def test_success_on_all_nodes_is_success():
    table = Table(3)
    table.all_ready()
    for node in (1, 2):
        table.ended(node)
    assert not any(table.got(node, "verdict") for node in range(3))
    table.ended(0)
    assert table.same_verdict() is None


def test_launches_follow_each_other_with_ports_of_their_own():
    table = Table(2)
    for launch in range(3):
        table.all_ready(launch, nproc=launch + 1)
        for node in (0, 1):
            table.ended(node, launch=launch)
    assert [go["launch"] for go in table.got(1, "go")] == [0, 1, 2]
    assert len({go["port"] for go in table.got(1, "go")}) == 3
    assert [verdict["launch"] for verdict in table.got(1, "verdict")] == [0, 1, 2]


def test_a_gang_of_one_needs_nobody_else():
    table = Table(1)
    table.all_ready()
    table.ended(0)
    assert table.same_verdict() is None
    assert not table.gang.members


def test_the_control_nodes_pinned_port_counts():
    table = Table(2)
    table.all_ready(master_port=29500)
    assert table.got(1, "go")[0]["port"] == 29500


def test_messages_of_strangers_and_nonsense_are_ignored():
    table = Table(2)
    for node, message in ((7, {"type": "ready", "launch": 0}), (0, {"type": "dance"}), (0, {}), (-1, {"type": "join"})):
        assert table.gang.handle(node, message) == []


# --- joining -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("missing", "named"), [([1], "node 1 of 3"), ([1, 2], "nodes 1, 2 of 3")])
def test_missing_nodes_are_named_with_time_and_setting(missing, named):
    table = Table(3, started_timeout_s=90.0, join=False)
    present = [node for node in range(3) if node not in missing]
    for node in present:
        table.join(node)
    table.ready(0)
    table.pass_time(89.0)
    assert not table.got(0, "abort")
    table.pass_time(1.1)
    for node in present:
        error = table.abort(node)
        assert isinstance(error, GangStartTimeout)
        assert f"Waited 90 s, but {named}" in str(error)
        assert "all_nodes_started_timeout" in str(error)


def test_the_timeout_is_said_once():
    table = Table(2, started_timeout_s=5.0, join=False)
    table.join(0)
    for _ in range(3):
        table.pass_time(10.0)
    assert len(table.got(0, "abort")) == 1


def test_a_node_that_comes_after_the_timeout_learns_why_it_is_too_late():
    table = Table(2, started_timeout_s=5.0, join=False)
    table.join(0)
    table.pass_time(6.0)
    table.join(1)
    assert str(table.abort(1)) == str(table.abort(0))


def newcomer(node, task="b", place="pod-b"):
    return {"type": "join", "node": node, "host": f"host-{node}", "task": task, "place": place}


def test_a_second_task_in_another_pod_means_that_the_first_is_being_replaced():
    table = Table(2, join=False)
    table.join(0)
    table.post(table.gang.handle(1, newcomer(1, "a", "pod-a")))
    table.all_ready()
    for task in ("b", "c"):  # however many come
        assert not table.gang.may_join(1, newcomer(1, task))
        error, hold_s, out = table.gang.turn_away(1, newcomer(1, task))
        table.post(out)
        assert isinstance(error, TorchrunPreempted)
        assert "the task that it is to replace still runs (host host-1), and all ranks may save" in str(error)
        assert hold_s == GRACE_S + 15.0
    (replaced,) = table.got(1, "replaced")
    assert "another task of this node has started" in replaced["why"]
    assert [note["text"] for note in table.got(0, "note")] == [
        "node 1 (host host-1) is being replaced: another task of this node has come"
    ]


def test_a_gang_that_ends_already_is_not_told_again():
    table = Table(2)
    table.all_ready()
    table.failed(1, Cause("terminated", 1, "host-1", exception="its pod got SIGTERM"))
    _, hold_s, out = table.gang.turn_away(1, newcomer(1))
    assert hold_s > GRACE_S
    assert out == []


def test_a_replacement_that_comes_after_the_end_of_its_node_is_told_so():
    table = Table(2)
    table.lost(1)
    error, hold_s, out = table.gang.turn_away(1, newcomer(1))
    assert "the task that it is to replace has ended (host host-1)" in str(error)
    assert hold_s > GRACE_S  # the others may still save
    assert out == []


def test_a_second_task_in_the_same_place_is_a_mistake_and_harms_nobody():
    table = Table(2, join=False)
    table.post(table.gang.handle(1, newcomer(1, "a")))
    assert not table.gang.may_join(1, newcomer(1, "b"))
    error, hold_s, out = table.gang.turn_away(1, newcomer(1, "b"))
    assert "another task of this attempt has the same node index" in str(error)
    assert not isinstance(error, TorchrunPreempted)
    assert (hold_s, out) == (0.0, [])
    assert "there are 2 nodes in this gang" in str(table.gang.turn_away(7, newcomer(7))[0])


def test_a_member_that_has_not_heard_its_welcome_may_come_again():
    table = Table(2, join=False)
    table.post(table.gang.handle(1, newcomer(1)))
    assert table.gang.may_join(1, newcomer(1))
    table.post(table.gang.handle(1, newcomer(1)))
    assert len(table.got(1, "welcome")) == 2


def test_slow_user_code_after_joining_is_not_a_late_start():
    table = Table(2, started_timeout_s=5.0)
    table.ready(0)
    table.pass_time(10_000.0)
    assert not table.got(0, "abort")
    table.ready(1)
    assert table.got(0, "go")


def test_who_waits_for_a_node_in_its_own_code_is_told_now_and_then():
    table = Table(4, join=False)
    for node in (0, 1, 2):
        table.join(node)
    table.ready(0)
    table.pass_time(9.0)
    assert not table.got(0, "note")
    table.pass_time(1.0)
    (note,) = table.got(0, "note")
    assert note["text"] == "launch 0 waits for node 3 to start and for nodes 1, 2 to call current.torch.run"
    assert not table.got(1, "note")
    table.join(3)
    table.ready(1)
    table.pass_time(29.0)
    table.pass_time(1.0)
    assert table.got(0, "note")[1:] == table.got(1, "note")
    assert table.got(1, "note")[0]["text"] == "launch 0 waits for nodes 2, 3 to call current.torch.run"


def test_a_seat_is_taken_once():
    table = Table(3, join=False)
    assert table.gang.may_join(1, {})
    table.join(1)
    assert not table.gang.may_join(1, {})
    table.lost(1)
    assert not table.gang.may_join(1, {})
    assert not table.gang.may_join(3, {})
    assert not table.gang.may_join(-1, {})


# --- contradictions ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fact", "value", "named"),
    [
        ("torch", "2.5.1", "torch version"),
        ("python", "3.10.1", "Python version"),
        ("nproc", 4, "processes per node"),
        ("digest", "xyz", "entrypoint and torchrun options"),
        ("launch", 7, "launch number"),
    ],
)
def test_a_contradiction_names_nodes_and_values_and_nothing_starts(fact, value, named):
    table = Table(3)
    table.ready(0)
    table.ready(1)
    table.ready(2, **{fact: value})
    error = table.same_verdict()
    assert isinstance(error, GangError)
    assert named in str(error)
    assert f"nodes 0, 1: {FACTS.get(fact, 0)}" in str(error)
    assert f"node 2: {value}" in str(error)
    assert not table.got(0, "go")


def test_after_a_contradiction_the_nodes_may_try_again():
    table = Table(2)
    table.ready(0)
    table.ready(1, nproc=9)
    table.all_ready(launch=1)
    assert len(table.got(0, "go")) == 1


def test_a_pinned_port_that_is_taken_is_named_on_every_node():
    table = Table(2, taken=[29500])
    table.all_ready(master_port=29500)
    error = table.same_verdict()
    assert isinstance(error, GangError)
    assert "Port 29500 is taken on the control node (host host-0)" in str(error)
    assert "master_port" in str(error)


PORT_TAKEN = Cause(
    "agent", 0, "host-0", exit_code=1, exception="its torchrun agent exited", detail="... EADDRINUSE ..."
)


def test_a_port_that_is_taken_after_it_was_chosen_is_replaced_and_counts_as_no_restart():
    table = Table(2)
    table.all_ready()
    table.ended(0, PORT_TAKEN)
    table.ended(1, ok=False)
    goes = table.got(1, "go")
    assert [go["generation"] for go in goes] == [0, 1]
    assert goes[0]["port"] != goes[1]["port"]
    assert not table.got(1, "restart")
    for node in range(2):
        table.ended(node, generation=1)
    assert table.same_verdict() is None


@pytest.mark.parametrize(("facts", "tries"), [({"master_port": 29500}, 1), ({}, 4)])
def test_moving_to_another_port_ends_and_never_leaves_a_pinned_one(facts, tries):
    table = Table(2)
    table.all_ready(**facts)
    for generation in range(tries):
        table.ended(0, PORT_TAKEN, generation=generation)
        table.ended(1, ok=False, generation=generation)
    assert len(table.got(0, "go")) == tries
    assert "EADDRINUSE" in str(table.same_verdict())


# --- failures while it runs ------------------------------------------------------------------------


def test_one_failure_stops_all_and_every_node_gets_the_same_verdict():
    table = Table(3)
    table.all_ready()
    table.failed(1, crash(1))
    assert all(len(table.got(node, "stop")) == 1 for node in range(3))
    assert not table.got(0, "verdict")
    table.ended(1, crash(1))
    table.ended(0, ok=False)
    table.ended(2, ok=False)
    error = table.same_verdict()
    assert isinstance(error, LaunchFailed)
    assert "Rank 2 on node 1 (host host-1) failed with ValueError: loss is nan" in str(error)
    assert error.cause["node"] == 1


def test_stop_is_said_once_however_many_fail():
    table = Table(3)
    table.all_ready()
    for node in range(3):
        table.failed(node, crash(node))
    assert len(table.got(0, "stop")) == 1


def test_the_first_failure_counts_even_if_it_is_reported_last():
    table = Table(2)
    table.all_ready()
    table.clock.now += 100
    table.ended(0, crash(0, "KeyError: second"), age_s=1.0)
    table.clock.now += 5
    table.ended(1, crash(1, "ValueError: first"), age_s=20.0)
    assert "ValueError: first" in str(table.same_verdict())


def test_the_origin_beats_a_broken_connection_that_was_seen_earlier():
    table = Table(2)
    table.all_ready()
    table.failed(0, crash(0, "RuntimeError: Connection closed by peer"))
    table.clock.now += 1
    table.ended(1, crash(1, "ValueError: origin"))
    table.ended(0, crash(0, "RuntimeError: Connection closed by peer"), age_s=1.0)
    assert "ValueError: origin" in str(table.same_verdict())


def test_an_end_without_success_and_without_cause_is_still_a_failure():
    table = Table(2)
    table.all_ready()
    table.ended(0, ok=False)
    table.ended(1)
    assert isinstance(table.same_verdict(), LaunchFailed)


def test_a_silent_node_does_not_hold_up_the_verdict_for_ever():
    table = Table(3)
    table.all_ready()
    table.ended(1, crash(1))
    table.ended(0, ok=False)
    table.pass_time(GRACE_S)
    assert not table.got(0, "verdict")
    table.pass_time(60.0)
    error = table.same_verdict()
    assert "loss is nan" in str(error)
    assert "No word came from node 2" in str(error)


def test_reports_after_the_verdict_change_nothing():
    table = Table(2)
    table.all_ready()
    for node in (0, 1):
        table.ended(node, crash(node))
    before = {node: list(mail) for node, mail in table.mail.items()}
    table.ended(1, crash(1, "another"))
    table.failed(0, crash(0))
    table.pass_time(1000.0)
    assert table.mail == before


def test_reports_of_another_launch_or_generation_are_ignored():
    table = Table(2)
    table.all_ready(max_restarts=1)
    table.ended(0, crash(0), launch=5)
    table.failed(0, crash(0), generation=3)
    assert not table.got(0, "stop")


def test_after_a_failure_the_nodes_may_launch_again():
    table = Table(2)
    table.all_ready()
    for node in (0, 1):
        table.ended(node, crash(1))
    table.all_ready(launch=1)
    assert len(table.got(0, "go")) == 2


# --- lost and leaving nodes ------------------------------------------------------------------------


def test_a_lost_node_stops_the_others_and_is_the_cause():
    table = Table(3)
    table.all_ready()
    table.lost(2)
    assert table.got(0, "stop")
    table.ended(0, ok=False)
    table.ended(1, crash(1, "RuntimeError: Connection reset by peer"))
    error = table.same_verdict(0, 1)
    assert "Node 2 (host host-2) failed: its task was killed by SIGKILL" in str(error)


def test_a_node_lost_before_run_breaks_the_gang_wherever_the_others_are():
    table = Table(3)
    table.lost(1, "its task ended")
    assert str(table.abort(0)) == str(table.abort(2))
    assert isinstance(table.abort(0), LaunchFailed)
    assert "outside of current.torch.run" in str(table.abort(0))


def test_a_node_lost_while_others_wait_for_it_gives_one_verdict():
    table = Table(3)
    table.ready(0)
    table.lost(1)
    assert "Node 1 (host host-1) failed" in str(table.verdict(0))
    assert str(table.abort(2)) == str(table.verdict(0))


def test_a_node_that_never_joined_can_be_lost_too():
    table = Table(2, join=False)
    table.join(0)
    table.lost(1, "its task ended at once, before it joined")
    assert "before it joined" in str(table.abort(0))


def test_a_node_that_left_is_not_lost_afterwards():
    table = Table(2)
    table.leave(1)
    table.lost(1)
    assert not table.got(0, "abort")


def test_after_losing_a_node_no_launch_begins():
    table = Table(2)
    table.all_ready()
    table.lost(1)
    table.ended(0, ok=False)
    table.ready(0, launch=1)
    assert [verdict["launch"] for verdict in table.got(0, "verdict")] == [0, 1]
    assert len(table.got(0, "go")) == 1


def test_leaving_is_acknowledged_once():
    table = Table(2)
    table.leave(1)
    table.leave(1)
    assert len(table.got(1, "ack")) == 1


def step_failure(node):
    return Cause("step", node, f"host-{node}", exception="KeyError: 'x'", detail="Traceback (most recent call last):")


def test_an_exception_in_the_steps_code_before_run_breaks_the_gang():
    table = Table(3)
    table.leave(1, step_failure(1))
    for node in (0, 2):
        assert "Node 1 (host host-1) failed with KeyError: 'x'" in str(table.abort(node))
    assert table.got(1, "ack")
    table.ready(0)
    assert "KeyError: 'x'" in str(table.verdict(0))


def test_an_exception_while_others_wait_is_their_verdict():
    table = Table(3)
    table.ready(0)
    table.ready(2)
    table.leave(1, step_failure(1))
    assert "before launch 0 began" in str(table.same_verdict(0, 2))


def test_an_exception_of_a_node_in_a_launch_stops_it():
    table = Table(3)
    table.all_ready()
    table.leave(1, step_failure(1))
    table.ended(0, ok=False)
    table.ended(2, ok=False)
    assert "KeyError: 'x'" in str(table.same_verdict(0, 2))


def test_an_exception_after_the_last_launch_reaches_nodes_that_are_still_there():
    table = Table(3)
    table.all_ready()
    for node in range(3):
        table.ended(node)
    table.leave(2)
    table.leave(1, step_failure(1))
    assert table.abort(0)
    assert not table.got(2, "abort")


def test_a_node_that_leaves_while_others_wait_called_run_less_often():
    table = Table(3)
    table.ready(0)
    table.leave(2)
    error = table.verdict(0)
    assert isinstance(error, GangError)
    assert "already ended on node 2" in str(error)
    assert "same number of times" in str(error)


@pytest.mark.parametrize("first", ["control node", "member"])
def test_a_control_node_that_calls_run_less_often_is_named_and_fails_as_well(first):
    table = Table(3)
    table.all_ready()
    for node in range(3):
        table.ended(node)
    if first == "control node":
        table.done(0)
        table.ready(1, 1)
    else:
        table.ready(1, 1)
        table.done(0)
    error = from_wire(table.got(1, "verdict")[1]["error"])
    assert isinstance(error, GangError)
    assert "the step's code has already ended on node 0." in str(error)
    assert "same number of times" in str(error)
    table.done(2)
    table.leave(2)
    assert not table.got(0, "abort")  # node 1 may catch it
    table.leave(1, failed=True)
    assert str(table.abort(0)) == str(error)


def test_a_control_node_that_is_done_hears_when_it_is_alone():
    table = Table(3)
    table.leave(1)
    table.done(0)
    assert not table.got(0, "alone")
    table.done(2)
    assert not table.got(0, "alone")
    table.leave(2)
    assert table.got(0, "alone")
    assert not table.got(0, "abort")


def test_a_control_node_that_is_done_hears_of_a_failure_before_it_hears_that_it_is_alone():
    table = Table(2)
    table.done(0)
    table.done(1)
    table.leave(1, step_failure(1))
    assert [message["type"] for message in table.mail[0]][-2:] == ["abort", "alone"]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_node_that_fails_with_a_verdict_that_the_control_node_has_caught_fails_the_run(when):
    table = Table(2)
    table.all_ready()
    table.failed(1, crash(1))
    for node in range(2):
        table.ended(node, ok=False)
    if when == "after":
        table.done(0)
    table.leave(1, failed=True)
    if when == "before":
        assert not table.got(0, "abort")
        table.done(0)
    assert str(table.abort(0)) == str(table.verdict(0))


def test_nodes_that_come_later_for_a_launch_that_can_not_begin_get_the_same_verdict():
    table = Table(3)
    table.ready(0)
    table.leave(2)
    table.ready(1)
    assert table.same_verdict(0, 1)


def test_when_the_control_node_leaves_the_others_hear_it():
    table = Table(3)
    table.leave(2)
    assert table.gang.members == [1]
    table.leave(0)
    assert table.got(1, "bye")
    assert not table.got(2, "bye")
    table.leave(1)
    assert not table.gang.members


def test_the_control_node_hears_why_everything_stops():
    table = Table(2)
    table.all_ready()
    table.failed(1, crash(1))
    (stop,) = table.got(0, "stop")
    assert "on node 1 (host host-1) failed with" in stop["because"]
    assert "\n" not in stop["because"]
    assert len(stop["because"]) <= 301


def test_the_control_node_needs_no_telling_of_its_own_failure():
    table = Table(2)
    table.all_ready()
    table.failed(0, crash(0))
    (stop,) = table.got(0, "stop")
    assert stop["because"] == ""


# --- between the end of the step's code and the end of the task -----------------------------------


def test_a_node_whose_results_are_not_stored_yet_is_still_there():
    table = Table(2)
    table.done(1)
    assert table.gang.members == [1]
    table.leave(1)
    assert table.gang.members == []
    assert table.got(1, "ack")
    assert not table.got(0, "abort")


def test_a_node_that_is_lost_while_it_stores_its_results_breaks_the_gang():
    table = Table(3)
    table.all_ready()
    for node in range(3):
        table.ended(node)
    table.done(1)
    table.done(2)
    table.leave(2)
    table.lost(1)
    (abort,) = table.got(0, "abort")
    assert "node 1 (host host-1)" in abort["error"]["message"].lower()
    assert "before its results were stored" in abort["error"]["message"]
    assert table.gang.members == []


def test_no_launch_begins_without_a_node_whose_step_is_done():
    table = Table(3)
    table.ready(0)
    table.done(2)
    table.ready(1)
    assert "already ended on node 2" in str(table.same_verdict(0, 1))


def test_a_node_that_is_done_hears_nothing_of_the_others_failures():
    table = Table(3)
    table.done(1)
    table.leave(2, step_failure(2))
    assert table.got(0, "abort")
    assert not table.got(1, "abort")


# --- restarts ------------------------------------------------------------------------------------


def fail_everywhere(table, generation):
    table.failed(1, crash(1), generation=generation)
    for node in range(table.num_nodes):
        table.ended(node, *([crash(1)] if node == 1 else []), ok=False, generation=generation)


def test_a_failure_is_restarted_on_all_nodes_with_a_new_port_after_a_pause():
    table = Table(3)
    table.all_ready(max_restarts=2)
    fail_everywhere(table, 0)
    assert not table.got(0, "verdict")
    (restart,) = table.got(2, "restart")
    assert (restart["generation"], restart["of"]) == (1, 2)
    assert "loss is nan" in restart["cause"]["exception"]
    assert len(table.got(0, "go")) == 1
    table.pass_time(restart["pause_s"] + 0.01)
    goes = table.got(0, "go")
    assert [go["generation"] for go in goes] == [0, 1]
    assert goes[0]["port"] != goes[1]["port"]
    for node in range(3):
        table.ended(node, generation=1)
    assert table.same_verdict() is None


@pytest.mark.parametrize(
    ("cause", "category", "restarts_by_default"),
    [
        (crash(1), "user", True),
        (crash(1, kind="exit", text=None), "user", True),
        (crash(1, kind="signal", code=-9), "killed", True),
        (crash(1, kind="oom", code=-9), "killed", True),
        (crash(1, kind="agent", code=-9), "killed", True),
        (crash(1, kind="timeout"), "timeout", True),
        (crash(1, kind="hang"), "hang", True),
        (crash(1, kind="frozen"), "hang", True),
        (crash(1, kind="agent"), "start", False),
        (crash(1, kind="agent_ended"), "killed", True),
        (crash(1, kind="lost"), "node_lost", False),
        (crash(1, kind="terminated"), "preempted", False),
    ],
)
def test_the_class_of_the_cause_decides_about_a_restart(cause, category, restarts_by_default):
    assert cause.category == cause.to_wire()["category"] == category
    for retry_on, restarts in [(None, restarts_by_default), ([category], category != "preempted"), ([], False)]:
        table = Table(2)
        table.all_ready(max_restarts=1, **({} if retry_on is None else {"retry_on": frozenset(retry_on)}))
        for node in (0, 1):
            table.ended(node, *([cause] if node == 1 else []), ok=False)
        assert bool(table.got(0, "restart")) is restarts
        if not restarts:
            error = table.same_verdict()
            assert error.cause["category"] == category
            assert isinstance(error, TorchrunPreempted) is (category == "preempted")
            assert cause.kind in ("terminated", "timeout", "hang") or f"(class of the cause: {category})" in str(error)


@pytest.mark.parametrize("gathering", [True, False])
def test_a_preemption_outside_of_a_launch_is_one_too(gathering):
    table = Table(2)
    if gathering:
        table.ready(0)
    table.leave(1, crash(1, kind="terminated"))
    (abort,) = table.got(0, "abort")
    assert isinstance(from_wire(abort["error"]), TorchrunPreempted)


def test_every_node_is_told_how_often_the_gang_was_restarted():
    table = Table(2)
    table.all_ready(max_restarts=2)
    fail_everywhere(table, 0)
    table.pass_time(10.0)
    for node in (0, 1):
        assert [(go["restarts"], go["max_restarts"]) for go in table.got(node, "go")] == [(0, 2), (1, 2)]


def test_who_saved_before_a_preemption_is_told():
    table = Table(2)
    table.all_ready()
    table.failed(1, crash(1, kind="terminated"))
    assert all(table.got(node, "stop") for node in (0, 1))
    table.ended(0, ok=False, ended_well=[1])
    table.ended(1, ok=False, ended_well=[2, 3])
    error = table.same_verdict()
    assert isinstance(error, TorchrunPreempted)
    assert "exited with code 0 in time: 1, 2, 3" in str(error)


def test_restarts_end_and_the_last_failure_is_the_verdict():
    table = Table(2)
    table.all_ready(max_restarts=2)
    for generation in range(3):
        table.pass_time(100.0)
        fail_everywhere(table, generation)
    error = table.same_verdict()
    assert "after 2 restarts" in str(error)


def test_pauses_grow_and_stay_bounded():
    table = Table(2)
    table.all_ready(max_restarts=20)
    for generation in range(20):
        fail_everywhere(table, generation)
        table.pass_time(1000.0)
    pauses = [restart["pause_s"] for restart in table.got(0, "restart")]
    assert pauses == sorted(pauses)
    assert pauses[0] <= 2.0
    assert pauses[-1] <= 60.0


def test_an_end_of_the_generation_before_does_not_count_for_the_next():
    table = Table(2)
    table.all_ready(max_restarts=1)
    fail_everywhere(table, 0)
    table.pass_time(10.0)
    table.ended(0, generation=0)
    table.ended(1, generation=1)
    assert not table.got(0, "verdict")
    table.ended(0, generation=1)
    assert table.same_verdict() is None


def test_a_lost_node_is_no_reason_to_restart():
    table = Table(2)
    table.all_ready(max_restarts=3)
    table.lost(1)
    table.ended(0, ok=False)
    assert table.verdict(0)
    assert not table.got(0, "restart")


def test_a_node_lost_in_the_pause_ends_the_launch():
    table = Table(3)
    table.all_ready(max_restarts=3)
    fail_everywhere(table, 0)
    table.lost(2)
    assert table.same_verdict(0, 1)
    table.pass_time(100.0)
    assert len(table.got(0, "go")) == 1


def test_the_end_of_the_steps_time_is_no_reason_to_restart():
    table = Table(2)
    table.all_ready(max_restarts=3, left_s=5.0)
    table.pass_time(5.1)
    for node in (0, 1):
        table.ended(node, ok=False)
    error = table.same_verdict()
    assert isinstance(error, LaunchTimeout)
    assert "longer than the step's @timeout allows" in str(error)


# --- time limits ---------------------------------------------------------------------------------


def test_a_launch_that_takes_too_long_is_stopped_and_says_what_changes_that():
    table = Table(2)
    table.clock.now += 500
    table.all_ready(timeout_s=60.0)
    table.pass_time(59.0)
    assert not table.got(0, "stop")
    table.pass_time(1.5)
    assert all(table.got(node, "stop") for node in (0, 1))
    for node in (0, 1):
        table.ended(node, ok=False)
    error = table.same_verdict()
    assert isinstance(error, LaunchTimeout)
    assert "longer than 60 s" in str(error)
    assert "timeout_s" in str(error)


STEP_TIMEOUT = Cause("step_timeout", 1, "host-1", exception="longer than the step's @timeout of 6 s allows")


def test_the_end_of_the_steps_time_on_one_node_stops_the_launch_and_restarts_nothing():
    table = Table(2)
    table.all_ready(max_restarts=1, left_s=7.0)
    table.failed(1, STEP_TIMEOUT)
    for node in (0, 1):
        table.ended(node)
    error = table.same_verdict()
    assert (type(error), error.cause["category"]) == (LaunchTimeout, "timeout")
    assert "node 1 (host host-1) ran longer than the step's @timeout of 6 s allows" in error.message
    assert not table.got(0, "restart")


@pytest.mark.parametrize("where", ["before launch 0 began", "outside of current.torch.run"])
def test_the_end_of_the_steps_time_in_its_own_code_is_a_timeout_everywhere(where):
    table = Table(2)
    if "launch" in where:
        table.ready(0)
    table.leave(1, STEP_TIMEOUT)
    error = table.abort(0)
    assert type(error) is LaunchTimeout
    assert where in error.message
    assert "Node 1 (host host-1) ran longer than the step's @timeout of 6 s allows" in error.message


def test_a_call_that_run_refuses_did_not_happen_outside_of_it():
    table = Table(2)
    table.leave(1, Cause("call", 1, "host-1", exception="EntrypointError: no such.py"))
    assert "It happened in the call of current.torch.run" in table.abort(0).message


def test_the_time_limit_counts_anew_for_each_restart():
    table = Table(2)
    table.all_ready(max_restarts=1, timeout_s=60.0)
    table.pass_time(50.0)
    fail_everywhere(table, 0)
    table.pass_time(5.0)
    table.pass_time(59.0)
    assert len(table.got(0, "stop")) == 1
    table.pass_time(2.0)
    assert len(table.got(0, "stop")) == 2


def test_the_steps_time_counts_all_generations_together():
    table = Table(2)
    table.all_ready(max_restarts=5, left_s=60.0, timeout_s=59.0)
    table.pass_time(50.0)
    fail_everywhere(table, 0)
    table.pass_time(5.0)
    table.pass_time(10.0)
    assert len(table.got(0, "stop")) == 2


# --- hangs ---------------------------------------------------------------------------------------


def active(table, node, age_s=0.0, generation=0):
    said = {"launch": 0, "generation": generation, "age_s": age_s}
    table.post(table.gang.handle(node, {"type": "active", **said}))


def test_silence_of_all_ranks_is_a_hang_and_evidence_is_asked_for():
    table = Table(2)
    table.all_ready(hang_timeout_s=30.0)
    table.pass_time(29.0)
    assert not table.got(0, "stop")
    table.pass_time(1.5)
    for node in (0, 1):
        (stop,) = table.got(node, "stop")
        assert stop["evidence"]
        assert "no rank wrote anything or exited for 30 s" in stop["because"]
    for node in (0, 1):
        evidence = {
            "host": f"host-{node}",
            "file": f"/tmp/stacks-{node}",
            "where": {str(node): f"train.py:{node}3 in step"},
        }
        table.ended(node, ok=False, evidence=evidence)
    error = table.same_verdict()
    assert isinstance(error, LaunchHung)
    for words in (
        "Rank 0 was at train.py:03 in step",
        "Rank 1 was at train.py:13",
        "node 1 (host host-1): /tmp/stacks-1",
    ):
        assert words in str(error)
    assert "hang_timeout_s" in str(error)


def test_output_of_any_rank_on_any_node_shows_that_nothing_hangs():
    table = Table(2)
    table.all_ready(hang_timeout_s=30.0)
    for _ in range(3):
        table.pass_time(20.0)
        active(table, 1, age_s=1.0)
    table.pass_time(28.0)
    assert not table.got(0, "stop")
    table.pass_time(1.5)  # the last output was 30.5 s ago
    assert table.got(0, "stop")


def test_output_of_a_former_generation_is_no_sign_of_life():
    table = Table(2)
    table.all_ready(hang_timeout_s=30.0, max_restarts=1)
    fail_everywhere(table, 0)
    table.pass_time(2.0)
    table.pass_time(29.0)
    active(table, 1, generation=0)
    table.pass_time(2.0)
    assert len(table.got(0, "stop")) == 2


def test_without_the_option_nothing_hangs():
    table = Table(2)
    table.all_ready()
    table.pass_time(1e6)
    assert not table.got(0, "stop")


def test_a_hang_leaves_time_for_the_evidence_before_silent_nodes_are_given_up():
    table = Table(2)
    table.all_ready(hang_timeout_s=30.0)
    table.pass_time(31.0)
    table.pass_time(GRACE_S + 20.0)
    assert not table.got(0, "verdict")
    table.pass_time(20.0)
    assert "No word came from nodes 0, 1" in str(table.same_verdict())


# --- preemption ----------------------------------------------------------------------------------


def test_a_preemption_sends_the_users_signal_and_other_failures_do_not():
    for kind, signals in (("terminated", [signal.SIGUSR1]), ("exception", [None])):
        table = Table(2)
        table.all_ready(preemption_signal=signal.SIGUSR1)
        table.failed(1, crash(1, kind=kind))
        assert [stop.get("signal") for stop in table.got(0, "stop")] == signals


def test_a_failure_is_not_restarted_on_a_node_that_is_preempted_meanwhile():
    table = Table(2)
    table.all_ready(max_restarts=3)
    table.failed(1, crash(1))
    table.failed(0, Cause("terminated", 0, "host-0", exception="its Metaflow task got SIGTERM"), age_s=-0.1)
    for node in (0, 1):
        table.ended(node, ok=False)
    error = table.same_verdict()
    assert str(error).startswith("Rank 2 on node 1")
    assert "Meanwhile node 0 (host host-0) was preempted" in str(error)


# --- torchrun's own elasticity ---------------------------------------------------------------------


def elastic(num_nodes=3, min_nodes=2):
    table = Table(num_nodes)
    table.all_ready(min_nodes=min_nodes)
    return table


@pytest.mark.parametrize("how", ["lost", "ended", "failed"])
def test_an_elastic_launch_goes_on_without_a_node(how):
    table = elastic()
    if how == "lost":
        table.lost(2)
    else:
        if how == "failed":
            table.failed(2, crash(2))
        table.ended(2, crash(2), ok=False)
        assert "loss is nan" in str(table.verdict(2))
        assert "goes on without it" in str(table.verdict(2))
        assert "stopped" not in str(table.verdict(2))
        assert len(table.got(2, "stop")) == 1
    assert not table.got(0, "stop")
    assert any("goes on with 2 nodes" in note["text"] for note in table.got(1, "note"))
    for node in (0, 1):
        table.ended(node)
    assert table.same_verdict(0, 1) is None
    assert table.gang.broken is None


def test_an_elastic_launch_stops_when_too_few_nodes_are_left():
    table = elastic()
    table.lost(2)
    table.lost(1)
    assert table.got(0, "stop")
    table.ended(0, ok=False)
    assert "Node 2" in str(table.verdict(0))


def test_an_elastic_launch_needs_the_control_node():
    table = elastic()
    table.failed(0, crash(0))
    assert all(table.got(node, "stop") for node in range(3))


def test_a_preempted_node_of_an_elastic_launch_is_stopped_alone():
    table = elastic()
    table.failed(2, crash(2, kind="terminated"))
    (stop,) = table.got(2, "stop")
    assert stop["signal"] == signal.SIGTERM
    assert not table.got(1, "stop")
    table.ended(2, ok=False)
    assert isinstance(table.verdict(2), TorchrunPreempted)


def test_a_node_that_has_dropped_out_and_calls_run_again_does_not_end_the_launch_of_the_others():
    table = elastic()
    table.ended(2, crash(2), ok=False)
    table.ready(2, 1)
    error = from_wire(table.got(2, "verdict")[1]["error"])
    assert isinstance(error, GangError)
    assert "Launch 1 can't begin on node 2: it has dropped out of launch 0, which goes on" in str(error)
    table.leave(2, failed=True)
    for node in (0, 1):
        assert not table.got(node, "verdict")
        table.ended(node)
    assert table.same_verdict(0, 1) is None
    table.done(0)
    assert not table.got(0, "abort")  # elastic as it is, it goes on without node 2 to its end


def test_after_an_elastic_launch_has_lost_a_node_no_other_can_begin():
    table = elastic()
    table.lost(2)
    for node in (0, 1):
        table.ended(node)
    table.ready(0, 1)
    assert "already ended on node 2" in str(from_wire(table.got(0, "verdict")[-1]["error"]))


# --- a node that gives up by itself ----------------------------------------------------------------


@pytest.mark.parametrize("phase", ["gathering", "running", "pause"])
def test_an_exception_in_run_ends_the_launch_for_all_and_restarts_nothing(phase):
    table = Table(3)
    if phase == "gathering":
        table.ready(0)
        table.ready(1)
    else:
        table.all_ready(max_restarts=5)
    if phase == "pause":
        table.failed(2, crash(2))
        for node in range(3):
            table.ended(node, ok=False)
        assert table.got(0, "restart")
    table.give_up(1, Cause("step", 1, "host-1", exception="KeyError: 'x'"))
    for node in (0, 2):
        if phase == "running":
            table.ended(node, ok=False)
    waiting = (0,) if phase == "gathering" else (0, 2)
    error = table.same_verdict(*waiting)
    assert phase == "pause" or "failed with KeyError: 'x'" in str(error)
    assert "No word" not in str(error)
    table.pass_time(60.0)
    assert len(table.got(0, "go")) == (0 if phase == "gathering" else 1)


def test_a_node_that_gives_a_launch_up_and_calls_run_again_waits_for_the_others():
    table = Table(2)
    table.all_ready()
    table.give_up(1, Cause("step", 1, "host-1", exception="KeyError: 'x'"))
    table.ready(1, 1)
    assert not table.got(0, "verdict")  # its workers are still being stopped
    table.ended(0, ok=False)
    assert "KeyError" in str(table.verdict(0))
    table.ready(0, 1)
    assert table.got(1, "go")[-1]["launch"] == 1


def test_what_ended_a_launch_is_told_in_the_same_words_when_the_step_ends_with_it():
    table = Table(3)
    table.ready(0)
    cause = Cause("step", 1, "host-1", exception="KeyError: 'x'", detail="Traceback: in run")
    table.give_up(1, cause)
    table.leave(1, Cause("step", 1, "host-1", exception="KeyError: 'x'", detail="Traceback: in the step"))
    assert str(table.abort(2)) == str(table.verdict(0))


# --- any order of anything -------------------------------------------------------------------------


class AnyInterleaving(RuleBasedStateMachine):
    """Nodes that behave, in any order, on a network that drops any of them at any time."""

    @initialize(
        num_nodes=st.sampled_from([3, 2, 1]),
        max_restarts=st.integers(0, 2),
        hang_timeout_s=st.sampled_from([None, 20.0]),
    )
    def begin(self, num_nodes, max_restarts, hang_timeout_s):
        self.table = Table(num_nodes, started_timeout_s=50.0, join=False)
        self.max_restarts, self.hang_timeout_s = max_restarts, hang_timeout_s
        # A node: absent -> out (in its own code) <-> in (a launch) -> storing (its results) -> gone. The control
        # node is waiting instead of storing.
        self.state = dict.fromkeys(range(num_nodes), "absent")
        self.launches = dict.fromkeys(range(num_nodes), 0)  # as each node counts its calls
        self.running = dict.fromkeys(range(num_nodes))  # generation whose agent runs
        self.stores = {}  # node -> generation whose values it stores
        self.verdicts = {}  # launch -> node -> verdict
        self.read = dict.fromkeys(range(num_nodes), 0)
        self.goes = {}  # (launch, generation) -> what the nodes were told
        self.preempted = set()  # launches and generations in which some node was
        self.given_up = set()  # launches and the nodes that gave them up

    def nodes(self, *states):
        return [node for node, state in getattr(self, "state", {}).items() if state in states]

    def read_mail(self):
        """Let every node do what a supervisor does with its mail."""
        for node, mail in self.table.mail.items():
            while self.read[node] < len(mail):
                message = mail[self.read[node]]
                self.read[node] += 1
                given_up = message["type"] in ("go", "verdict") and (message["launch"], node) in self.given_up
                if self.state[node] == "gone" or given_up:
                    continue
                if message["type"] == "go":
                    assert self.state[node] == "in", "go for a node that did not ask for it"
                    assert self.running[node] is None, "two generations at once"
                    self.note_go(node, message)
                    self.running[node] = message["generation"]
                    self.stores.pop(node, None)
                elif message["type"] == "verdict":
                    self.note_verdict(node, message)
                elif message["type"] == "abort":
                    assert self.state[node] != "storing", "news for a node that is done"
                    self.state[node] = "aborted"
                    self.running[node] = None

    def note_go(self, node, message):
        launch, generation = self.launches[node], message["generation"]
        other = self.goes.setdefault((launch, generation), message)
        assert message == other, "nodes were told to start differently"
        assert not self.preempted & {(launch, before) for before in range(generation)}, "a restart after a preemption"
        assert message["restarts"] <= self.max_restarts, "more restarts than allowed"

    def note_verdict(self, node, message):
        number = self.launches[node]
        got = self.verdicts.setdefault(number, {})
        assert self.state[node] in ("in", "aborted"), "a verdict for a node that is in no launch"
        assert node not in got, "a second verdict for one launch"
        assert message["launch"] == number, "a verdict for another launch"
        got[node] = message["error"]
        self.stores.pop(node, None)
        if self.state[node] == "in":
            self.state[node], self.running[node] = "out", None
            self.launches[node] += 1

    @precondition(lambda self: self.nodes("absent"))
    @rule(data=st.data())
    def join(self, data):
        node = data.draw(st.sampled_from(self.nodes("absent")))
        assert self.table.gang.may_join(node, {})
        self.state[node] = "out"
        self.table.join(node)

    @precondition(lambda self: self.nodes("out"))
    @rule(data=st.data(), odd=st.booleans())
    def ready(self, data, odd):
        node = data.draw(st.sampled_from(self.nodes("out")))
        self.state[node] = "in"
        facts = {"torch": "2.5.1"} if odd and node == 1 else {}
        limits = {"timeout_s": 40.0, "hang_timeout_s": self.hang_timeout_s}
        self.table.ready(node, self.launches[node], max_restarts=self.max_restarts, **limits, **facts)

    @precondition(lambda self: self.busy())
    @rule(data=st.data(), how=st.sampled_from(["ok", "crash", "stopped"]))
    def end(self, data, how):
        node = data.draw(st.sampled_from(self.busy()))
        generation, self.running[node] = self.running[node], None
        causes = [crash(node)] if how == "crash" else []
        self.table.ended(node, *causes, ok=how == "ok", launch=self.launches[node], generation=generation)

    @precondition(lambda self: self.busy())
    @rule(data=st.data(), ok=st.booleans())
    def end_and_store(self, data, ok):
        node = data.draw(st.sampled_from(self.busy()))
        generation, self.running[node] = self.running[node], None
        self.stores[node] = generation
        causes = [] if ok else [crash(node)]
        self.table.ended(node, *causes, launch=self.launches[node], generation=generation, storing=VALUE)

    @precondition(lambda self: getattr(self, "stores", None))
    @rule(data=st.data(), how=st.sampled_from(["ok", "fails"]))
    def store(self, data, how):
        node = data.draw(st.sampled_from(sorted(self.stores)))
        generation = self.stores.pop(node)
        causes = [store_failure(node)] if how == "fails" else []
        self.table.stored(node, {}, *causes, launch=self.launches[node], generation=generation)

    @precondition(lambda self: self.busy())
    @rule(data=st.data())
    def fail(self, data):
        node = data.draw(st.sampled_from(self.busy()))
        self.table.failed(node, crash(node), launch=self.launches[node], generation=self.running[node])

    @precondition(lambda self: self.nodes("in"))
    @rule(data=st.data())
    def give_up(self, data):
        """Something in the node's own process ends its `run`."""
        node = data.draw(st.sampled_from(self.nodes("in")))
        number = self.launches[node]
        self.state[node], self.running[node] = "out", None
        self.launches[node] += 1
        self.given_up.add((number, node))
        self.table.give_up(node, step_failure(node), launch=number)

    @precondition(lambda self: self.busy())
    @rule(data=st.data(), age_s=st.sampled_from([0.0, 15.0]))
    def write(self, data, age_s):
        node = data.draw(st.sampled_from(self.busy()))
        said = {"launch": self.launches[node], "generation": self.running[node], "age_s": age_s}
        self.table.post(self.table.gang.handle(node, {"type": "active", **said}))

    @precondition(lambda self: self.busy())
    @rule(data=st.data())
    def preempt(self, data):
        """The node's task gets SIGTERM, or its machine a spot notice, while its workers run."""
        node = data.draw(st.sampled_from(self.busy()))
        generation = self.running[node]
        self.preempted.add((self.launches[node], generation))
        self.table.failed(node, crash(node, kind="terminated"), launch=self.launches[node], generation=generation)

    @precondition(lambda self: self.nodes("in"))
    @rule(data=st.data(), kind=st.sampled_from(["failed", "ended", "active"]))
    def say_again_what_is_long_over(self, data, kind):
        node = data.draw(st.sampled_from(self.nodes("in")))
        report = {"type": kind, "launch": self.launches[node] - 1, "generation": 0, "ok": False, "causes": []}
        self.table.post(self.table.gang.handle(node, report))

    @precondition(lambda self: self.nodes("absent", "out", "in", "aborted", "storing"))
    @rule(data=st.data())
    def lose(self, data):
        node = data.draw(st.sampled_from(self.nodes("absent", "out", "in", "aborted", "storing")))
        if node != 0:
            self.state[node] = "gone"
            self.table.lost(node)

    @precondition(lambda self: self.nodes("out"))
    @rule(data=st.data())
    def done(self, data):
        node = data.draw(st.sampled_from(self.nodes("out")))
        self.state[node] = "storing" if node != 0 else "waiting"
        self.table.done(node)

    @precondition(lambda self: self.nodes("out", "aborted", "storing"))
    @rule(data=st.data(), badly=st.booleans())
    def leave(self, data, badly):
        node = data.draw(st.sampled_from(self.nodes("out", "aborted", "storing")))
        if node != 0 or len(self.nodes("out", "in", "absent")) == 1:  # without its host there is no gang
            self.state[node] = "gone"
            self.table.leave(node, step_failure(node) if badly else None)

    @rule(seconds=st.sampled_from([0.1, 3.0, 45.0, 100.0]))
    def tick(self, seconds):
        self.table.pass_time(seconds)

    def busy(self):
        return [node for node in self.nodes("in") if self.running[node] is not None]

    @invariant()
    def all_verdicts_of_a_launch_are_equal(self):
        if hasattr(self, "table"):
            self.read_mail()
            for got in self.verdicts.values():
                assert len({repr(error) for error in got.values()}) <= 1, got

    def teardown(self):
        """Whatever happened, once all nodes are gone or done the rest gets an answer in bounded time."""
        if not hasattr(self, "table"):
            return
        self.read_mail()
        for node in self.nodes("absent", "out"):
            if node != 0:
                self.state[node] = "gone"
                self.table.lost(node)
            else:
                self.state[node] = "waiting"
                self.table.done(node)
        self.read_mail()
        for node, generation in list(self.stores.items()):
            self.table.stored(node, {}, launch=self.launches[node], generation=generation)
        self.read_mail()
        for _ in range(2 * (self.max_restarts + 2)):
            for node in self.busy():
                generation, self.running[node] = self.running[node], None
                self.table.ended(node, ok=False, launch=self.launches[node], generation=generation)
            self.table.pass_time(200.0)
            self.read_mail()
        stuck = self.nodes("in")
        assert not stuck, f"no answer for {stuck}"
        self.all_verdicts_of_a_launch_are_equal()
        assert math.isfinite(self.table.clock.now)


TestAnyInterleaving = AnyInterleaving.TestCase
TestAnyInterleaving.settings = hypothesis_settings(max_examples=300, stateful_step_count=25, deadline=None)


# --- functions: what goes to the datastore ------------------------------------------------------------

VALUE = "rank 2's value (2.1 GB)"


def keys(table, node):
    (verdict,) = table.got(node, "verdict")
    return verdict["deposits"]


def notes(table, node):
    return [message["text"] for message in table.got(node, "note")]


def store_failure(node=1):
    return Cause("store", node, f"host-{node}", 2, 0, exception="has ended well, but its value could not be stored")


def test_the_control_node_alone_hears_where_the_gathered_values_lie():
    table = Table(3)
    table.all_ready()
    table.ended(1, storing=VALUE)
    table.ended(2, storing="rank 4's value (1 bytes)")
    table.stored(1, {"2": "key of 2", "3": "key of 3"})
    table.ended(0)
    assert not table.got(0, "verdict")
    table.stored(2, {"4": "key of 4"})
    assert table.same_verdict() is None
    assert keys(table, 0) == {"2": "key of 2", "3": "key of 3", "4": "key of 4"}
    assert keys(table, 1) == keys(table, 2) == {}


def test_all_nodes_hear_where_the_causes_exception_lies_and_of_no_other():
    table = Table(2)
    table.all_ready()
    table.failed(1, crash(1, "ValueError: origin"))
    table.ended(0, crash(0, "RuntimeError: Connection closed by peer"), storing="what its ranks raised")
    table.ended(1, crash(1, "ValueError: origin"), storing="what its ranks raised")
    table.stored(0, {"0": "follows", "1": "follows"})
    table.stored(1, {"2": "origin", "3": "follows"})
    assert table.same_verdict().cause["rank"] == 2
    assert keys(table, 0) == keys(table, 1) == {"2": "origin"}


def test_a_cause_that_left_nothing_has_no_key():
    table = Table(2)
    table.all_ready()
    table.ended(0, ok=False)
    table.ended(1, crash(1, kind="signal", code=-9))
    assert keys(table, 0) == {}


def test_a_restart_forgets_what_the_last_generation_stored():
    table = Table(2)
    table.all_ready(max_restarts=1)
    table.ended(1, crash(1), storing="what its ranks raised")
    table.ended(0, ok=False)
    table.stored(1, {"2": "old", "3": "old"})
    table.pass_time(1.1)
    table.ended(0, generation=1)
    table.ended(1, generation=1, storing=VALUE)
    table.stored(1, {"4": "late"})  # of the generation before
    table.stored(1, {"2": "new"}, generation=1)
    assert keys(table, 0) == {"2": "new"}


def test_workers_that_have_ended_are_neither_too_slow_nor_do_they_hang():
    table = Table(2)
    table.all_ready(hang_timeout_s=20.0, timeout_s=40.0, max_restarts=3)
    table.ended(0)
    table.ended(1, storing=VALUE)
    table.pass_time(3600.0)
    assert not table.got(0, "stop")
    table.stored(1, {"2": "key"})
    assert table.same_verdict() is None


@pytest.mark.parametrize("limit", ["hang_timeout_s", "timeout_s"])
def test_a_node_that_stores_does_not_hide_that_others_hang(limit):
    table = Table(2)
    table.all_ready(**{limit: 20.0})
    table.ended(1, storing=VALUE)
    table.pass_time(20.1)
    assert table.got(1, "stop")
    table.ended(0, ok=False)  # node 1 need not store any more
    assert isinstance(table.same_verdict(), LaunchHung if limit == "hang_timeout_s" else LaunchTimeout)


def test_the_control_node_says_every_30_s_who_stores_what():
    table = Table(7)
    table.all_ready()
    for node in range(6):
        table.ended(node, storing=f"rank {node * 2}'s value" if node != 1 else VALUE)
    table.pass_time(29.0)
    assert not notes(table, 0)
    table.pass_time(1.1)  # while node 6 computes on
    assert notes(table, 0) == [
        f"node 1 stores {VALUE}; node 2 stores rank 4's value; node 3 stores rank 6's value; so do 2 other nodes "
        "(for 30 s so far)"
    ]
    for node in (0, 2, 3, 4, 5):
        table.stored(node, {})
    table.post(table.gang.handle(1, {"type": "storing", "launch": 0, "generation": 0, "what": "another value"}))
    table.pass_time(30.1)
    assert notes(table, 0)[1:] == ["node 1 stores another value (for 60 s so far)"]
    assert not notes(table, 1)


def test_the_steps_timeout_bounds_storing_and_says_so():
    table = Table(2)
    table.all_ready(left_s=100.0)
    table.ended(0)
    table.ended(1, storing=VALUE)
    table.pass_time(100.1)
    error = table.same_verdict()
    assert isinstance(error, LaunchTimeout)
    assert f"node 1 stores {VALUE} (for 100 s so far)" in str(error)
    assert table.got(1, "stop")


def test_a_value_that_can_not_be_stored_fails_the_launch_and_restarts_nothing():
    table = Table(3)
    table.all_ready(max_restarts=3, retry_on=frozenset({"user", "killed", "timeout", "hang", "start"}))
    table.ended(0)
    table.ended(1, storing=VALUE)
    table.ended(2, storing=VALUE)
    table.stored(1, {}, store_failure())
    error = table.same_verdict()
    assert type(error) is LaunchFailed
    assert error.cause["category"] == "store"
    assert "Rank 2 on node 1 (host host-1) has ended well, but its value could not be stored." in str(error)
    assert "its workers had ended well" in str(error)
    assert all(table.got(node, "stop") for node in range(3))
    table.stored(2, {"4": "late"})
    assert table.same_verdict()


def test_a_value_that_can_not_be_stored_stops_those_that_still_compute():
    table = Table(2)
    table.all_ready()
    table.ended(1, storing=VALUE)
    table.stored(1, {}, store_failure())
    assert table.got(0, "stop")
    table.ended(0, ok=False)
    assert table.same_verdict().cause["category"] == "store"


@pytest.mark.parametrize("how", ["lost", "terminated", "left"])
def test_a_node_that_goes_while_it_stores_ends_the_launch_at_once(how):
    table = Table(3)
    table.all_ready(max_restarts=1)
    for node in range(3):
        table.ended(node, storing=VALUE if node else None)
    if how == "lost":
        table.lost(1)
    elif how == "terminated":
        table.failed(1, crash(1, kind="terminated"))
    else:
        table.leave(1, crash(1, kind="terminated"))
    error = table.same_verdict(0, 2)
    assert error.cause["category"] == ("node_lost" if how == "lost" else "preempted")


def test_a_store_that_is_away_delays_no_verdict_of_a_failure_for_long():
    table = Table(2)
    table.all_ready()
    table.ended(1, crash(1), storing="what its ranks raised")
    table.ended(0, ok=False)
    table.pass_time(GRACE_S + 15.1)
    assert table.same_verdict().cause["rank"] == 2
    assert "No word" not in str(table.same_verdict())


# --- thousands -----------------------------------------------------------------------------------

MANY = 300


def test_no_message_of_one_node_makes_the_gang_look_through_all_nodes(monkeypatch):
    """With thousands of nodes that would be millions of looks, while all of them wait."""
    table, looks = Table(MANY), []
    in_state = Gang._in_state
    monkeypatch.setattr(Gang, "_in_state", lambda gang, *states: looks.append(states) or in_state(gang, *states))
    table.all_ready()
    for node in range(MANY):
        table.ended(node, storing="a value of 1 MB")
    for node in range(MANY):
        table.stored(node, {str(node): "key"})
    assert table.same_verdict() is None
    table.all_ready(1)
    for node in range(MANY):
        table.failed(node, crash(node), launch=1)
    for node in range(MANY):
        table.ended(node, crash(node), launch=1)
    for node in range(MANY):
        assert len(table.got(node, "verdict")) == 2
        table.done(node)
        table.pass_time(0.1)
    for node in reversed(range(MANY)):
        table.leave(node)
    assert len(looks) < 30


def test_what_all_nodes_get_is_one_message_that_is_made_into_bytes_once():
    table = Table(4)
    table.all_ready()
    table.failed(2, crash(2))
    for node in range(4):
        table.ended(node, crash(node))
    for kind in ("go", "stop", "verdict"):
        assert table.got(1, kind)[0] is table.got(2, kind)[0] is table.got(3, kind)[0]


def test_of_thousands_of_reports_little_is_kept():
    table = Table(MANY)
    for node in range(MANY):
        table.ready(node, left_s=float(node))
    origin = crash(7, "ValueError: the first")
    for node in range(MANY):
        table.failed(node, crash(node, "ConnectionError: Connection reset by peer"), age_s=5.0)
        table.failed(
            node, *([origin] if node == 7 else [crash(node, "KeyError: later")]), age_s=1.0 if node == 7 else 0.5
        )
    preempted = Cause("terminated", 9, "host-9", exception="its Metaflow task got SIGTERM")
    table.failed(9, preempted)
    launch = table.gang._launch
    assert [dated.cause for dated in launch.causes] == [Cause.from_wire(origin.to_wire()), preempted]
    assert len({id(message) for message in launch.ready.values()}) == 2  # the control node's and everybody's
    for node in range(MANY):
        table.ended(node, crash(node))
    assert "ValueError: the first" in str(table.same_verdict())
    assert not any("causes" in message for message in launch.ended.values())


def test_a_contradiction_of_thousands_is_told_in_short():
    table = Table(MANY)
    for node in range(MANY):
        table.ready(node, digest=f"digest-{node}")
    error = str(table.same_verdict())
    assert "node 0: digest-0, node 1: digest-1" in error
    assert f"and {MANY - 8} more values" in error
    assert len(error) < 1000


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        ([3], "node 3"),
        ([1, 2], "nodes 1, 2"),
        (range(8), "nodes 0, 1, 2, 3, 4, 5, 6, 7"),
        ([*range(1, 38), 40, 42], "nodes 1-37, 40, 42"),
        (range(0, 4000, 2), "nodes 0, 2, 4, 6, 8, 10, 12, 14 and 1992 more"),
    ],
)
def test_many_nodes_are_named_in_short(nodes, said):
    assert names(nodes) == said


def test_where_thousands_of_ranks_hang_is_told_by_place():
    table = Table(MANY)
    table.all_ready(hang_timeout_s=5.0)
    table.pass_time(6.0)
    for node in range(MANY):
        place = "train.py:9 in load" if node == 17 else "train.py:12 in step"
        where = {str(node * 2 + local_rank): place for local_rank in range(2)}
        table.ended(node, evidence={"host": f"host-{node}", "file": f"/logs/{node}.txt", "where": where})
    error = str(table.same_verdict())
    assert "Ranks 0-33, 36-599 were at train.py:12 in step.\nRanks 34, 35 were at train.py:9 in load." in error
    assert "Stacks of node 0 (host host-0): /logs/0.txt" in error
    assert f"{MANY - 64} more such lines are left out." in error
