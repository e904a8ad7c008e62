"""What the control node decides, in what order, and what each node gets; with a clock that the test holds."""

import re
import sys
from dataclasses import replace

import pytest
from gang_of import FACTS, FIELDS, GangOf, crash, preemption, running

from metaflow_extensions.torchrun.plugins.torchrun import errors
from metaflow_extensions.torchrun.plugins.torchrun.gang import gang as machine
from metaflow_extensions.torchrun.plugins.torchrun.gang import messages as say
from metaflow_extensions.torchrun.plugins.torchrun.gang.cause import Failure
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.connection import encode
from metaflow_extensions.torchrun.plugins.torchrun.texts import names

KILLED = crash(kind="signal", code=-9, text=None)
NODE_1, SIGKILL, SIGTERM = "node 1 (host host-1)", "its task was killed by SIGKILL", "its task got SIGTERM"
ALLOWS, GO_ON = "longer than the step's @timeout allows", "; the others go on without it"
SPARE, ANOTHER = {"spare_nodes": 1}, {"replaces": True, "started_timeout_s": 300.0}


def test_what_happens_is_recorded_and_the_control_node_gets_all_of_it_with_the_verdict():
    gang, told = GangOf(2).play("prepare 1"), {"text": "it exited with code 0", "exit_code": 0, "seconds": 600.0}
    gang.ready(0, max_restarts=1)
    gang.say(1, say.Report("command", 0, data=told))
    assert not gang.got(0, "Go"), "nothing starts before the last command of the last node"
    gang.ready(1)
    gang.say(1, say.Report("started", 1, 0))  # this one is late
    gang.say(1, say.Report("started", 0, 0))
    gang.failed(1, crash())
    for node in (1, 1, 0):  # a node's exits count once
        gang.stop(node, exit_codes={2 * node: 1})
    gang.play("+1").all_ended(alone=True)
    (to_control,), (to_member,) = gang.got(0, "Verdict"), gang.got(1, "Verdict")
    begins = ["joined", "before_run", "ready", "command", "ready", "go", "started"]
    assert [each.kind for each in to_control.events] == [*begins, "stopping", "exited", "cause", "go", "done"]
    assert (to_member.events, to_member.alone, to_member.error) == ((), True, None)
    (cause,), (command,) = gang.recorded("cause"), gang.recorded("command")
    assert (command.nodes, command.text, command.exit_code, command.seconds) == ([1], *told.values())
    assert (cause.ranks, cause.exit_code, cause.generation) == ([2], 1, 0)
    assert cause.text == f"cause: Rank 2 on {NODE_1} failed with ValueError: loss is nan"


def test_what_nodes_tell_of_their_workers_is_kept_while_these_run():
    gang = running(2).play("+5")
    for generation, key in ((0, "a"), (1, "late"), (7, "late")):
        gang.say(1, say.Report("functions", 0, generation, {"2": key}))
    gang.play("all_ended").say(1, say.Report("functions", 0, 0, {"3": "late"}))
    told = [verdict.left for node in (0, 1) for verdict in gang.got(node, "Verdict")]
    assert told == [{"functions": {"2": "a"}}, {}]


@pytest.mark.parametrize("writes", [False, True])
def test_a_launch_that_writes_nothing_for_a_minute_is_told_of_once(writes):
    gang = running(2, max_restarts=1, stacks="python flow.py torchrun stacks")
    if writes:
        gang.say(1, say.Report("wrote", 0, 0))
    assert gang.play("+59").notes(0) == []
    gang.play("+2, +60").fail(KILLED)
    said = "no output for 60 s; `python flow.py torchrun stacks` shows where each rank is"
    assert gang.play("+61, +1").notes(0) == [said] * (not writes)


@pytest.mark.parametrize(("missing", "named"), [([], ""), ([1], "node 1 of 3"), ([1, 2], "nodes 1, 2 of 3")])
def test_missing_nodes_are_named_once_with_time_setting_and_command(missing, named):
    gang = GangOf(3, started_timeout_s=90.0, join=False, why_it_waits=lambda node: f"ask about {node}")
    gang.join(*{0, 1, 2} - {*missing})
    assert not gang.play("ready 0, +89").got(0, "Abort")
    gang.play("+1.1, +1.1").join(*missing)  # too late
    for node in range(3):
        found = [abort.error for abort in gang.got(node, "Abort")]
        assert [type(error) for error in found] == ([errors.GangStartTimeout] if missing else [])
        for words in (f"Waited 90 s, but {named}", "all_nodes_started_timeout", "node 1 is missing: ask about 1"):
            assert all(words in str(error) for error in found)
    if missing:  # not with the first node that leaves for it, as if it had called `run` less often
        assert gang.play("raises_verdict 0").verdict(0) is gang.abort(0) is gang.state.broken
        assert [report.text for report in gang.state.view.reports] == [gang.verdict(0).message]


def test_the_control_node_whose_log_the_terminal_shows_is_reminded_of_who_is_waited_for():
    gang = GangOf(5, join=False, why_it_waits=lambda node: f"ask about {node}")
    assert not gang.play("join 0 1 2 4, ready 1, prepare 4, +9").notes(0)
    waits = "launch 0 waits for node 3 to start and for nodes 0, 2 to call current.torch.run and for node 4 to end"
    said = [f"{waits} before_run. To see why node 3 is missing: ask about 3"]
    assert [gang.play("+0.5").notes(node) for node in (3, 2, 1, 0)] == [[], [], [], said]
    gang.play("join 3, ready 0, ready 4, +27, +2")
    assert gang.notes(0)[1:] == ["launch 0 waits for nodes 2, 3 to call current.torch.run"]


def newcomer(node=1, task="b"):
    return say.Join(node, f"host-{node}", task)


@pytest.mark.parametrize("first", ["+0", "told 1", "lost 1"])
def test_a_second_task_of_a_node_harms_nobody(first):
    gang = running(2).play(first)
    for task in ("b", "c"):  # however many come
        assert gang.turn_away(newcomer(1, task)).is_early, "the others may still save"
    assert gang.state.refuses(newcomer(0, "c")).is_early
    assert gang.state.tick() == []
    again = say.Join(0, "host-0", "task of 0")
    assert gang.state.refuses(again) is None, "who has not heard the answer asks again"


DIFFERS = {
    "torch": "torch version",
    "python": "Python version",
    "contents": "contents of the entrypoint",
    "nproc": "processes per node",
}
DIFFERS |= {"digest": "entrypoint and torchrun options", "devices": "accelerators"}


@pytest.mark.parametrize("fact", DIFFERS)
def test_a_contradiction_names_nodes_and_values_and_nothing_starts(fact):
    gang, others = GangOf(3).play("ready 0, ready 1"), {**FACTS, **FIELDS}[fact]
    gang.ready(2, **{fact: 7})
    assert (type(gang.same_verdict()), gang.got(0, "Go")) == (errors.GangError, [])
    other = "some" if fact == "devices" else 7
    assert f"in the {DIFFERS[fact]} (nodes 0, 1: {others}, node 2: {other})" in str(gang.same_verdict())
    assert ("run(env={'CUDA_VISIBLE_DEVICES': ''})" in str(gang.same_verdict())) is (fact == "devices")


def test_a_failure_stops_all_once_and_every_node_gets_the_first_as_its_verdict():
    gang = running(3)
    gang.failed(2, crash(2, "KeyError: second"), age_s=1.0)
    gang.now += 5
    gang.say(1, say.Ended(0, False, 0, (Failure(crash(), 20.0),)))  # the first, which is reported last
    (stop,) = gang.got(0, "Stop")
    assert (stop.because, stop.teller) == ("Rank 4 on node 2 (host host-2) failed with KeyError: second", 2)
    assert gang.is_undecided()
    error = gang.play("stop").same_verdict()
    said = f"Rank 2 on {NODE_1} failed with ValueError: loss is nan.\nIt exited with code 1."
    said += "\nLaunch 0 was stopped on all nodes. The reason: an error in your code."
    assert (type(error), str(error)) == (errors.LaunchFailed, said)
    for kind in ("Go", "Stop", "Verdict"):  # which is made into bytes once
        (first,), (second,) = gang.got(1, kind), gang.got(2, kind)
        assert first is second
    (stop,) = running(hang_timeout_s=30.0).play("silence").got(1, "Stop")
    assert (stop.because[:31], stop.teller) == ("the launch hangs: no rank wrote", 0)
    gang = running(2)  # where a lost connection is all that is known, who had ended before stands first
    gang.ended(1, crash(text="RuntimeError: gloo: Connection closed by peer"))
    gang.stop(0, exit_codes={0: 0, 1: -15}, early=(0,))
    assert str(gang.same_verdict()).startswith("Rank 0 had ended with code 0. Do all ranks make the same number")
    assert gang.recorded("cause")[0].text.removeprefix("cause: ").startswith("Rank 0 had ended with code 0.")


NO_WORKER = "before_run failed, so no worker was started.\nNode 1 (host host-1) failed: before_run 1/2 (make data)"
SILENT = "\nNode 2 did not report in time that the workers there had ended."
JOIN, UP, ONCE = {"join": True}, {"deadline": 1010.0, "longer": ALLOWS}, {"max_restarts": 1}
ONE, TIMES = {"num_nodes": 1, **JOIN}, "run(timeout_s=...) and the step's @timeout change how long it may run."
UNREACHABLE = (
    "Node 2 (host host-2) can't reach torch's store on node 0 (host host-0): tried 10.0.0.1 on port 29500: timed out."
)
UNREACHABLE += "\nOpen TCP port 29500 between the nodes"
ERRORS = [  # what is given, what happens up to the moment when all nodes hear of the error, its class, and what it says
    (JOIN, "ready 0, leave 2", "GangError", "already ended on node 2. Every node must call current.torch.run the"),
    (JOIN, "ready 0, done 2", "GangError", "same number of times."),
    ({}, "quit 0, raises 0", "TorchrunPreempted", f"Node 0 (host host-0) was preempted: {SIGTERM}"),
    ({}, "killed 0, stop 1, stop 2", "LaunchFailed", f"Node 0 (host host-0) failed: {SIGKILL}.\nLaunch 0 was stopped on all"),
    ({}, "crash 1, stop 0, frozen 600, +600, +44, +2", "LaunchFailed", "loss is nan"),  # with the control node, and all nodes
    ({}, "crash 1, stop 0, +44, +2", "LaunchFailed", SILENT),
    ({}, "stop 1, stop 0, +44, +2", "LaunchFailed", f"Launch 0 failed.{SILENT}"),
    ({**ONCE, "hang_timeout_s": 30.0}, "silence, stop 0 1, +44, +2", "LaunchHung", SILENT),
    ({"hang_timeout_s": 30.0}, "silence, stop 0 1, stop 2", "LaunchHung", "Launch 0 was stopped: no rank wrote"),
    ({"timeout_s": 60.0}, "+59, +2, stop 0 1, stop 2", "LaunchTimeout", f"was stopped: it ran longer than 60 s. {TIMES}"),
    ({**ONCE, **UP}, "+8, crash 1, stop 0 2, +1, +2, stop 0 1, stop 2", "LaunchTimeout", f"it ran {ALLOWS}. {TIMES}"),
    ({**ONCE, **UP, **ANOTHER}, "+9.5, lost 1, stop 0 2, +0.4, +0.2", "LaunchTimeout", f"it ran {ALLOWS}, while"),
    (UP, "all_ended, +9, +2", "LaunchTimeout", f"ran {ALLOWS}.\nIt happened outside of current.torch.run; all nodes"),
    ({**UP, "join": False}, "join 0 1, ready 0, +9, +2", "LaunchTimeout", f"{ALLOWS}, while launch 0 waited for node 2 to"),
    (UP, "all_ended, done 0, +9, +2", "LaunchTimeout", f"Node 1 (host host-1) ran {ALLOWS}.\nIt happened outside of"),
    ({**ONE, **UP}, "+9, +2", "LaunchTimeout", f"Node 0 (host host-0) ran {ALLOWS}.\nIt happened outside of"),
    (ONE, "prepare 0, commands_fail 0", "LaunchFailed", "so no worker was started.\nNode 0 (host host-0) failed"),
    ({**JOIN, "taken": [1]}, "ready 1, ready 2, pin 0", "GangError", "Port 1 is taken on the control node (host host-0)"),
    (JOIN, "prepare 1 2, +11, commands_fail 1", "LaunchFailed", NO_WORKER),
    (JOIN, "ready 0, lost 1", "LaunchFailed", f"{SIGKILL}.\nIt happened before launch 0 began"),
    (JOIN, "ready 0, raises 1", "LaunchFailed", "before launch 0 began"),
    (JOIN, "+1, lost 1", "LaunchFailed", f"{SIGKILL}.\nIt happened outside of current.torch.run"),
    (JOIN, "done 0, raises 1", "LaunchFailed", "ode 1 (host host-1) failed with KeyError: 'x'.\nIt happened outside"),
    (JOIN, "done 0 1, lost 1", "LaunchFailed", f"{SIGKILL}.\nIt happened after the step's code, before its results"),
    ({}, "all_stop_and_store, raises 0", "LaunchFailed", "Launch 0 failed."),  # as *store* has said
    ({}, "all_stop_and_store, give_up 1, stored 0 2", "LaunchFailed", "Launch 0 failed."),
    ({"max_restarts": 2}, "unreached 2, unreached 1, stop 0 1, stop 2", "LaunchFailed", UNREACHABLE),
    (ONCE, "all_store, store_badly 1", "LaunchFailed", f"Rank 2 on {NODE_1} has ended well, but its value could not be"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "story", "cls", "said"), ERRORS)
def test_all_hear_once_and_in_time_what_has_happened_and_what_to_change(given, story, cls, said):
    gang, (before, _, last) = GangOf(**given) if "join" in given else running(**given), story.rpartition(", ")
    gang.play(before)
    for what in ("+0", last, "+100"):
        gang.play(what)
        sent = [each for node in gang.sent for kind in ("Abort", "Verdict") for each in gang.got(node, kind)]
        found = {id(each.error): each.error for each in sent if each.error is not None}
        assert [type(error).__name__ for error in found.values()] == [cls] * (what != "+0"), found
    assert said in str(*found.values())


def test_a_control_node_whose_step_has_ended_hears_of_the_first_failure_and_of_the_end_of_all_others():
    for story, fails in (("raises 1, raises 2", True), ("lost 1, lost 2", True), ("leave 1, done 2, leave 2", False)):
        gang = running().play(f"all_ended, done 0, {story.rpartition(',')[0]}")
        assert (len(gang.got(0, "Abort")), gang.farewells(0)) == (fails, [])
        assert (len(gang.play(story.rpartition(", ")[2]).got(0, "Abort")), gang.farewells(0)) == (fails, ["alone"])
    gang = running().play("crash 1, stop 0 2, done 0, raises_verdict 1, raises_verdict 2")  # it has caught the verdict
    assert gang.abort(0) is gang.verdict(1)
    gang = running(4, **SPARE).play("crash 1, stop 0 2, ready 0 1, ready 1 1, ready 2 1, all_ended 0 1 2, done 0 1 2")
    assert gang.play("leave 1, leave 2, ready 3 1").farewells(0) == ["alone"], "a late spare is dismissed"


@pytest.mark.parametrize(
    ("kind", "code", "category", "by_default", "hint"),
    [
        ("exception", 1, "user", True, False), ("exit", 1, "user", True, False),  # it comes again
        ("signal", -9, "killed", True, True), ("oom", -9, "killed", True, True),
        ("agent", -9, "killed", True, True), ("agent_ended", 1, "killed", True, True),
        ("timeout", None, "timeout", True, None), ("hang", None, "hang", True, None),
        ("agent", 1, "start", False, False), ("unreachable", None, "network", False, False),
        ("command", 1, "before_run", False, False), ("interrupted", None, "interrupted", False, False),
        ("terminated", None, "preempted", False, None),  # without another node in its place
    ],
)  # fmt: skip
def test_the_class_of_the_cause_decides_about_a_restart(kind, code, category, by_default, hint):
    once, is_told = {"max_restarts": 1}, category == "preempted"
    policies = [({}, False), (once, by_default), ({**once, "restart_on": frozenset()}, False)]
    for policy, restarts in [*policies, ({**once, "restart_on": frozenset([category])}, not is_told)]:
        gang = running(2, **policy)
        gang.fail(crash(1, kind=kind, code=code))
        assert bool(gang.restarts()) is restarts
        if not restarts:
            error = gang.same_verdict()
            assert (error.cause["category"], type(error) is errors.TorchrunPreempted) == (category, is_told)
            if hint is not None:
                assert (f"(class {category})." in str(error)) is bool(policy), "it matters for restarts only"
                assert ("max_restarts=N" in str(error)) is (hint and not policy)


def test_restarts_follow_at_once_and_end():
    gang = running(2, max_restarts=20)
    for _ in range(21):
        gang.fail(KILLED)
    told = [(each.generation, each.again) for each in gang.restarts()]
    why = f"because rank 2 on {NODE_1} was killed by SIGKILL: often the out-of-memory "
    why += "killer; try fewer processes, smaller batches or more memory"
    assert told == [(n, f"restart {n} of 20: all workers start again, {why}") for n in range(1, 21)]
    for node in (0, 1):
        assert [go.generation for go in gang.got(node, "Go")] == [*range(21)]
    assert (gang.state.view.restarts_left, "after 20 restarts" in str(gang.same_verdict())) == (0, True)


@pytest.mark.parametrize(
    ("causes", "after_s", "ends"),
    [
        ([crash()] * 3, 119.0, True),
        ([crash()] * 4, 120.0, False),
        ([crash(text="ValueError: 1"), crash(0, "ValueError: 2"), crash(text="ValueError: 3")], 1.0, True),
        ([crash(), crash(text="KeyError: 1"), crash(), replace(crash(), place="train.py:7"), crash()], 1.0, False),
        ([crash(), crash(), KILLED, crash(), crash(), *[KILLED] * 4], 1.0, False),
    ],
)
def test_the_same_user_error_three_times_in_a_row_soon_after_the_start_ends_the_launch(causes, after_s, ends):
    gang = running(2, max_restarts=9)
    for cause in causes:
        assert gang.is_undecided()
        gang.play(f"+{after_s}").fail(cause)
    said = "It failed so 3 times in a row, each time within 2 min 0 s of its start, so it is not started again."
    assert said in str(gang.same_verdict()) if ends else gang.is_undecided()


def test_preemptions_leave_a_launch_its_moves_to_other_ports():
    gang = running(6, max_restarts=1, min_nodes=2)
    for node in (5, 4, 3):
        gang.failed(node, preemption(node))
        gang.stop(*gang.groups()[-1])
    gang.fail(replace(crash(0, kind="agent"), detail="... EADDRINUSE ..."))
    assert (gang.state.launch.moves, gang.state.view.restarts_left, gang.groups()[-1]) == (1, 1, (0, 1, 2))


@pytest.mark.parametrize("limit", [{"hang_timeout_s": 20.0, "timeout_s": 40.0, **ONCE}, {"deadline": 1100.0}])
def test_who_stores_neither_hangs_nor_is_too_slow_but_for_the_step_and_is_named_every_30_s(limit):
    gang = running(4, **limit)
    gang.all_ended(0, 1, 2, stores=True)
    gang.ended(3)
    waits, left = "launch 0 waits for nodes {} to store what its workers have left", "1, 2"
    assert gang.play("+30.1").notes(0) == [waits.format("0, 1, 2")]
    assert gang.play("stored 0, +30.1").notes(0)[1:] == [waits.format(left)]
    assert len(gang.play("+40.1").got(1, "Stop")) == ("deadline" in limit)
    error = gang.play("stored 0 1 2").same_verdict()
    assert type(error) is (errors.LaunchTimeout if "deadline" in limit else type(None))
    assert "deadline" not in limit or f"while {waits.format(left).replace('waits', 'waited')}" in str(error)


@pytest.mark.parametrize(("deadline_s", "within_s"), [(500.0, 120.0), (70.0, 70.0), (3.0, 30.0)])
@pytest.mark.parametrize("in_time", [True, False])
def test_a_launch_that_fails_ends_when_what_it_has_left_is_stored_or_the_time_is_up(deadline_s, within_s, in_time):
    gang = running(deadline=1000.0 + deadline_s)
    gang.ended(1, crash(), stores=True)
    gang.stop(0, 2, stores=in_time)
    (store,) = gang.got(0, "Store")
    assert store is gang.got(2, "Store")[0], "each knows why, even if the control node is lost now"
    assert store.within_s == within_s
    assert gang.play(f"+{within_s + 14.0}").is_undecided()  # and the index of what was stored
    gang.say(0, say.Report("outputs", 0, 0, {"key": "k", "files": 1, "size": 2}))
    assert gang.play("stored 0 1 2" if in_time else "+2").same_verdict() is store.error
    assert gang.got(0, "Verdict")[0].left == {"outputs": {"nodes": {"0": ["k", 1, 2]}}}
    assert (store.error.cause["rank"], len(gang.recorded("cause"))) == (2, 1)


@pytest.mark.parametrize("rules", [SPARE, {"min_nodes": 3}])
def test_a_node_that_is_told_to_end_hears_that_alone_and_the_others_start_again_at_once_as_no_restart(rules):
    gang, came = running(4, max_restarts=1, **rules), (3,) * (rules == SPARE)
    gang.play("told 1, stop 1, ready 1 1, stop 0 2" + ", stop 3" * (not came))
    for launch in (1, 2):  # also that which it calls after
        error = gang.play("ready 1 2" if launch == 2 else "+0").verdict(1, launch)
        assert f"{SIGTERM}. The other nodes go on without it, if enough are left." in str(error)
        assert "@retry" not in str(error), "this run goes on"
    (last,) = gang.restarts()
    then = "node 3, a spare, takes the place of node 1" if came else "the launch goes on without node 1, on 3 nodes"
    assert last.again == f"all workers start again, because {TOLD.removesuffix(GO_ON)}; {then}"
    assert (last.group.nodes, last.left, last.came, last.generation, last.max_restarts) == ((0, 2, 3), (1,), came, 1, 2)
    gang.leave(1, failed=True)
    assert (gang.state.view.restarts_left, gang.state.broken, len(gang.got(0, "Stop"))) == (1, None, 1)


def test_the_workers_start_again_when_the_task_that_takes_its_place_is_ready():
    gang = running(max_restarts=3, why_it_waits=lambda node: f"ask about {node}", **ANOTHER)
    for number in (1, 2, 3):  # as often as restarts are left
        first = gang.play("lost 1, stop 0 2").notes(0)[-1]
        assert re.fullmatch(
            r"launch 0 waits for node 1 to start, until \S+ \S+ UTC at most \(all_nodes_started_timeout\), and then fails\. "
            "To see why node 1 is missing: ask about 1",
            first,
        )
        assert gang.play("+60").notes(0)[-2:] == [first] * 2
        assert len(gang.play("come 1, +1").groups()) == number, "it has not called run"
        last = gang.play("ready 1, +0").got(1, "Go")[-1]
        assert (last.generation, last.group.nodes, last.left, last.came) == (number, (0, 1, 2), (1,), (1,))
        assert last.again.startswith(f"restart {number} of 3: all workers start again, because node 1 (host ")
    assert "max_restarts=3 allows no more restarts" in str(gang.play("lost 1, stop 0 2").verdict(0))


TOLD, LOST = f"{NODE_1} was preempted: {SIGTERM}{GO_ON}", f"{NODE_1} failed: {SIGKILL}"
LATE = {"num_nodes": 4, "join": False, "started_timeout_s": 60.0, **SPARE}
TWO_OF_3, THREE = {"num_nodes": 3, "min_nodes": 2, **ANOTHER}, {"num_nodes": 3, **ANOTHER}
BOTH, LEAVES = {**SPARE, **ANOTHER}, "node 1 leaves: launch 0 has ended well without it"
FIRST, THEN = (0, 1, 2), [(0, 1, 2), (0, 2, 3)]
WHY = "\nIt can't go on without that node: "
FEW = f"{WHY}2 nodes are left, and it needs 3 (spare_nodes and min_nodes let it go on with fewer)."
NO_TASK = f"{FEW[:-1]}; no other task has taken its place."
STORIES = [  # what is given, what happens, who takes part in each generation, and what the log or the error says at last
    (LATE, "join 0 1 2 3, ready 0, ready 3, lost 1, ready 2", [(0, 2, 3)], f"{LOST}{GO_ON}"),
    (LATE, "join 0 1 2 3, ready 0, prepare 1, quit 1, ready 3, ready 2", [(0, 2, 3)], TOLD),
    (LATE, "join 0 1 2, ready 0, prepare 1, ready 2, +61, join 3, ready 3, quit 1", [(0, 2, 3)], TOLD),
    (LATE, "join 0 2 3, ready 0, ready 2, ready 3, join 1, ready 1", [(0, 2, 3)], ""),  # who comes late is a spare
    (LATE, "join 0 2 3, ready 0, ready 2, ready 3, +61", [(0, 2, 3)], f"it has not joined within 60 s{GO_ON}"),
    (SPARE, "all_ended, ready 0 1, ready 1 1, ready 2 1", [FIRST] * 2, "node 3 leaves: launch 0 has ended well without it"),
    ({"num_nodes": 3, "timeout_s": 60.0}, "+50, crash 1, stop 0 2, +1, +59, all_ended, +9", [FIRST] * 2, ""),  # each has 60 s
    (SPARE, "all_store, lost 1", THEN, ""),
    (SPARE, "all_ended 1 2, store 0, lost 1, stored 0", [FIRST], "node 3 leaves: launch 0 has ended well"),
    ({"num_nodes": 5, "spare_nodes": 2}, "lost 1, lost 2, stop 0", [FIRST, (0, 3, 4)], f"(host host-2) failed: {SIGKILL}"),
    ({"min_nodes": 3}, "lost 2, stop 0 1 3", [(0, 1, 2, 3), (0, 1, 3)], ""),
    ({"min_nodes": 3}, "lost 2, stop 0 1 3, lost 1, stop 0 3", [(0, 1, 2, 3), (0, 1, 3)], FEW),
    ({}, "lost 1, stop 0 2 3", [(0, 1, 2, 3)], f"Node 1 (host host-1) failed: {SIGKILL}"),
    (SPARE, "lost 1, lost 3, stop 0 2", [FIRST], FEW),
    (SPARE, "lost 1, give_up 2, stop 0", [FIRST], f"Node 1 (host host-1) failed: {SIGKILL}"),
    (SPARE, "told 0, lost 1, stop 0 2", [FIRST], f"{WHY}node 0 is the control node."),
    ({**SPARE, "max_restarts": 0}, "lost 1, stop 0 2", [FIRST], f"{WHY}max_restarts=0 allows no more restarts."),
    ({**SPARE, "restart_on": frozenset()}, "lost 1, stop 0 2", [FIRST], f"{WHY}restart_on does not have 'node_lost'."),
    (BOTH, "lost 1, stop 0 2, +302", THEN, f"{LOST}{GO_ON}"),
    (BOTH, "lost 1, stop 0 2, come 1, ready 1, lost 2, stop 0 3", [*THEN, (0, 1, 3)], ""),
    (BOTH, "lost 1, stop 0 2, come 1, raises 1", THEN, "KeyError: 'x'; another task takes its place"),
    # A task that comes too late to take part leaves, and nobody waits for it.
    (BOTH, "lost 1, stop 0 2, come 1, ready 1, all_ended 0 2 3, ready 0 1, ready 2 1, ready 3 1", [*THEN, (0, 2, 3)], LEAVES),
    (BOTH, "lost 1, stop 0 2, come 1, all_ended 0 2 3, ready 0 1, ready 2 1, ready 1, ready 3 1", [*THEN, (0, 2, 3)], LEAVES),
    (BOTH, "lost 1, stop 0 2, all_ended 0 2 3, come 1, ready 0 1, ready 1, ready 2 1, ready 3 1", [*THEN, (0, 2, 3)], LEAVES),
    (THREE, "lost 1, stop 0 2, +302, +0", [FIRST], NO_TASK),
    (THREE, "lost 1, stop 0 2, come 1, lost 1, +302, +0", [FIRST], NO_TASK),
    (THREE, "lost 1, stop 0 2, come 1, +302, +0", [FIRST], NO_TASK),
    (THREE, "lost 1, stop 0 2, come 1, +299, ready 1, +0", [FIRST, FIRST], ""),
    (THREE, "lost 1, lost 2, stop 0, come 1, lost 1, +302, +0", [FIRST], f"{WHY}1 node is left, and it needs 3"),
    (TWO_OF_3, "lost 1, stop 0 2, come 1, +302, +0", [FIRST, (0, 2)], ""),
    (TWO_OF_3, "lost 1, stop 0 2, +302, +0, come 1, ready 1, lost 2, stop 0, +302, +0", [FIRST, (0, 2), (0, 1)], ""),
]  # fmt: skip


@pytest.mark.parametrize(("given", "story", "groups", "said"), STORIES)
def test_who_takes_part_and_what_is_said_of_that(given, story, groups, said):
    gang = GangOf(**given) if "join" in given else running(**{"num_nodes": 4, "max_restarts": 3, **given})
    found = [str(verdict.error) for verdict in gang.play(story).got(0, "Verdict") if verdict.error is not None]
    assert (gang.groups(), len(found)) == (groups, said.startswith((WHY, "Node 1")))
    assert said in "".join((found or gang.notes(0))[-2:])
    assert "With max_restarts=N" not in "".join(found)


@pytest.mark.parametrize("state", ["+0", "told 1", "done 1"])
def test_a_task_that_comes_before_the_one_in_its_place_has_ended_tries_again(state):
    gang, join = running(max_restarts=3, **ANOTHER).play(state), newcomer()
    for _ in range(3):
        answer = gang.turn_away(join)
        assert answer.is_early
        assert "another task, on host host-1, is or was node 1" in str(answer.error)
    assert gang.play("stop 1, lost 1, stop 0 2").state.refuses(join) is None
    gang.say(1, join)
    assert gang.turn_away(say.Join(1, "host-1", "task of 1")).is_early, "a newer task has taken its place"
    gang.post(gang.state.give_up(errors.GangError("The channel failed.")))
    assert "The channel failed." in str(gang.turn_away(newcomer(1, "d")).error)


@pytest.mark.parametrize("how", ["lost 1", "told 1"])
@pytest.mark.parametrize("number", [0, 1])
def test_a_node_lost_between_launches_is_waited_for_and_its_new_task_gets_the_verdicts_before(how, number):
    gang = GangOf(3, replaces=True).play("all_ready, all_ended" if number else "ready 0")
    gang.leave(1, preemption()) if how == "told 1" else gang.lost(1)
    gang.play(f"ready 0 {number}, ready 2 {number}, come 1")
    if number:
        late = gang.play("ready 1 0").got(1, "Verdict")[-1]
        assert (late.launch, late.error, late.group.nodes) == (0, None, (0, 1, 2))
    assert len(gang.groups()) == number
    assert gang.play(f"ready 1 {number}, all_ended").groups()[number:] == [(0, 1, 2)]
    gang.play("lost 1, done 0 2, leave 2")
    assert (gang.restarts(), gang.farewells(0)) == ([], []), "it waits for the new task"
    assert gang.play(f"come 1, ready 1 {number}").got(1, "Verdict")[-1].error is None
    assert gang.play("done 1, leave 1").farewells(0) == ["alone"]
    assert gang.turn_away(newcomer()).is_early, "it will find the record of the gang's end"


@pytest.mark.parametrize(
    ("story", "said"),
    [
        ("join 1, prepare 1, commands_fail 1, ready 2", "Node 1 (host host-1) failed: before_run 1/2"),
        ("ready 2, join 1, prepare 1, commands_fail 1", "Node 1 (host host-1) failed: before_run 1/2"),
        ("ready 2, join 1, differ 1", "Node 1 (host host-1) failed with The nodes differ in the processes per node"),
    ],
)
def test_a_node_that_can_not_take_part_hears_that_alone_where_more_are_here_than_needed(story, said):
    gang = GangOf(**LATE).play(f"join 0 2 3, ready 0, ready 3, {story}, raises_verdict 1, all_ended 0 2 3")
    error = gang.verdict(1, 0)
    assert (str(error).startswith(said), error.cause["node"]) == (True, 1), "no other node shows it"
    assert (gang.groups(), gang.same_verdict(0, 2, 3), gang.state.broken) == ([(0, 2, 3)], None, None)
    gang = GangOf(**LATE).play("join 0 1 2 3, prepare 0, commands_fail 0, ready 1, ready 2, ready 3")
    assert gang.same_verdict(0, 1, 2).cause["node"] == 0, "not so the control node"


def lines_of_the_machine(num_nodes):
    """Return how many lines of `gang.py` run in the life of a gang, for each of its nodes."""
    count, nodes, before = 0, range(num_nodes), sys.gettrace()

    def trace(frame, event, _):
        nonlocal count
        count += event == "line"
        return trace if frame.f_code.co_filename == machine.__file__ else None

    sys.settrace(trace)
    try:
        gang = running(num_nodes)
        gang.all_ended(stores=True)
        gang.stored(*nodes)
        gang.play("all_ready 1").fail(*map(crash, nodes))
        for node in nodes:
            gang.play(f"done {node}, +0.1")
        for node in reversed(nodes):
            gang.leave(node)
    finally:
        sys.settrace(before)
    return count / num_nodes


def test_the_verdict_of_thousands_is_made_once_and_no_message_makes_the_gang_look_through_all():
    """What is the same object is made into bytes once, and all hear it in about a second."""
    assert lines_of_the_machine(300) < lines_of_the_machine(30) * 1.2
    gang = running(300).play("all_ended")
    for node in range(300):
        gang.ready(node, 1, digest=f"digest-{node}")
    for verdicts in zip(*[gang.got(node, "Verdict") for node in range(1, 300)], strict=True):
        assert all(each is verdicts[0] for each in verdicts)
    error = str(gang.same_verdict(launch=1))
    assert "node 0: digest-0, node 1: digest-1" in error
    assert "and 292 more values" in error
    assert len(error) < 1000
    assert names(range(0, 4000, 2)) == "nodes 0, 2, 4, 6, 8, 10, 12, 14 and 1992 more"


def test_the_thousandth_launch_costs_what_the_first_does_and_its_end_stays_known():
    gang, sizes = running(min_nodes=2, **ANOTHER).play("all_ended"), []
    for number in range(1, 2501):
        gang.play(f"all_ready {number}, all_ended")
        sizes.append(len(encode(gang.got(1, "Verdict")[-1])))
        for sent in gang.sent.values():
            del sent[:-2]
    assert sizes[-1] < sizes[0] + 60, "but for longer numbers"
    assert gang.state.view.left_out > 1000 >= len(gang.state.view.events)
    late = gang.play("lost 1, come 1, ready 1 1600, ready 1 0").got(1, "Verdict")[-2:]
    assert [(each.launch, each.error) for each in late] == [(1600, None), (0, None)]


def test_time_in_which_this_machine_was_stopped_counts_for_no_limit_of_a_launch():
    gang = running(2, timeout_s=600.0, stacks="python flow.py torchrun stacks")
    gang.now += 3600.0
    gang.play("frozen 3600, +1")
    assert (gang.is_undecided(), gang.got(1, "Stop"), gang.notes(0)) == (True, [], [])
    assert gang.play("+600").got(1, "Stop")


def test_a_spare_in_its_own_code_hears_of_a_launch_that_has_failed_without_it():
    gang = GangOf(3, spare_nodes=1)
    gang.play("ready 0, ready 1, crash 1, stop 0, raises_verdict 0")
    assert gang.abort(2) is gang.verdict(0)


def test_the_cause_of_a_restart_that_never_comes_stands_once_in_the_timeline():
    gang = running(2, max_restarts=1, **ANOTHER).play("lost 1, stop 0, +301")
    assert len(gang.recorded("cause")) == 1
    assert gang.verdict(0) is not None


def test_equal_failures_of_two_generations_are_two_reports():
    gang = running(2, max_restarts=2)
    for _ in range(2):
        gang.fail(crash())
    assert [each.generation for each in gang.state.view.reports] == [0, 1]
