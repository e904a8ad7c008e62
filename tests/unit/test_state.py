"""What the control node decides, in what order, and what each node gets; with a clock that the test holds."""

import gc
import signal
from dataclasses import fields, replace
from types import FunctionType, ModuleType

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from test_keepers import Notebook

from metaflow_extensions.torchrun.plugins.torchrun.channel.codec import load
from metaflow_extensions.torchrun.plugins.torchrun.channel.frames import decode, encode
from metaflow_extensions.torchrun.plugins.torchrun.errors import (
    GangError,
    GangStartTimeout,
    LaunchFailed,
    LaunchHung,
    LaunchTimeout,
    TorchrunPreempted,
)
from metaflow_extensions.torchrun.plugins.torchrun.gang.cause import Cause, Failure
from metaflow_extensions.torchrun.plugins.torchrun.gang.keepers import Failing, Keeper, Keepers, Remarks
from metaflow_extensions.torchrun.plugins.torchrun.gang.nodes import Nodes
from metaflow_extensions.torchrun.plugins.torchrun.gang.policy import LaunchPolicy, Rules
from metaflow_extensions.torchrun.plugins.torchrun.gang.messages import (
    Abort,
    Ack,
    Bye,
    Command,
    Done,
    Ended,
    Failed,
    Go,
    Join,
    Leave,
    Note,
    Prepares,
    Ready,
    Replaced,
    Restart,
    Started,
    Stop,
    Store,
    Stored,
    Storing,
    Told,
    Verdict,
    Welcome,
    Wrote,
)
from metaflow_extensions.torchrun.plugins.torchrun.gang.state import Gang
from metaflow_extensions.torchrun.plugins.torchrun.gang.texts import names
from metaflow_extensions.torchrun.plugins.torchrun.records.snapshot import snapshot_of
from metaflow_extensions.torchrun.plugins.torchrun.records.summary import summarize

FIELDS = {"nproc": 2, "digest": "abc"}
FOREVER = float("inf")
FACTS = {"torch": "2.13.0", "cuda": "12.4", "nccl": "2.21.5", "python": "3.11", "devices": "none", "contents": "f00"}
READY = {"nproc", "digest", "master_port"}
POLICY = {field.name for field in fields(LaunchPolicy)}
GRACE_S = 30.0


def failures(causes, age_s=0.0):
    return tuple(Failure(cause, age_s) for cause in causes)


class Silence(Keeper):
    """Has a launch fail where nothing is told for so long, as the feature that looks for hangs."""

    def begin(self, launch, policy, at_s):
        self.limit_s, self.at_s = policy.get("timeout_s"), at_s

    def handle(self, node, told, at_s):
        self.at_s = max(self.at_s, at_s - told.data["age_s"])

    def tick(self, at_s, where):
        is_silent = self.limit_s is not None and at_s - self.at_s > self.limit_s
        return Remarks(failing=Failing("hang", "no rank wrote") if is_silent else None)

    def find_out_s(self, kind):
        return 15.0 if kind == "hang" else 0.0

    def detail(self, kind):
        return "found out" if kind == "hang" else ""


class GangOf:
    """A gang, and what its nodes have been sent; the test holds its clock."""

    def __init__(self, num_nodes=3, taken=(), join=True, keepers=None, **rules):
        self.now = 1000.0
        self.ports = iter(range(40001, 60000))
        self.taken = set(taken)
        keepers = keepers or Keepers({"hangs": Silence()})
        self.state = Gang(num_nodes, self._pick, Rules(grace_s=GRACE_S, **rules), keepers, lambda: self.now)
        self.num_nodes = num_nodes
        self.sent = {node: [] for node in range(num_nodes)}
        self.join(*range(num_nodes) if join else ())

    def _pick(self, pinned):
        return next(self.ports) if pinned is None else None if pinned in self.taken else pinned

    def post(self, outgoing):
        for node, message in outgoing:
            self.sent[node].append(message)

    # --- what nodes do

    def say(self, node, message):
        self.post(self.state.handle(node, message))

    def join(self, *nodes):
        for node in nodes:
            self.say(node, Join(node, f"host-{node}"))

    def ready(self, node, launch=0, **said):
        policy = LaunchPolicy(**{name: said.pop(name) for name in POLICY & said.keys()})
        policy = replace(policy, features={"hangs": {"timeout_s": said.pop("hang_timeout_s", None)}})
        fields = {**FIELDS, **{name: said.pop(name) for name in READY & said.keys()}}
        self.say(node, Ready(launch, facts={**FACTS, **said}, policy=None if node else policy, **fields))

    def all_ready(self, launch=0, **facts):
        for node in range(self.num_nodes):
            self.ready(node, launch, **facts)

    def failed(self, node, *causes, launch=0, generation=0, age_s=0.0):
        self.say(node, Failed(launch, generation, failures(causes, age_s)))

    def ended(self, node, *causes, ok=None, launch=0, generation=0, age_s=0.0, **more):
        ok = not causes if ok is None else ok
        self.say(node, Ended(launch, ok, generation, failures(causes, age_s), **more))

    def all_ended(self, *causes, **more):
        for node in range(self.num_nodes):
            self.ended(node, *causes, **more)

    def stored(self, node, *causes, launch=0, generation=0):
        self.say(node, Stored(launch, generation, failures(causes)))

    def leave(self, node, cause=None, failed=None):
        self.say(node, Leave(cause, cause is not None if failed is None else failed))

    def give_up(self, node, cause, launch=0):
        """Do what a node does whose `run` is ended by an exception of its own."""
        self.say(node, Failed(launch, failures=failures([cause]), given_up=True))
        self.say(node, Ended(launch, ok=False))

    def done(self, node):
        self.say(node, Done())

    def lost(self, node, reason="its task was killed by SIGKILL"):
        self.post(self.state.lost(node, reason))

    def pass_time(self, seconds):
        self.now += seconds
        self.post(self.state.tick())

    # --- what nodes get

    def got(self, node, kind):
        return [message for message in self.sent[node] if isinstance(message, kind)]

    def notes(self, node):
        return [note.text for note in self.got(node, Note)]

    def verdict(self, node, launch=None):
        (verdict,) = [each for each in self.got(node, Verdict) if launch in (None, each.launch)]
        return verdict.error

    def same_verdict(self, *nodes):
        """Return the one verdict that all nodes got."""
        first, *others = [self.verdict(node) for node in nodes or range(self.num_nodes)]
        assert all(error is first for error in others)
        return first

    def abort(self, node):
        (abort,) = self.got(node, Abort)
        return abort.error

    def is_undecided(self):
        return not any(self.got(node, Verdict) for node in range(self.num_nodes))

    # --- what is recorded

    @property
    def records(self):
        return self.state.history.records

    @property
    def reports(self):
        return self.state.history.reports

    def verdict_events(self, node):
        """Return the kinds of the events that came with each verdict."""
        return [[event.kind for event in verdict.events] for verdict in self.got(node, Verdict)]


def running(num_nodes, taken=(), deadline=FOREVER, keepers=None, **facts):
    """Return a gang whose first launch runs; the clock is at 1000."""
    gang = GangOf(num_nodes, taken=taken, deadline=deadline, keepers=keepers)
    gang.all_ready(**facts)
    return gang


def crash(node=1, text="ValueError: loss is nan", kind="exception", code=1):
    return Cause(kind, node, f"host-{node}", node * 2, 0, code, text)


def preemption(node=1):
    return crash(node, kind="terminated")


def step_failure(node, detail="Traceback (most recent call last):"):
    return Cause("step", node, f"host-{node}", exception="KeyError: 'x'", detail=detail)


def fail_everywhere(gang, generation):
    gang.failed(1, crash(1), generation=generation)
    for node in range(gang.num_nodes):
        gang.ended(node, *([crash(1)] if node == 1 else []), ok=False, generation=generation)


# --- the good way --------------------------------------------------------------------------------


@pytest.mark.parametrize("num_nodes", [1, 3])
def test_a_launch_begins_when_all_are_ready_and_ends_well_when_all_have(num_nodes):
    gang = GangOf(num_nodes)
    *others, last = range(num_nodes)
    for node in others:
        gang.ready(node)
    assert all(gang.sent[node] == [Welcome()] for node in range(num_nodes))
    gang.ready(last)
    for node in range(num_nodes):
        (go,) = gang.got(node, Go)
        assert (go.launch, go.generation, go.port) == (0, 0, 40001)
    for node in others:
        gang.ended(node)
    assert gang.is_undecided()
    gang.ended(last)
    assert gang.same_verdict() is None
    assert gang.state.nodes.members == [*range(1, num_nodes)]
    assert (gang.state.nproc, gang.state.facts["torch"], gang.state.error) == (2, "2.13.0", None)


@pytest.mark.parametrize(
    ("alone", "causes", "expected"),
    [
        ([True, True, True], [], True),
        ([True, False, True], [], False),
        ([False, True, True], [], False),
        ([True, True, True], [crash(1)], False),
    ],
)
def test_all_know_if_each_rank_of_each_node_has_trained_alone_in_a_launch_that_ends_well(alone, causes, expected):
    gang = running(3)
    for node, each in enumerate(alone):
        gang.ended(node, *causes, alone=each)
    assert [verdict.alone for node in range(3) for verdict in gang.got(node, Verdict)] == [expected] * 3


def test_messages_of_nodes_that_are_none_and_that_no_node_sends_are_ignored():
    gang = GangOf(2)
    for node, message in ((7, Ready(0, 2, "abc")), (0, Go(0, 0, 1, "", 0, 0)), (-1, Join(-1))):
        assert gang.state.handle(node, message) == []


# --- joining -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("missing", "named"), [([], ""), ([1], "node 1 of 3"), ([1, 2], "nodes 1, 2 of 3")])
def test_missing_nodes_are_named_once_with_time_setting_and_command(missing, named):
    gang = GangOf(3, started_timeout_s=90.0, join=False, why_it_waits=lambda node: f"ask about {node}")
    gang.join(*{0, 1, 2} - {*missing})
    gang.pass_time(89.0)
    assert not gang.got(0, Abort)
    for _ in range(3):
        gang.pass_time(1.1)
    gang.join(*missing)  # too late
    for node in range(3):
        errors = [abort.error for abort in gang.got(node, Abort)]
        assert [type(error) for error in errors] == ([GangStartTimeout] if missing else [])
        for words in (f"Waited 90 s, but {named}", "all_nodes_started_timeout", "node 1 is missing: ask about 1"):
            assert all(words in str(error) for error in errors)


@pytest.mark.parametrize("why", ["missing", "given up"])
def test_a_launch_that_waits_ends_with_what_breaks_the_gang_not_with_the_first_node_that_leaves_for_it(why):
    gang = GangOf(3, started_timeout_s=90.0, join=False)
    gang.join(0, 1)
    gang.ready(0)
    if why == "missing":
        gang.pass_time(91.0)
    else:
        gang.post(gang.state.give_up(GangError("the port is gone")))
    first = gang.abort(1)
    gang.leave(0, failed=True)
    gang.leave(1, failed=True)
    assert {report.text for report in gang.reports} == {first.message}
    assert (gang.verdict(0), gang.state.error) == (first, first)
    assert snapshot_of(gang.state).error == first.message


def test_who_waits_for_nodes_is_reminded_of_them_beside_the_control_node_whose_log_the_terminal_shows():
    gang = GangOf(4, join=False, why_it_waits=lambda node: f"ask about {node}")
    gang.join(0, 1, 2)
    gang.ready(1)
    gang.pass_time(9.0)
    assert not gang.notes(0)
    gang.pass_time(1.0)
    said = "launch 0 waits for node 3 to start and for nodes 0, 2 to call current.torch.run"
    said = [f"{said}. To see why node 3 is missing: ask about 3"]
    assert [gang.notes(node) for node in range(4)] == [said, said, [], []]
    gang.join(3)
    gang.ready(0)
    gang.pass_time(29.0)
    gang.pass_time(1.0)
    assert gang.notes(0)[1:] == gang.notes(1)[1:] == ["launch 0 waits for nodes 2, 3 to call current.torch.run"]
    assert [gang.got(node, Note)[-1].is_detail for node in (0, 1)] == [False, True]


def newcomer(node, task="b", place="pod-b"):
    return Join(node, f"host-{node}", task, place)


@pytest.mark.parametrize("first", ["runs", "stops", "can't launch", "is lost"])
def test_a_second_task_in_another_pod_means_that_the_first_is_being_replaced(first):
    gang = running(2)
    if first == "stops":
        gang.failed(1, preemption())
    elif first == "can't launch":
        gang.state.give_up(GangError("The channel failed."))
    elif first == "is lost":
        gang.lost(1)
    for task in ("b", "c"):  # however many come
        assert not gang.state.nodes.may_join(newcomer(1, task))
        refused, out = gang.state.turn_away(newcomer(1, task))
        gang.post(out)
        assert isinstance(refused.error, TorchrunPreempted)
        assert f"{'has ended' if first == 'is lost' else 'still runs'} (host host-1)" in str(refused.error)
        assert refused.hold_s == GRACE_S + 15.0  # the others may still save
    is_news = first == "runs"  # else the gang ends already
    assert [note.partition(" is being")[0] for note in gang.notes(0)] == ["node 1 (host host-1)"] * is_news
    assert len(gang.got(1, Replaced)) == is_news


def test_a_second_task_in_the_same_place_is_a_mistake_and_harms_nobody():
    gang = GangOf(2, join=False)
    gang.say(1, newcomer(1, "a"))
    assert not gang.state.nodes.may_join(newcomer(1, "b"))
    strangers = {newcomer(1, "b"): "another task of this attempt has the same", newcomer(7): "2 nodes in"}
    for stranger, why in strangers.items():
        refused, out = gang.state.turn_away(stranger)
        assert why in str(refused.error)
        assert not isinstance(refused.error, TorchrunPreempted)
        assert (refused.hold_s, out) == (0.0, [])


def test_a_node_joins_once_or_again_if_it_has_not_heard_its_welcome():
    gang = GangOf(3, join=False)
    for _ in range(2):
        assert gang.state.nodes.may_join(newcomer(1))
        gang.say(1, newcomer(1))
    assert len(gang.got(1, Welcome)) == 2
    assert not gang.state.nodes.may_join(newcomer(1, "another"))
    gang.lost(1)
    for node in (1, 3, -1):
        assert not gang.state.nodes.may_join(newcomer(node))
    gang.say(1, newcomer(1))
    gang.say(0, newcomer(2))
    assert len(gang.got(1, Welcome)) == 2
    assert gang.state.nodes.absent == [0, 2]


# --- what features keep -----------------------------------------------------------------------------


def test_a_feature_gets_what_is_told_while_workers_run_and_adds_to_log_records_and_verdict():
    notebook = Notebook()
    gang = running(2, keepers=Keepers({"notes": notebook}))
    gang.pass_time(5.0)
    gang.say(1, Told(0, 0, "notes", {"a": 1}))
    for late in (Told(0, 1, "notes", {}), Told(7, 0, "notes", {}), Told(0, 0, "unknown", {})):
        gang.say(1, late)
    assert (gang.notes(0), gang.notes(1)) == (["at 5 s"], [])
    gang.ended(1, ok=False)
    gang.ended(0)
    gang.say(1, Told(0, 0, "notes", {"late": True}))
    gang.pass_time(5.0)
    heard = [("begin", 0, {}, 0.0), ("handle", 1, {"a": 1}, 5.0), ("ended", 1, False), ("ended", 0, True)]
    assert notebook.heard == heard
    assert gang.notes(0) == ["at 5 s", "a node has failed"]
    (record,) = [each for each in gang.records if each.kind == "seen"]
    assert (record.node, record.rank, record.launch, record.generation) == (1, 3, 0, 0)
    assert (record.text, record.exit_code, record.seconds) == ("in a record", 0, 0.5)
    for node in (0, 1):
        told = {"launch": 0, "to_control": node == 0, "ok": False}
        assert [verdict.features for verdict in gang.got(node, Verdict)] == [{"notes": told}]


def test_what_a_feature_says_of_the_end_stands_before_the_verdict():
    gang = running(1, keepers=Keepers({"notes": Notebook()}))
    gang.ended(0, ok=False)
    assert [type(each) for each in gang.sent[0] if isinstance(each, Note | Verdict)] == [Note, Verdict]


# --- contradictions ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fact", "value", "named"),
    [
        ("torch", "2.5.1", "torch version"),
        ("cuda", "13.0", "CUDA version that torch was built for"),
        ("nccl", "2.28", "NCCL version"),
        ("python", "3.10.1", "Python version"),
        ("contents", "bad", "contents of the entrypoint"),
        ("nproc", 4, "processes per node"),
        ("digest", "xyz", "entrypoint and torchrun options"),
        ("launch", 7, "launch number"),
    ],
)
def test_a_contradiction_names_nodes_and_values_and_nothing_starts(fact, value, named):
    gang = GangOf(3)
    gang.ready(0)
    gang.ready(1)
    gang.ready(2, **{fact: value})
    error = gang.same_verdict()
    assert isinstance(error, GangError)
    others = {**FACTS, **FIELDS, "launch": 0}[fact]
    assert f"in the {named} (nodes 0, 1: {others}, node 2: {value})" in str(error)
    assert not gang.got(0, Go)


HIDDEN = "hides the accelerators on"


@pytest.mark.parametrize(
    ("own", "seen", "said"),
    [
        (["nvidia"] * 3, ["8 nvidia"] * 3, ["8 nvidia accelerators on each node"]),
        (["none"] * 3, ["none"] * 3, [""]),
        (["amd"] * 2, ["2 amd", "1 amd"], ["2 amd accelerators on node 0, 1 amd accelerator on node 1"]),
        (
            ["amd"] * 2,
            ["none", "1 amd"],
            ["none on node 0, 1 amd accelerator on node 1", f"{HIDDEN} node 0: the workers"],
        ),
        # Nodes that differ, where `run` makes them alike, or where that is not known.
        (["amd", "none"], ["none", "none"], [""]),
        (["amd", "none"], ["1 amd", "1 amd"], ["1 amd accelerator on each node"]),
        (["amd", "none"], ["1 amd", "none"], None),
    ],
)
def test_accelerators_are_named_and_must_be_alike_unless_run_makes_them_so(own, seen, said):
    gang = GangOf(len(own))
    for node, devices in enumerate(own):
        gang.ready(node, devices=devices, accelerators=seen[node])
    if said is None:
        error = gang.same_verdict()
        assert "The nodes differ in the kind of accelerators (node 0: amd, node 1: none)" in error.message
        assert "run(env={'CUDA_VISIBLE_DEVICES': ''}) on every node" in error.message
    else:
        assert gang.got(0, Go)[0].devices == said[0]
        assert [warning in note for note, warning in zip(gang.notes(0), said[1:], strict=True)] == [True] * len(
            said[1:]
        )


def test_a_pinned_port_that_is_taken_is_named_on_every_node():
    error = running(2, taken=[29500], master_port=29500).same_verdict()
    assert "Port 29500 is taken on the control node (host host-0). Pin another with master_port" in str(error)


PORT_TAKEN = Cause(
    "agent", 0, "host-0", exit_code=1, exception="its torchrun agent exited", detail="... EADDRINUSE ..."
)


@pytest.mark.parametrize(
    ("facts", "taken", "tries"),
    [({}, 1, [40001, 40002]), ({}, 9, [40001, 40002, 40003, 40004]), ({"master_port": 29500}, 9, [29500])],
)
def test_a_port_that_is_taken_after_it_was_chosen_is_replaced_and_counts_as_no_restart(facts, taken, tries):
    gang = running(2, **facts)
    for generation in range(len(tries)):
        gang.ended(0, *([PORT_TAKEN] if generation < taken else []), generation=generation)
        gang.ended(1, ok=generation >= taken, generation=generation)
    goes = [(go.port, go.generation, go.restarts) for go in gang.got(1, Go)]
    assert goes == [(port, generation, 0) for generation, port in enumerate(tries)]
    assert len(gang.notes(1)) == len(tries) - 1
    assert not gang.got(1, Restart)
    assert ("EADDRINUSE" in str(gang.same_verdict())) is (taken == 9)


# --- failures while it runs ------------------------------------------------------------------------


def test_errors_of_a_gang_of_one_node_number_none():
    gang = GangOf(1)
    gang.say(0, Prepares(0, 2))
    gang.failed(0, replace(crash(0, "before_run 1/1 (false) exited with code 3", kind="command"), rank=None))
    said = gang.verdict(0).message
    assert said.startswith("before_run failed, so no worker was started.\nHost host-0 failed: before_run 1/1")
    gang = GangOf(1, deadline=1010.0, longer="longer than 10 s")
    gang.pass_time(20)
    assert gang.abort(0).message == "Host host-0 ran longer than 10 s.\nIt happened outside of current.torch.run."


def ended_by(gang, node, ranks, text="ValueError: loss is nan", generation=0, age_s=0.0):
    """Let ranks of a node end with the same exception; the first of them is the node's cause."""
    cause = replace(crash(node, text), rank=ranks[0])
    gang.say(node, Ended(0, False, generation, (Failure(cause, age_s, tuple(ranks)),)))


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ({0: [0, 1], 1: [3, 2], 2: [5]}, "Ranks 0, 1, 2, 5 failed in the same way."),
        ({1: [3], 2: [4]}, "Rank 4 failed in the same way."),
        ({1: [3]}, ""),
    ],
)
def test_the_error_names_the_other_ranks_that_failed_in_the_same_way(ends, said):
    gang = running(3)
    for node in range(3):
        if node in ends:
            ended_by(gang, node, ends[node], age_s=1.0 * (node == 1))
        else:
            gang.ended(node)
    error = gang.same_verdict()
    assert error.cause["rank"] == 3
    assert error.cause["also"] == said.partition(" failed")[0].lower()
    assert said in error.message
    assert ("the same way" in error.message) == bool(said)


def test_a_failure_stops_all_once_and_every_node_gets_the_first_as_its_verdict():
    gang = running(3)
    gang.failed(2, crash(2, "KeyError: second"), age_s=1.0)
    gang.now += 5
    gang.failed(1, crash(1), age_s=20.0)  # the first, which is reported last
    assert [len(gang.got(node, Stop)) for node in range(3)] == [1, 1, 1]
    assert gang.is_undecided()
    gang.ended(1, crash(1))
    gang.ended(0)
    gang.ended(2, ok=False)
    error = gang.same_verdict()
    assert isinstance(error, LaunchFailed)
    assert "Rank 2 on node 1 (host host-1) failed with ValueError: loss is nan" in str(error)
    assert error.cause["node"] == 1
    for kind in (Go, Stop, Verdict):  # which is made into bytes once
        assert gang.got(1, kind)[0] is gang.got(2, kind)[0]


def test_a_node_that_was_stopped_with_the_control_node_may_report_later():
    gang = running(2)
    gang.ended(1, crash(1), ok=False)
    gang.post(gang.state.was_stopped(600.0))
    gang.pass_time(600.0)
    assert gang.is_undecided()
    gang.ended(0, ok=False)
    assert "did not report" not in str(gang.same_verdict())


@pytest.mark.parametrize(
    ("cause", "words"), [("a crash", "loss is nan"), ("a hang", "no rank wrote"), ("none", "Launch 0 failed.")]
)
def test_a_silent_node_does_not_hold_up_the_verdict_for_ever_and_starts_no_more(cause, words):
    gang = running(3, hang_timeout_s=30.0, max_restarts=1)
    if cause == "a hang":
        gang.pass_time(31.0)  # it leaves time for the diagnostics
    else:
        gang.ended(1, *([crash(1)] if cause == "a crash" else []), ok=False)
    for node in (0, 1):
        gang.ended(node, ok=False)
    gang.pass_time(GRACE_S + (29.0 if cause == "a hang" else 14.0))
    assert gang.is_undecided()
    gang.pass_time(2.0)
    error = gang.same_verdict()
    assert isinstance(error, LaunchFailed)
    assert words in str(error)
    assert "Node 2 did not report" in str(error)


@pytest.mark.parametrize("node", [0, 1])
def test_the_control_node_hears_in_a_line_why_everything_stops_unless_it_has_failed_itself(node):
    gang = running(2)
    gang.failed(node, crash(node, "ValueError: " + "x" * 500 + "\nsecond line"))
    (stop,) = gang.got(0, Stop)
    assert stop.teller == node
    said = "Rank 2 on node 1 (host host-1) failed with ValueError: "
    assert stop.because == ("" if node == 0 else said + "x" * (300 - len(said)) + "…")


# --- lost and leaving nodes ------------------------------------------------------------------------


STEP_TIMEOUT = Cause("step_timeout", 1, "host-1", exception="longer than the step's @timeout of 6 s allows")


@pytest.mark.parametrize("phase", ["before", "gathering", "running"])
@pytest.mark.parametrize(
    ("cause", "cls"),
    [
        (None, LaunchFailed),
        (step_failure(1), LaunchFailed),
        (Cause("call", 1, "host-1", exception="EntrypointError"), LaunchFailed),
        (STEP_TIMEOUT, LaunchTimeout),
        (preemption(), TorchrunPreempted),
    ],
    ids=["lost", "step", "call", "step_timeout", "preempted"],
)
def test_a_node_that_is_gone_ends_what_the_others_do_with_the_same_class_of_error(phase, cause, cls):
    gang = GangOf(3)
    if phase == "gathering":
        gang.ready(0)
    elif phase == "running":
        gang.all_ready()
    if cause is None:
        gang.lost(1)
    else:
        gang.leave(1, cause)
    if phase == "running":
        assert gang.got(0, Stop)[0].teller == (0 if cause is None else 1), "a lost node's log may say nothing"
        assert not gang.got(0, Verdict)
        gang.ended(0, ok=False)
        gang.ended(2, crash(2, "RuntimeError: gloo: Connection reset by peer"))
    gang.ready(0, launch=5)
    assert len(gang.got(0, Go)) == (phase == "running")
    errors = [verdict.error for verdict in gang.got(0, Verdict)]
    assert len(errors) == (1 if phase == "before" else 2)
    if phase != "running" or cause is None:  # nodes that had the verdict of a launch need not hear it again
        errors += [gang.abort(node) for node in (0, 2)]
        assert len({str(error) for error in errors}) == 1
        assert gang.state.error is gang.abort(0)
    assert type(errors[0]) is cls
    outside = f"{'outside of' if cause is None or cause.kind != 'call' else 'in the call of'} current.torch.run"
    where = {"before": outside, "gathering": "before launch 0 began", "running": "stopped"}[phase]
    what = "failed: its task was killed by SIGKILL" if cause is None else cause.what
    assert f"ode 1 (host host-1) {what}" in str(errors[0])
    assert where in str(errors[0])


def test_leaving_is_acknowledged_once_and_who_has_left_is_not_lost_and_hears_nothing_more():
    gang = GangOf(3)
    gang.leave(1)
    gang.leave(1)
    gang.lost(1)
    gang.leave(0)
    assert [type(message) for message in gang.sent[1]] == [Welcome, Ack]
    assert [type(message) for message in gang.sent[2]] == [Welcome, Bye]


@pytest.mark.parametrize("how", ["leave", "done"])
def test_a_node_whose_step_ends_while_others_wait_called_run_less_often(how):
    gang = GangOf(3)
    gang.ready(0)
    getattr(gang, how)(2)
    error = gang.verdict(0)
    assert isinstance(error, GangError)
    assert "already ended on node 2" in str(error)
    assert "same number of times" in str(error)
    gang.ready(1)  # which comes later
    assert gang.verdict(1) is error


# --- restarts ------------------------------------------------------------------------------------


def test_a_node_that_is_lost_in_the_pause_before_a_restart_is_the_cause():
    """What failed before is dealt with: a restart was to follow."""
    gang = running(3, max_restarts=2)
    fail_everywhere(gang, 0)
    gang.lost(2, "its task was killed by SIGKILL")
    error = gang.same_verdict(0, 1)
    assert (error.cause["node"], error.cause["kind"]) == (2, "lost")
    assert "its task was killed by SIGKILL" in str(error)
    assert "after 1 restart" not in str(error), "there was none"
    before = "All workers were about to start again after an earlier failure: Rank 2 on node 1"
    assert before in str(error)


@pytest.mark.parametrize(("stopping_s", "left_s"), [(0.0, 0.8), (0.5, 0.3), (0.8, 0.0), (20.0, 0.0)])
def test_the_pause_before_a_restart_counts_from_the_failure_not_from_the_end_of_all(stopping_s, left_s):
    gang = running(2, max_restarts=1)
    gang.failed(1, crash(1), age_s=0.2)
    gang.ended(1, crash(1), ok=False, age_s=0.2)
    gang.pass_time(stopping_s)
    assert not gang.got(0, Restart)  # node 0 still stops
    gang.ended(0, ok=False)
    assert gang.got(0, Restart)[0].pause_s == pytest.approx(left_s)
    assert gang.state.due_at == pytest.approx(gang.now + left_s)


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
        (crash(1, kind="agent"), "start", False),
        (crash(1, kind="unreachable"), "network", False),
        (crash(1, kind="command"), "before_run", False),
        (crash(1, kind="agent_ended"), "killed", True),
        (preemption(), "preempted", False),
        (crash(1, kind="interrupted"), "interrupted", False),
    ],
)
def test_the_class_of_the_cause_decides_about_a_restart(cause, category, restarts_by_default):
    assert cause.category == cause.as_dict()["category"] == category
    for restart_on, restarts in [(None, restarts_by_default), ([category], category != "preempted"), ([], False)]:
        gang = running(2, max_restarts=1, **({} if restart_on is None else {"restart_on": frozenset(restart_on)}))
        gang.ended(0, ok=False)
        gang.ended(1, cause)
        assert bool(gang.got(0, Restart)) is restarts
        if not restarts:
            error = gang.same_verdict()
            assert error.cause["category"] == category
            assert isinstance(error, TorchrunPreempted) is (category == "preempted")
            assert cause.kind in ("terminated", "timeout", "hang") or f"(class {category})." in str(error)
            gang = running(2)
            gang.ended(0, ok=False)
            gang.ended(1, cause)
            assert "(class " not in str(gang.same_verdict()), "it matters only with restarts"


@pytest.mark.parametrize(
    ("cause", "hint"),
    [
        (crash(code=-9, text=None, kind="signal"), True),
        (crash(), False),  # an error in the user's code comes again
        (crash(code=1, text=None, kind="exit"), False),
        (crash(kind="unreachable"), False),
    ],
)
def test_a_restart_is_named_where_it_could_help(cause, hint):
    gang = running(2)
    gang.ended(1, cause)
    gang.ended(0, ok=False)
    assert ("max_restarts=N" in gang.same_verdict().message) is hint


@pytest.mark.parametrize(
    ("text", "ok", "codes", "early", "named"),
    [
        ("RuntimeError: gloo: Connection closed by peer", False, {0: 0, 1: -15}, (0,), "Rank 0 had ended with code 0"),
        ("RuntimeError: gloo: Connection closed by peer", True, {0: 0, 1: 0}, (), "Ranks 0, 1 had ended with code 0"),
        ("RuntimeError: gloo: Connection closed by peer", False, {0: 0, 1: 0}, (), None),  # it was told to stop
        ("ValueError: x", False, {0: 0, 1: -15}, (0,), None),
    ],
)
def test_ranks_that_ended_well_are_named_where_a_lost_connection_is_all_that_is_known(text, ok, codes, early, named):
    gang = running(2)
    if ok:
        gang.ended(0, exit_codes=codes)
    gang.ended(1, crash(text=text))
    if not ok:
        gang.ended(0, ok=False, exit_codes=codes, early=early)
    message = gang.same_verdict().message
    assert message.startswith(named or ""), "it stands first"
    assert named or "had ended with code 0" not in message
    sentence = snapshot_of(gang.state).summary.sentence
    assert (named or "Rank 2") in sentence
    assert "Rank 2 on node 1" in sentence
    assert named or "had ended with code 0" not in sentence


def test_restarts_end_and_the_pauses_between_them_grow_and_stay_bounded():
    gang = running(2, max_restarts=20)
    for generation in range(21):
        fail_everywhere(gang, generation)
        gang.pass_time(1000.0)
    assert gang.state.restarts_left == 0
    assert [restart.pause_s for restart in gang.got(0, Restart)] == [1.0, 2.0, 4.0, 8.0, 16.0, *[30.0] * 15]
    for node in (0, 1):
        assert [go.generation for go in gang.got(node, Go)] == [*range(21)]
    assert "after 20 restarts" in str(gang.same_verdict())


# --- time limits ---------------------------------------------------------------------------------

ALLOWS = "longer than the step's @timeout allows"


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        ({"timeout_s": 60.0}, "longer than 60 s. run(timeout_s=...) and the step's @timeout change"),
        ({"deadline": 1560.0, "max_restarts": 3}, ALLOWS),  # no reason to restart
    ],
)
def test_a_launch_that_takes_too_long_is_stopped_and_says_what_changes_that(limit, said):
    gang = GangOf(2, deadline=limit.pop("deadline", FOREVER))
    gang.pass_time(500.0)
    gang.all_ready(**limit)
    gang.pass_time(59.0)
    assert not gang.got(0, Stop)
    gang.pass_time(1.5)
    assert all(gang.got(node, Stop) for node in (0, 1))
    gang.all_ended(ok=False)
    error = gang.same_verdict()
    assert isinstance(error, LaunchTimeout)
    assert said in str(error)
    gang.pass_time(100.0)
    assert not gang.got(0, Abort)  # the time is up once


@pytest.mark.parametrize(
    ("limits", "second_stop_after_s"), [({"timeout_s": 60.0}, 60.0), ({"deadline": 1060.0, "timeout_s": 59.0}, 5.0)]
)
def test_a_launchs_limit_counts_anew_for_each_restart_and_the_steps_does_not(limits, second_stop_after_s):
    gang = running(2, max_restarts=1, **limits)
    gang.pass_time(50.0)
    fail_everywhere(gang, 0)
    gang.pass_time(5.0)
    gang.pass_time(second_stop_after_s - 1.0)
    assert len(gang.got(0, Stop)) == 1
    gang.pass_time(2.0)
    assert len(gang.got(0, Stop)) == 2


def test_the_steps_time_counts_while_nodes_gather_and_says_who_was_waited_for():
    gang = GangOf(3, deadline=1060.0, join=False)
    gang.join(0, 1)
    gang.pass_time(40.0)
    gang.ready(0)
    gang.pass_time(19.0)
    assert not gang.got(0, Verdict)
    gang.pass_time(2.0)
    error = gang.verdict(0)
    assert type(error) is LaunchTimeout
    waited = "launch 0 waited for node 2 to start and for node 1 to call current.torch.run"
    assert f"ode 0 (host host-0) ran {ALLOWS}, while {waited}" in error.message
    assert gang.verdict_events(0)[0][-3:] == ["timeout", "cause", "failed"]
    gang.ready(1)
    assert gang.verdict(1) is error
    gang.join(2)
    gang.ready(2)
    gang.all_ready(1)  # whoever goes on all the same, launches in vain
    gang.pass_time(1.0)
    gang.all_ended(ok=False, launch=1)
    assert type(gang.verdict(0, launch=1)) is LaunchTimeout


def test_the_steps_time_counts_in_the_pause_before_a_restart():
    gang = running(2, max_restarts=1, deadline=1000.5)
    fail_everywhere(gang, 0)
    gang.pass_time(0.4)
    assert gang.is_undecided()
    gang.pass_time(0.2)
    error = gang.same_verdict()
    assert (type(error), error.cause["kind"]) == (LaunchTimeout, "step_timeout")
    assert len(gang.got(0, Go)) == 1


@pytest.mark.parametrize(("left_s", "limit_s"), [(500.0, 120.0), (70.0, 70.0), (3.0, GRACE_S), (-1.0, GRACE_S)])
def test_what_a_failed_launch_stores_takes_no_longer_than_the_step_may(left_s, limit_s):
    gang = running(2, deadline=1000.5 + left_s)
    gang.now += 0.5
    gang.all_ended(crash(1), stores=True)
    (store,) = gang.got(0, Store)
    assert store.within_s == pytest.approx(limit_s)
    gang.pass_time(limit_s + 14.0)  # and the index of what was stored
    assert not gang.got(0, Verdict)
    gang.pass_time(2.0)
    assert gang.same_verdict() is store.error


@pytest.mark.parametrize("has_ended", [False, True])
def test_the_steps_time_ends_the_steps_own_code_once_on_all_nodes(has_ended):
    gang = running(2, deadline=1060.0)
    gang.all_ended()
    if has_ended:
        gang.done(0)
    gang.pass_time(59.0)
    assert not gang.got(0, Abort)
    gang.pass_time(2.0)
    gang.pass_time(2.0)
    for node in (0, 1):
        errors = [abort.error for abort in gang.got(node, Abort)]
        assert [type(error) for error in errors] == ([] if has_ended else [LaunchTimeout])
        assert all(f"{ALLOWS}.\nIt happened outside of current.torch.run" in error.message for error in errors)


# --- what a feature finds wrong -----------------------------------------------------------------


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_keeper_can_have_the_launch_fail_and_tell_what_it_has_found_out(restarts):
    gang = running(2, hang_timeout_s=30.0, max_restarts=restarts)
    for _ in range(3):
        gang.pass_time(20.0)
        gang.say(1, Told(0, 0, "hangs", {"age_s": 1.0}))
    gang.pass_time(28.0)
    assert not gang.got(0, Stop)
    gang.pass_time(1.5)  # the last news was of 30.5 s ago
    for node in (0, 1):
        (stop,) = gang.got(node, Stop)
        assert (stop.kind, stop.because, stop.teller) == ("hang", "the launch hangs: no rank wrote", 0)
        gang.ended(node, ok=False)
    if restarts:
        gang.lost(1)  # before it starts again
        assert "after an earlier failure: the launch hangs: no rank wrote." in str(gang.verdict(0))
        return
    error = gang.verdict(0)
    assert isinstance(error, LaunchHung)
    assert error.cause["detail"] == "found out"
    assert "found out" in str(error)


# --- preemption ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "number"), [("terminated", signal.SIGUSR1), ("exception", None)])
def test_a_preemption_sends_the_users_signal_and_tells_who_saved(kind, number):
    gang = running(2, preemption_signal=signal.SIGUSR1)
    gang.failed(1, crash(1, kind=kind))
    assert [stop.signal for node in (0, 1) for stop in gang.got(node, Stop)] == [number, number]
    gang.ended(0, ok=False, exit_codes={1: 0, 0: 1})
    gang.ended(1, ok=False, exit_codes={2: 0, 3: 0})
    error = gang.same_verdict()
    assert isinstance(error, TorchrunPreempted) is (kind == "terminated")
    assert ("exited with code 0 in time: 1, 2, 3" in str(error)) is (kind == "terminated")


@pytest.mark.parametrize("node", [0, 1])
def test_a_second_order_to_end_leaves_the_exit_codes_that_a_node_has_reported(node):
    gang = running(2)
    gang.failed(node, preemption(node))
    gang.ended(node, ok=False, exit_codes={2 * node: 0, 2 * node + 1: 0})
    gang.give_up(node, preemption(node))  # while the other node's workers still save
    gang.ended(1 - node, ok=False, exit_codes={2 - 2 * node: 1, 3 - 2 * node: 0})
    saved = "0, 1, 3" if node == 0 else "1, 2, 3"
    assert f"exited with code 0 in time: {saved}." in str(gang.same_verdict())


def test_a_killed_node_stays_lost_on_the_page_when_its_supervisor_has_ended_the_workers():
    gang = running(2)
    gang.post(gang.state.lost(1, "its task was killed by SIGKILL", is_connected=True))
    gang.ended(1, ok=False)
    gang.ended(0, ok=False, exit_codes={0: -15, 1: -15})
    found = summarize(gang.records, 2, 2)
    assert [node.word for node in found.nodes] == ["stopped", "lost"]  # before its connection has ended
    gang.post(gang.state.disconnected(1, "its connection has ended"))
    found = summarize(gang.records, 2, 2)
    assert ([node.word for node in found.nodes], found.outcome) == (["step code", "lost"], "failed")
    assert [rank.state for rank in found.ranks] == ["stopped", "stopped", "lost", "lost"]


# --- what goes to the datastore ------------------------------------------------------------

VALUE = "rank 2's value (2.1 GB)"
LEFT = "what its workers have left"


def store_failure(node=1):
    return Cause("store", node, f"host-{node}", 2, 0, exception="has ended well, but its value could not be stored")


def storing(*nodes, num_nodes=3, **limits):
    """Return a gang whose workers have all ended well; `nodes` have something to store."""
    gang = running(num_nodes, **limits)
    for node in range(num_nodes):
        gang.ended(node, stores=node in nodes)
    return gang


@pytest.mark.parametrize(
    ("limit", "error"),
    [
        ({"hang_timeout_s": 20.0, "timeout_s": 40.0, "max_restarts": 3}, type(None)),
        ({"deadline": 1100.0}, LaunchTimeout),
    ],
)
def test_who_stores_neither_hangs_nor_is_too_slow_but_for_the_step(limit, error):
    gang = storing(1, num_nodes=2, **limit)
    gang.say(1, Storing(0, 0, VALUE))
    gang.pass_time(100.1)
    assert bool(gang.got(1, Stop)) is (error is not type(None))
    gang.stored(1)
    verdict = gang.same_verdict()
    assert type(verdict) is error
    assert "deadline" not in limit or f"node 1 stores {VALUE} (for 100 s so far)" in str(verdict)


def test_the_control_node_says_every_30_s_who_stores_what():
    gang = storing(*range(6), num_nodes=7)
    for node in range(5):
        gang.say(node, Storing(0, 0, f"rank {node * 2}'s value"))
    gang.pass_time(29.0)
    assert not gang.notes(0)
    gang.pass_time(1.1)
    assert gang.notes(0) == [
        "node 1 stores rank 2's value; node 2 stores rank 4's value; node 3 stores rank 6's value; so do 2 other nodes "
        "(for 30 s so far)"
    ]
    for node in (0, 1, 2, 3, 4):
        gang.stored(node)
    gang.say(2, Storing(launch=0, generation=0, what="late"))
    gang.pass_time(30.1)
    assert gang.notes(0)[1:] == [f"node 5 stores {LEFT} (for 60 s so far)"]
    assert not gang.notes(1)


def test_a_value_that_can_not_be_stored_fails_the_launch_and_restarts_nothing():
    gang = storing(1, 2, max_restarts=3, restart_on=frozenset({"user", "killed", "timeout", "hang", "start"}))
    gang.stored(1, store_failure())
    assert all(gang.got(node, Stop) for node in range(3))
    error = gang.same_verdict()
    assert type(error) is LaunchFailed
    assert error.cause["category"] == "store"
    assert "Rank 2 on node 1 (host host-1) has ended well, but its value could not be stored." in str(error)
    assert "its workers had ended well" in str(error)
    assert len(gang.got(0, Store)) == 1, "nothing more is stored"


# --- what is stored of a launch that has failed ----------------------------------------------------


def failing(*nodes, num_nodes=3, **policy):
    """Return a gang whose launch has failed for good, with no worker left; `nodes` have something to store."""
    gang = running(num_nodes, **policy)
    for node in (1, *({*range(num_nodes)} - {1})):
        gang.ended(node, *([crash(1)] if node == 1 else []), ok=False, stores=node in nodes)
    return gang


@pytest.mark.parametrize("nodes", [[0], [0, 1, 2]])
def test_a_launch_that_fails_ends_when_what_it_has_left_is_stored(nodes):
    gang = failing(*nodes)
    asked = [store for node in range(3) for store in gang.got(node, Store)]
    assert asked[0].error.cause["rank"] == 2
    assert all(store is asked[0] for store in asked), "each knows why, even if the control node is lost now"
    events = [event.kind for event in asked[0].events]
    assert events == ["go", "stopping", "cause"], "what has failed is known before anything is stored"
    assert [report.cause["rank"] for report in gang.reports] == [2]
    for node in nodes:
        assert gang.is_undecided()
        gang.stored(node)
    assert gang.same_verdict().cause["rank"] == 2
    assert [record.kind for record in gang.records].count("cause") == len(gang.reports) == 1


def test_a_store_that_is_away_does_not_delay_the_verdict_of_a_failure_for_ever():
    gang = failing(0, 1, 2)
    gang.stored(0)
    gang.pass_time(135.1)
    assert gang.same_verdict().cause["rank"] == 2
    said = gang.notes(0)
    gang.pass_time(60.0)
    assert gang.notes(0) == said, "nobody waits for it any more"


def test_what_is_left_is_stored_while_a_restart_was_to_come_that_does_not():
    notebook = Notebook()
    gang = failing(0, num_nodes=2, max_restarts=1, keepers=Keepers({"notes": notebook}))
    gang.lost(1)
    (store,) = gang.got(0, Store)
    gang.say(0, Told(store.launch, store.generation, "notes", {"key": 1}))
    gang.stored(0, launch=store.launch, generation=store.generation)
    assert gang.verdict(0) is not None
    assert notebook.heard[-1][:3] == ("handle", 0, {"key": 1}), "the verdict comes after it"


# --- thousands -----------------------------------------------------------------------------------

MANY = 300


def objects_of(root):
    """Return how many objects hang together with one, without modules, classes and functions."""
    seen, found = set(), [root]
    while found:
        each = found.pop()
        if id(each) not in seen and not isinstance(each, type | ModuleType | FunctionType):
            seen.add(id(each))
            found += gc.get_referents(each)
    return len(seen)


def test_no_message_of_one_node_makes_the_gang_look_through_all_nodes(monkeypatch):
    """With thousands of nodes that would be millions of looks, while all of them wait."""
    gang, looks = GangOf(MANY), []
    which = Nodes.which
    monkeypatch.setattr(Nodes, "which", lambda nodes, *states: looks.append(states) or which(nodes, *states))
    gang.all_ready()
    for node in range(MANY):
        gang.ended(node, stores=True)
    for node in range(MANY):
        gang.stored(node)
    assert gang.same_verdict() is None
    gang.all_ready(1)
    for node in range(MANY):
        gang.failed(node, crash(node), launch=1)
    for node in range(MANY):
        gang.ended(node, crash(node), launch=1)
    for node in range(MANY):
        assert len(gang.got(node, Verdict)) == 2
        gang.done(node)
        gang.pass_time(0.1)
    for node in reversed(range(MANY)):
        gang.leave(node)
    assert len(looks) < 30


def test_the_verdict_of_thousands_is_made_once():
    """What is the same object is made into bytes once, and all hear it in about a second."""
    gang = GangOf(MANY)
    gang.all_ready()
    gang.all_ended(crash(1))
    first, *others = [gang.got(node, Verdict)[0] for node in range(1, MANY)]
    assert all(each is first for each in others)


def test_a_contradiction_of_thousands_is_told_in_short():
    gang = GangOf(MANY)
    for node in range(MANY):
        gang.ready(node, digest=f"digest-{node}")
    error = str(gang.same_verdict())
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


# --- what is recorded -----------------------------------------------------------------------------


def test_the_life_of_a_gang_is_recorded():
    gang = running(2)
    gang.say(1, Started(1, 0))  # of another launch
    gang.say(1, Started(0, 0))
    gang.say(1, Wrote(0, 0))
    for node in (0, 0, 1):  # a node's exits count once
        gang.ended(node, exit_codes={2 * node: 0, 2 * node + 1: 0})
    for node in (0, 1):
        gang.done(node)
        gang.leave(node)
    assert [(each.kind, each.node, each.rank) for each in gang.records] == [
        *(("joined", node, None) for node in (0, 1)),
        *(("ready", node, None) for node in (0, 1)),
        ("go", None, None),
        ("started", 1, None),
        ("output", 1, None),
        ("exited", 0, 0),
        ("exited", 0, 1),
        *[("stopped", 0, None)] * 2,
        ("exited", 1, 2),
        ("exited", 1, 3),
        ("stopped", 1, None),
        ("done", None, None),
        *((kind, node, None) for node in (0, 1) for kind in ("finished", "left")),
    ]


def test_the_control_node_gets_all_records_with_a_verdict_and_others_those_of_the_gang():
    gang = running(2, max_restarts=1)
    gang.failed(1, crash(1))
    gang.all_ended()
    gang.pass_time(1.0)
    gang.failed(1, crash(1), generation=1)
    gang.all_ended(generation=1)
    (of_control,), (of_member,) = gang.verdict_events(0), gang.verdict_events(1)
    assert of_member == ["go", "stopping", "cause", "restart", "go", "stopping", "cause", "failed"]
    assert [kind for kind in of_control if kind in of_member] == of_member
    assert "stopped" in of_control
    (cause, _) = [event for event in gang.records if event.kind == "cause"]
    assert (cause.node, cause.rank, cause.exit_code, cause.generation) == (1, 2, 1, 0)
    assert cause.text == "Rank 2 on node 1 (host host-1) failed with ValueError: loss is nan"
    restart, failed = gang.reports
    assert (restart.error, restart.generation, failed.error, failed.generation) == (None, 0, "LaunchFailed", 1)
    assert restart.text.startswith(f"{cause.text}.")
    assert (failed.text, failed.cause) == (str(gang.same_verdict()), gang.same_verdict().cause)


def test_the_thousandth_launch_costs_what_the_first_does():
    """What one launch needs is sent for it alone, and what is kept of all has a bound and says what it left out."""
    gang, told, grown = GangOf(2), [], []
    for number in range(2600):
        gang.all_ready(number)
        for node in (0, 1):
            gang.ended(node, launch=number, exit_codes={2 * node: 0, 2 * node + 1: 0}, stores=True)
        for node in (0, 1):
            gang.stored(node, launch=number)
        told.append([gang.got(node, Verdict)[-1] for node in (0, 1)])
        for sent in gang.sent.values():
            sent.clear()
        if number in (2300, 2599):
            grown.append(objects_of(gang.state))
    assert [event.kind for event in told[2500][1].events] == ["go", "done"]
    own = [event.kind for event in told[2500][0].events]
    assert own == ["ready"] * 2 + ["go", *["exited", "exited", "stopped"] * 2, "done"]
    assert [event.kind for event in told[0][0].events] == ["joined", "joined", *own]
    first, late = (len(encode(told[number][1])) for number in (1, 2500))
    assert late < first + 60, "but for longer numbers"
    assert grown[1] < grown[0] * 1.01
    known = snapshot_of(gang.state)
    assert "records are left out here" in " ".join(event.text for event in known.events)


# --- before_run -------------------------------------------------------------------------------------

NO_DATA = Cause("command", 1, "host-1", exit_code=2, exception="before_run 1/2 (make data) exited with code 2")


def preparing(num_nodes=3, ready=(), launch=0):
    """Return a gang whose nodes run their commands, but for those that are ready."""
    gang = GangOf(num_nodes)
    for node in range(num_nodes):
        if node in ready:
            gang.ready(node, launch)
        else:
            gang.say(node, Prepares(launch, 2))
    return gang


def test_nothing_starts_before_the_last_command_of_the_last_node():
    gang = preparing(2, ready=[0])
    gang.say(1, Command(0, "before_run 1/1 (make data) exited with code 0", 0, 600.0))
    assert not gang.got(0, Go)
    gang.ready(1)
    assert gang.got(0, Go)
    gang.all_ended()
    kinds = [[each.kind for each in verdict.events] for verdict in (gang.got(0, Verdict)[0], gang.got(1, Verdict)[0])]
    assert kinds[0].index("before_run") < kinds[0].index("command") < kinds[0].index("go") < kinds[0].index("done")
    assert kinds[1] == ["go", "done"]


def test_who_is_ready_hears_who_runs_commands():
    gang = preparing(3, ready=[0])
    gang.pass_time(11)
    assert gang.notes(0) == ["launch 0 waits for nodes 1, 2 to end before_run"]


@pytest.mark.parametrize("ready", [(), (0,), (0, 2)])
def test_a_command_that_fails_on_one_node_ends_the_launch_at_once_on_all(ready):
    gang = preparing(3, ready)
    gang.failed(1, NO_DATA, generation=None)
    gang.failed(2, replace(NO_DATA, node=2, host="host-2"), generation=None)  # the first counts
    error = gang.same_verdict()
    assert isinstance(error, LaunchFailed)
    assert str(error).startswith(
        "before_run failed, so no worker was started on any node.\nNode 1 (host host-1) failed: "
    )
    assert (error.cause["category"], error.cause["node"]) == ("before_run", 1)
    assert not gang.got(0, Go)


@pytest.mark.parametrize("late", ["prepares", "is ready"])
def test_a_launch_whose_commands_have_failed_ends_when_the_last_node_has_called_run(late):
    """Else the control node could be gone before the last one hears why."""
    gang = GangOf(2)
    gang.say(0, Prepares(0, 2))
    gang.failed(0, replace(NO_DATA, node=0, host="host-0"), generation=None)
    gang.pass_time(11)
    assert gang.is_undecided()
    assert gang.notes(0) == ["launch 0 waits for node 1 to call current.torch.run"]
    if late == "is ready":
        gang.ready(1)
    else:
        gang.say(1, Prepares(0, 2))
    assert gang.same_verdict().cause["node"] == 0


def test_of_a_launch_with_very_many_restarts_the_other_nodes_are_told_the_begin_and_the_end():
    gang = running(2, max_restarts=500)
    hostile = '🙂 "*" \\ ' * 100
    for generation in range(501):
        gang.all_ended(crash(1, hostile), generation=generation)
        gang.pass_time(31.0)
    (verdict,) = gang.got(1, Verdict)
    assert len(verdict.events) == 301
    assert (verdict.events[0].kind, verdict.events[-1].kind) == ("go", "failed")
    assert [event.text for event in verdict.events if event.kind == "omitted"] == ["1704 records are left out here"]
    assert len(encode(verdict)) < 600_000
    assert decode(load(encode(verdict)[4:])).events == verdict.events, "nothing of it is shortened on its way"


# --- any order of anything -------------------------------------------------------------------------


def by_a_node(which, **drawn):
    """Return a decorator for what one node does, drawn from those that `which` returns, whenever there is any."""

    def decorate(act):
        def of_one(self, data, **given):
            act(self, data.draw(st.sampled_from(which(self))), **given)

        of_one.__name__ = act.__name__
        return precondition(which)(rule(data=st.data(), **drawn)(of_one))

    return decorate


def in_state(*states):
    return lambda self: self.nodes(*states)


class AnyInterleaving(RuleBasedStateMachine):
    """Nodes that behave, in any order, on a network that drops any of them at any time."""

    @initialize(
        num_nodes=st.sampled_from([3, 2, 1]),
        max_restarts=st.integers(0, 2),
        hang_timeout_s=st.sampled_from([None, 20.0]),
        storing=st.sampled_from([(), (0,), (0, 1, 2)]),
        runs=st.booleans(),
    )
    def begin(self, num_nodes, max_restarts, hang_timeout_s, storing, runs):
        self.gang = GangOf(num_nodes, started_timeout_s=50.0, join=False)
        self.max_restarts, self.hang_timeout_s, self.storing = max_restarts, hang_timeout_s, storing
        # A node: absent -> out (in its own code) <-> in (a launch) -> storing (its results) -> gone. The control
        # node is waiting instead of storing.
        self.state = dict.fromkeys(range(num_nodes), "absent")
        self.launches = dict.fromkeys(range(num_nodes), 0)  # as each node counts its calls
        self.preparing = set()  # nodes whose commands run
        self.prepared = set()  # launches and the nodes that ran commands before
        self.running = dict.fromkeys(range(num_nodes))  # generation whose agent runs
        self.stores = {}  # node -> generation of which it stores what there is
        self.verdicts = {}  # launch -> node -> verdict
        self.read = dict.fromkeys(range(num_nodes), 0)
        self.goes = {}  # (launch, generation) -> what the nodes were told
        self.preempted = set()  # launches and generations in which some node was
        self.given_up = set()  # launches and the nodes that gave them up
        for node in range(num_nodes) if runs else ():  # else few examples would come far
            self.join_gang(node)
            self.begin_launch(node)

    def nodes(self, *states):
        return [node for node, state in getattr(self, "state", {}).items() if state in states]

    def busy(self):
        return [node for node in self.nodes("in") if self.running[node] is not None]

    def about(self, node):
        return {"launch": self.launches[node], "generation": self.running[node]}

    def read_messages(self):
        """Let every node do what a supervisor does with its messages."""
        for node, sent in self.gang.sent.items():
            while self.read[node] < len(sent):
                message = sent[self.read[node]]
                self.read[node] += 1
                has_given_up = isinstance(message, Go | Verdict) and (message.launch, node) in self.given_up
                if self.state[node] == "gone" or (has_given_up and isinstance(message, Verdict)):
                    continue
                is_again = isinstance(message, Verdict) and node in self.verdicts.get(message.launch, {})
                if is_again and (message.launch, node) in self.prepared:
                    continue  # of *prepares* and of *ready*; the node is in that launch no more
                if isinstance(message, Go):
                    assert not has_given_up, "go for a node that has given up"
                    self.note_go(node, message)
                elif isinstance(message, Store):
                    self.note_store(node, message)
                elif isinstance(message, Verdict):
                    self.note_verdict(node, message)
                elif isinstance(message, Abort):
                    assert self.state[node] != "storing", "news for a node that is done"
                    self.state[node] = "aborted"
                    self.preparing.discard(node)
                    self.running[node] = None

    def note_go(self, node, message):
        launch, generation = self.launches[node], message.generation
        assert self.state[node] == "in", "go for a node that did not ask for it"
        assert node not in self.preparing, "go for a node whose commands run"
        assert self.running[node] is None, "two generations at once"
        assert message == self.goes.setdefault((launch, generation), message), "nodes were told to start differently"
        assert not self.preempted & {(launch, before) for before in range(generation)}, "a restart after a preemption"
        assert message.restarts <= self.max_restarts, "more restarts than allowed"
        self.running[node] = generation
        self.stores.pop(node, None)

    def note_store(self, node, message):
        if self.state[node] != "in" or message.launch != self.launches[node]:
            return
        assert message.error is not None or self.running[node] is None, "a launch ends well while workers run"
        if self.running[node] is None:
            self.stores[node] = message.generation

    def note_verdict(self, node, message):
        got = self.verdicts.setdefault(self.launches[node], {})
        assert self.state[node] in ("in", "aborted"), "a verdict for a node that is in no launch"
        assert node not in got, "a second verdict for one launch"
        assert message.launch == self.launches[node], "a verdict for another launch"
        got[node] = message.error
        self.stores.pop(node, None)
        if self.state[node] == "in":
            self.leave_launch(node)

    def leave_launch(self, node):
        self.state[node], self.running[node] = "out", None
        self.launches[node] += 1
        self.preparing.discard(node)
        self.stores.pop(node, None)

    @by_a_node(in_state("absent"))
    def join(self, node):
        self.join_gang(node)

    def join_gang(self, node):
        assert self.gang.state.nodes.may_join(Join(node))
        self.state[node] = "out"
        self.gang.join(node)

    @by_a_node(in_state("out"), odd=st.booleans())
    def ready(self, node, odd):
        self.begin_launch(node, **({"torch": "2.5.1"} if odd and node == 1 else {}))

    @by_a_node(in_state("out"))
    def prepare(self, node):
        self.state[node] = "in"
        self.preparing.add(node)
        self.prepared.add((self.launches[node], node))
        self.gang.say(node, Prepares(self.launches[node], 2))

    @by_a_node(lambda self: sorted(getattr(self, "preparing", ())), fails=st.booleans())
    def end_commands(self, node, fails):
        self.preparing.remove(node)
        if fails:
            self.gang.failed(node, replace(NO_DATA, node=node), launch=self.launches[node], generation=None)
        else:
            self.begin_launch(node)

    def begin_launch(self, node, **facts):
        self.state[node] = "in"
        limits = {"timeout_s": 40.0, "hang_timeout_s": self.hang_timeout_s}
        self.gang.ready(node, self.launches[node], max_restarts=self.max_restarts, **limits, **facts)

    @by_a_node(lambda self: self.busy(), how=st.sampled_from(["ok", "crash", "stopped"]))
    def end(self, node, how):
        about, self.running[node] = self.about(node), None
        causes = [crash(node)] if how == "crash" else []
        self.gang.ended(node, *causes, ok=how == "ok", stores=node in self.storing, **about)

    @by_a_node(lambda self: sorted(getattr(self, "stores", ())), fails=st.booleans())
    def store(self, node, fails):
        about = {"launch": self.launches[node], "generation": self.stores.pop(node)}
        self.gang.stored(node, *([store_failure(node)] if fails else []), **about)

    @by_a_node(lambda self: self.busy(), kind=st.sampled_from(["exception", "terminated"]))
    def fail(self, node, kind):
        if kind == "terminated":  # its task gets SIGTERM, or its machine a spot notice
            self.preempted.add((self.launches[node], self.running[node]))
        self.gang.failed(node, crash(node, kind=kind), **self.about(node))

    @by_a_node(in_state("in"))
    def give_up(self, node):
        """Something in the node's own process ends its `run`."""
        number = self.launches[node]
        self.given_up.add((number, node))
        self.leave_launch(node)
        self.gang.give_up(node, step_failure(node), launch=number)

    @by_a_node(lambda self: self.busy(), age_s=st.sampled_from([0.0, 15.0]))
    def write(self, node, age_s):
        self.gang.say(node, Told(feature="hangs", data={"age_s": age_s}, **self.about(node)))

    @by_a_node(in_state("in"), kind=st.sampled_from(["failed", "ended", "active"]))
    def say_again_what_is_long_over(self, node, kind):
        about = (self.launches[node] - 1, 0)
        late = {
            "failed": Failed(*about),
            "ended": Ended(about[0], False, 0),
            "active": Told(*about, "hangs", {"age_s": 0.0}),
        }[kind]
        self.gang.say(node, late)

    # Without the control node, which decides, there is no gang.
    @by_a_node(lambda self: [node for node in self.nodes("absent", "out", "in", "aborted", "storing") if node])
    def lose(self, node):
        self.state[node] = "gone"
        self.preparing.discard(node)
        self.gang.lost(node)

    @by_a_node(in_state("out"))
    def done(self, node):
        self.state[node] = "storing" if node != 0 else "waiting"
        self.gang.done(node)

    @by_a_node(in_state("out", "aborted", "storing"), badly=st.booleans())
    def leave(self, node, badly):
        if node != 0 or len(self.nodes("out", "in", "absent")) == 1:
            self.state[node] = "gone"
            self.gang.leave(node, step_failure(node) if badly else None)

    @rule(seconds=st.sampled_from([0.1, 3.0, 45.0, 100.0]))
    def tick(self, seconds):
        self.gang.pass_time(seconds)

    @invariant()
    def all_verdicts_of_a_launch_are_equal(self):
        if hasattr(self, "gang"):
            self.read_messages()
            for got in self.verdicts.values():
                assert len({repr(error) for error in got.values()}) <= 1, got

    def teardown(self):
        """Whatever happened, once all nodes are gone or done the rest gets an answer in bounded time."""
        if not hasattr(self, "gang"):
            return
        for _ in range(2 * (self.max_restarts + 2)):
            self.read_messages()
            for node in self.nodes("absent", "out"):
                self.state[node] = "gone" if node else "waiting"
                (self.gang.lost if node else self.gang.done)(node)
            for node, generation in list(self.stores.items()):
                self.gang.stored(node, launch=self.launches[node], generation=generation)
            for node in list(self.preparing):
                self.preparing.remove(node)
                self.begin_launch(node)
            self.read_messages()
            for node in self.busy():
                about, self.running[node] = self.about(node), None
                self.gang.ended(node, ok=False, **about)
            self.gang.pass_time(200.0)
        self.all_verdicts_of_a_launch_are_equal()
        assert not self.nodes("in"), "no answer for them"


TestAnyInterleaving = AnyInterleaving.TestCase
TestAnyInterleaving.settings = hypothesis_settings(max_examples=300, stateful_step_count=25, deadline=None)
