"""What the control node decides, in what order, and what each node gets; with a clock that the test holds."""

import signal
import sys
from dataclasses import replace

import pytest
from gang_of import FACTS, FIELDS, STOP_S, GangOf, crash, of_node, preemption, running

from metaflow_extensions.torchrun.plugins.torchrun import errors
from metaflow_extensions.torchrun.plugins.torchrun.channel.frames import encode
from metaflow_extensions.torchrun.plugins.torchrun.gang import gang as machine
from metaflow_extensions.torchrun.plugins.torchrun.gang.cause import Failure
from metaflow_extensions.torchrun.plugins.torchrun.gang.failures import change_of_nodes
from metaflow_extensions.torchrun.plugins.torchrun.gang.limits import DIAGNOSTICS_S
from metaflow_extensions.torchrun.plugins.torchrun.gang.messages import Answer, Ended, Join, Ready, Report
from metaflow_extensions.torchrun.plugins.torchrun.gang.texts import names

KILLED = crash(kind="signal", code=-9, text=None)
NODE_1, SIGKILL = "node 1 (host host-1)", "its task was killed by SIGKILL"
ALLOWS, GO_ON = "longer than the step's @timeout allows", "; the others go on without it"

# --- the good way, and what is kept of it ----------------------------------------------------------


@pytest.mark.parametrize("num_nodes", [1, 3])
def test_a_launch_begins_when_all_are_ready_and_ends_well_when_all_have(num_nodes):
    gang, nodes = GangOf(num_nodes), range(num_nodes)
    for node in nodes:
        assert all(gang.sent[each] == [Answer()] for each in nodes)
        gang.ready(node, accelerators="8 amd")
    for node in nodes:
        (go,) = gang.got(node, "Go")
        assert (go.launch, go.generation, go.port, go.group.size) == (0, 0, 40001, num_nodes)
    assert go.devices == "8 amd accelerators on each node"
    for node in nodes:
        assert gang.is_undecided()
        gang.ended(node, alone=True)
    assert gang.same_verdict() is None
    assert all(gang.got(node, "Verdict")[0].alone for node in nodes)
    view = gang.state.view
    assert (view.nproc, view.facts["torch"], view.error) == (2, "2.13.0", None)
    for node, message in ((7, Ready(0, 2)), (0, Answer()), (-1, Join(-1)), (0, Ended(0, False))):
        assert gang.state.handle(node, message) == [], "of no node, no message of a node, or late"


def test_the_life_of_a_gang_is_recorded_all_of_it_for_the_control_node():
    gang = running(2, max_restarts=1)
    for report in (Report("started", 1, 0), Report("started", 0, 0), Report("wrote", 0, 0)):  # the first is late
        gang.say(1, report)
    gang.failed(1, crash())
    for node in (1, 1, 0):  # a node's exits count once
        gang.stop(node, exit_codes={2 * node: 1})
    gang.play("+1, all_ended, done 0 1, leave 0, leave 1")
    view = gang.state.view
    said = [each.kind for each in view.events]
    launch = ["go", "started", "output", "stopping", "exited", "cause", "restart", "go", "done"]
    assert [each for each in said if each != "stopped"] == ["joined", "ready", *launch, "finished", "left"]
    (to_control,), (to_member,) = gang.got(0, "Verdict"), gang.got(1, "Verdict")
    assert [each.kind for each in to_control.events] == said[:-2]
    assert [each.kind for each in to_member.events] == ["go", "stopping", "cause", "restart", "go", "done"]
    (cause,), (report,) = gang.recorded("cause"), view.reports
    assert (cause.ranks, cause.exit_code, cause.generation) == ([2], 1, 0)
    assert cause.text == f"cause: Rank 2 on {NODE_1} failed with ValueError: loss is nan"
    assert (report.error, report.generation) == (None, 0)
    assert f"cause: {report.text.partition('.')[0]}" == cause.text


def test_what_nodes_tell_of_their_workers_is_kept_while_these_run():
    gang = running(2).play("+5")
    for generation, key in ((0, "a"), (1, "late"), (7, "late")):
        gang.say(1, Report("functions", 0, generation, {"2": key}))
    gang.play("all_ended").say(1, Report("functions", 0, 0, {"3": "late"}))
    assert [verdict.features for node in (0, 1) for verdict in gang.got(node, "Verdict")] == [
        {"functions": {"2": "a"}},
        {},
    ]


# --- joining, and waiting for others ---------------------------------------------------------------


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
        gang.leave(0, failed=True)
        assert gang.verdict(0) is gang.abort(0) is gang.state.broken
        assert [report.text for report in gang.state.view.reports] == [gang.verdict(0).message]


def test_who_waits_for_nodes_is_reminded_of_them_beside_the_control_node_whose_log_the_terminal_shows():
    gang = GangOf(5, join=False, why_it_waits=lambda node: f"ask about {node}")
    assert not gang.play("join 0 1 2 4, ready 1, prepare 4, +9").notes(0)
    waits = "launch 0 waits for node 3 to start and for nodes 0, 2 to call current.torch.run and for node 4 to end"
    said = [f"{waits} before_run. To see why node 3 is missing: ask about 3"]
    assert [gang.play("+0.5").notes(node) for node in (3, 2, 1, 0)] == [[], [], said, said]
    gang.play("join 3, ready 0, ready 4, +27, +2")
    assert gang.notes(0)[1:] == gang.notes(1)[1:] == ["launch 0 waits for nodes 2, 3 to call current.torch.run"]
    assert [gang.got(node, "Note")[-1].is_detail for node in (0, 1)] == [False, True]


def newcomer(node=1, task="b", place="pod-b"):
    return Join(node, f"host-{node}", task, place)


@pytest.mark.parametrize(("first", "is_news"), [("+0", True), ("told 1", False), ("lost 1", False)])
def test_a_second_task_in_another_pod_means_that_the_first_is_being_replaced(first, is_news):
    gang = running(2).play(first)
    for task in ("b", "c"):  # however many come
        answer = gang.turn_away(newcomer(1, task))
        assert (type(answer.error), answer.hold_s) == (errors.TorchrunPreempted, STOP_S), "the others may still save"
        assert f"{'has ended' if first == 'lost 1' else 'still runs'} (host host-1)" in str(answer.error)
    assert [note.partition(" is being")[0] for note in gang.notes(0)] == [
        NODE_1
    ] * is_news  # else the gang ends already
    assert gang.farewells(1) == ["replaced"] * is_news


def test_a_node_joins_once_or_again_if_it_has_not_heard_its_answer_and_a_stranger_harms_nobody():
    gang = GangOf(3, join=False)
    for _ in range(2):
        assert gang.state.may_join(newcomer())
        gang.say(1, newcomer())
    assert gang.sent[1] == [Answer()] * 2
    for stranger, why in (
        (newcomer(task="c"), "another task of this attempt has the same"),
        (newcomer(7), "3 nodes in"),
    ):
        assert not gang.state.may_join(stranger)
        answer, out = gang.state.turn_away(stranger)
        assert (type(answer.error), answer.hold_s, out) == (errors.GangError, 0.0, [])
        assert why in str(answer.error)
    assert not any(gang.play("lost 1").state.may_join(newcomer(node)) for node in (1, 3, -1))


DIFFER = {
    "torch": ("2.5.1", "torch version"),
    "cuda": ("13.0", "CUDA version that torch was built for"),
    "nccl": ("2.28", "NCCL version"),
    "python": ("3.10.1", "Python version"),
    "contents": ("bad", "contents of the entrypoint"),
    "nproc": (4, "processes per node"),
    "digest": ("xyz", "entrypoint and torchrun options"),
    "launch": (7, "launch number"),
    "devices": ("amd", "kind of accelerators"),
}


@pytest.mark.parametrize("fact", DIFFER)
def test_a_contradiction_names_nodes_and_values_and_nothing_starts(fact):
    gang, (value, named) = GangOf(3).play("ready 0, ready 1"), DIFFER[fact]
    gang.ready(2, **{fact: value})
    error, others = gang.same_verdict(), {**FACTS, **FIELDS, "launch": 0}[fact]
    assert (type(error), gang.got(0, "Go")) == (errors.GangError, [])
    assert f"in the {named} (nodes 0, 1: {others}, node 2: {value})" in str(error)
    assert ("run(env={'CUDA_VISIBLE_DEVICES': ''}) on every node" in str(error)) is (fact == "devices")


# --- failures --------------------------------------------------------------------------------------


def test_a_failure_stops_all_once_and_every_node_gets_the_first_as_its_verdict():
    gang = running(3)
    gang.failed(2, crash(2, "KeyError: second"), age_s=1.0)
    gang.now += 5
    gang.say(1, Ended(0, False, 0, (Failure(crash(), 20.0, (2, 3)),)))  # the first, which is reported last
    (stop,) = gang.got(0, "Stop")
    assert (stop.because, stop.teller) == ("Rank 4 on node 2 (host host-2) failed with KeyError: second", 2)
    assert gang.is_undecided()
    error = gang.play("stop").same_verdict()
    assert type(error) is errors.LaunchFailed
    assert str(error) == (
        f"Rank 2 on {NODE_1} failed with ValueError: loss is nan.\nIt exited with code 1.\nRank 3 failed in "
        "the same way.\nLaunch 0 was stopped on all nodes. The reason: an error in your code."
    )
    for kind in ("Go", "Stop", "Verdict"):  # which is made into bytes once
        (first,), (second,) = gang.got(1, kind), gang.got(2, kind)
        assert first is second


def test_ranks_that_ended_well_are_named_where_a_lost_connection_is_all_that_is_known():
    for text, early, begins in (
        ("RuntimeError: gloo: Connection closed by peer", (0,), "Rank 0 had ended with code 0"),
        ("RuntimeError: gloo: Connection closed by peer", (), "Rank 2"),  # the other was told to stop
        ("ValueError: x", (0,), "Rank 2"),
    ):
        gang = running(2)
        gang.ended(1, crash(text=text))
        gang.stop(0, exit_codes={0: 0, 1: -15}, early=early)
        for said in (gang.same_verdict().message, gang.recorded("cause")[0].text):
            assert said.removeprefix("cause: ").startswith(begins)
            assert f"Rank 2 on {NODE_1}" in said


@pytest.mark.parametrize(
    ("cause", "words"), [("crash", "loss is nan"), ("hang", "no rank wrote"), ("", "Launch 0 failed.")]
)
def test_a_silent_node_does_not_hold_up_the_verdict_for_ever(cause, words):
    gang, is_hang = running(3, hang_timeout_s=30.0, max_restarts=1), cause == "hang"
    if is_hang:
        (stop,) = gang.play("lives 1" + ", +3" * 11).got(1, "Stop")
        assert (stop.kind, stop.because[:32], stop.teller) == ("hang", "the launch hangs: no rank wrote ", 0)
        gang.say(1, Report("hangs", 0, 0, {"host": "h", "file": None, "ranks": {}}))
    gang.ended(1, *[crash(1)] * (cause == "crash"), ok=False)
    gang.play("stop 0").post(gang.state.was_stopped(600.0))  # with the control node, and perhaps with all nodes
    assert gang.play(f"+600, +{STOP_S + is_hang * DIAGNOSTICS_S - 1.0}").is_undecided()
    error = gang.play("+2").same_verdict()
    assert type(error) is (errors.LaunchHung if is_hang else errors.LaunchFailed)
    assert words in str(error)
    assert "Node 2 did not report in time that the workers there had ended." in str(error)
    assert ("No worker was running" in error.message) is is_hang


GONE = {
    "lost": (None, errors.LaunchFailed),
    "step": (of_node("step"), errors.LaunchFailed),
    "call": (of_node("call", text="EntrypointError"), errors.LaunchFailed),
    "step_timeout": (of_node("step_timeout", text="longer than the step's @timeout of 6 s"), errors.LaunchTimeout),
    "preempted": (preemption(), errors.TorchrunPreempted),
}


@pytest.mark.parametrize("phase", ["before", "gathering", "running"])
@pytest.mark.parametrize("how", GONE)
def test_a_node_that_is_gone_ends_what_the_others_do_with_the_same_class_of_error(phase, how):
    gang, (cause, cls) = GangOf(3).play({"gathering": "ready 0", "running": "all_ready"}.get(phase, "+0")), GONE[how]
    gang.lost(1) if cause is None else gang.leave(1, cause)
    if phase == "running":
        assert gang.got(0, "Stop")[0].teller == (0 if cause is None else 1), "a lost node's log may say nothing"
        assert gang.is_undecided()
        gang.fail(crash(2, "RuntimeError: gloo: Connection reset by peer"))
    gang.ready(0, launch=5)
    assert len(gang.got(0, "Go")) == (phase == "running")
    found = [verdict.error for verdict in gang.got(0, "Verdict")] + [gang.abort(node) for node in (0, 2)]
    assert len(found) == (3 if phase == "before" else 4)
    assert {(type(error), str(error)) for error in found} == {
        (cls, str(gang.state.broken or gang.state.launch.verdict))
    }
    outside = f"{'in the call' if how == 'call' else 'outside'} of current.torch.run"
    assert {"before": outside, "gathering": "before launch 0 began"}.get(phase, "stopped") in str(found[0])
    assert f"ode 1 (host host-1) {f'failed: {SIGKILL}' if cause is None else cause.what}" in str(found[0])


@pytest.mark.parametrize("how", ["leave 2", "done 2"])
def test_a_node_whose_step_ends_while_others_wait_called_run_less_often(how):
    error = GangOf(3).play(f"ready 0, {how}, ready 1").same_verdict(0, 1)
    assert "already ended on node 2. Every node must call current.torch.run the same number" in str(error)


def test_a_control_node_that_is_gone_tells_the_others_how_it_ends():
    """Their workers may need longer to end than the channel stays open."""
    gang = running(2)
    gang.give_up(0, preemption(0))
    gang.leave(0, preemption(0))
    assert "ode 0 (host host-0) was preempted: its task got SIGTERM" in str(gang.verdict(1))
    assert [type(each).__name__ for each in gang.sent[1][-4:]] == ["Stop", "Verdict", "Abort", "Farewell"]
    gang = running(2).play("killed 0")  # its supervisor holds the gang until they know
    assert gang.is_undecided()
    assert f"ode 0 (host host-0) failed: {SIGKILL}" in str(gang.play("stop 1").verdict(1))


ENDS = {
    "raises": "Node 1 (host host-1) failed with KeyError: 'x'.\nIt happened outside of current.torch.run",
    "is lost": f"Node 1 (host host-1) failed: {SIGKILL}, after its step's code but before its results",
    "raises the verdict": f"Rank 2 on {NODE_1} failed with ValueError: loss is nan",
    "ends well": None,
}


@pytest.mark.parametrize("how", ENDS)
def test_a_control_node_whose_step_has_ended_hears_of_the_first_failure_of_the_others_or_of_their_end(how):
    gang, said = running(3), ENDS[how]
    gang.fail(*[crash()] * (how == "raises the verdict"))
    gang.done(0)
    for node in (1, 2):
        assert not gang.farewells(0)
        if how == "is lost":
            gang.play(f"done {node}, lost {node}")
        else:
            gang.leave(node, of_node("step", node) if how == "raises" else None, failed="raises" in how)
        assert len(gang.got(0, "Abort")) == (said is not None), "of two failures the first"
    assert gang.farewells(0) == ["alone"]
    assert said is None or str(gang.abort(0)).startswith(said)


def test_errors_of_a_gang_of_one_node_name_it():
    gang = GangOf(1).play("prepare 0")
    gang.failed(0, of_node("command", 0, "before_run 1/1 (false) exited with code 3"))
    said = "before_run failed, so no worker was started.\nNode 0 (host host-0) failed: before_run 1/1"
    assert gang.verdict(0).message.startswith(said)
    error = GangOf(1, deadline=1010.0, longer="longer than 10 s").play("+20").abort(0)
    assert (
        error.message
        == "Node 0 (host host-0) ran longer than 10 s.\nIt happened outside of current.torch.run; all nodes were stopped."
    )


# --- restarts, and the port ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "code", "category", "by_default", "hint"),
    [
        ("exception", 1, "user", True, False),  # an error in the user's code comes again
        ("exit", 1, "user", True, False),
        ("signal", -9, "killed", True, True),
        ("oom", -9, "killed", True, True),
        ("agent", -9, "killed", True, True),
        ("agent_ended", 1, "killed", True, True),
        ("timeout", None, "timeout", True, None),
        ("hang", None, "hang", True, None),
        ("agent", 1, "start", False, False),
        ("unreachable", None, "network", False, False),
        ("command", 1, "before_run", False, False),
        ("terminated", None, "preempted", False, None),  # without another node in its place
        ("interrupted", None, "interrupted", False, False),
    ],
)
def test_the_class_of_the_cause_decides_about_a_restart(kind, code, category, by_default, hint):
    once, is_told = {"max_restarts": 1}, category == "preempted"
    policies = [({}, False), (once, by_default), ({**once, "restart_on": frozenset()}, False)]
    for policy, restarts in [*policies, ({**once, "restart_on": frozenset([category])}, not is_told)]:
        gang = running(2, **policy)
        gang.fail(crash(1, kind=kind, code=code))
        assert bool(gang.got(0, "Restart")) is restarts
        if not restarts:
            error = gang.same_verdict()
            assert (error.cause["category"], type(error) is errors.TorchrunPreempted) == (category, is_told)
            assert hint is None or (f"(class {category})." in str(error)) is bool(policy), (
                "it matters for restarts only"
            )
            assert hint is None or ("max_restarts=N" in str(error)) is (hint and not policy)


def test_restarts_end_and_the_pauses_between_them_grow_and_stay_bounded():
    gang = running(2, max_restarts=20)
    for _ in range(21):
        gang.fail(KILLED)
        gang.pass_time(1000.0)
    told = [(each.number, each.counted, each.of, each.pause_s) for each in gang.got(0, "Restart")]
    assert told == [(n, n, 20, pause) for n, pause in enumerate([1.0, 2.0, 4.0, 8.0, 16.0, *[30.0] * 15], 1)]
    for node in (0, 1):
        assert [(go.generation, go.restarts) for go in gang.got(node, "Go")] == [(each, each) for each in range(21)]
    assert gang.state.view.restarts_left == 0
    assert "after 20 restarts" in str(gang.same_verdict())


@pytest.mark.parametrize(("stopping_s", "left_s"), [(0.0, 0.8), (0.5, 0.3), (0.8, 0.0), (20.0, 0.0)])
def test_the_pause_before_a_restart_counts_from_the_failure_not_from_the_end_of_all(stopping_s, left_s):
    gang = running(2, max_restarts=1)
    gang.ended(1, crash(1), age_s=0.2)
    assert not gang.play(f"+{stopping_s}").got(0, "Restart")  # node 0 still stops
    assert gang.play("stop 0").got(0, "Restart")[0].pause_s == pytest.approx(left_s)
    assert gang.state.due_at == (pytest.approx(gang.now + left_s) if left_s else float("inf"))
    assert len(gang.got(0, "Go")) == (1 if left_s else 2)


@pytest.mark.parametrize(
    ("causes", "after_s", "ends"),
    [
        ([crash()] * 3, 119.0, True),
        ([crash()] * 4, 120.0, False),
        ([crash(text="ValueError: 1"), crash(0, "ValueError: 2"), crash(text="ValueError: 3")], 1.0, True),
        ([crash(), crash(text="KeyError: 1")] * 2, 1.0, False),
        ([crash(), replace(crash(), place="train.py:7")] * 2, 1.0, False),
        ([crash(), crash(), KILLED, crash(), crash()], 1.0, False),
        ([KILLED] * 4, 1.0, False),
    ],
)
def test_the_same_user_error_three_times_in_a_row_soon_after_the_start_ends_the_launch(causes, after_s, ends):
    gang = running(2, max_restarts=9)
    for cause in causes:
        assert gang.is_undecided()
        gang.play(f"+{after_s}").fail(cause)
        gang.pass_time(gang.state.due_at - gang.now if gang.is_undecided() else 0.0)
    said = "It failed so 3 times in a row, each time within 2 min 0 s of its start, so it is not started again."
    assert said in str(gang.same_verdict()) if ends else gang.is_undecided()


@pytest.mark.parametrize(("pinned", "taken", "last"), [(None, 1, 40002), (None, 9, 40004), (29500, 9, 29500)])
def test_a_port_that_is_taken_after_it_was_chosen_is_replaced_and_counts_as_no_restart(pinned, taken, last):
    gang, tries = running(2, master_port=pinned), [*range(40001, last + 1)] or [29500]
    for _ in tries[:taken]:
        gang.fail(replace(crash(0, kind="agent"), detail="... EADDRINUSE ..."))
    gang.all_ended()
    goes = [(go.port, go.generation, go.restarts) for go in gang.got(1, "Go")]
    assert goes == [(port, generation, 0) for generation, port in enumerate(tries)]
    another = "another program took the port of the rendezvous; all workers start again with another port"
    assert (gang.notes(1), gang.got(1, "Restart")) == ([another] * (len(tries) - 1), [])
    assert ("EADDRINUSE" in str(gang.same_verdict())) is (taken == 9)
    error = running(2, taken=[29500], master_port=29500).same_verdict()
    assert "Port 29500 is taken on the control node (host host-0). Pin another with master_port" in str(error)


# --- time limits -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "said", "second_stop_s"),
    [
        ({"timeout_s": 60.0}, "longer than 60 s. run(timeout_s=...) and the step's @timeout change", 60.0),
        ({"timeout_s": 59.0, "deadline": 1060.0}, ALLOWS, 9.0),  # no reason to restart
    ],
)
def test_a_launchs_limit_counts_anew_for_each_restart_and_the_steps_does_not(limits, said, second_stop_s):
    gang = running(2, max_restarts=1, **limits).play("+50")
    gang.fail(crash())
    assert len(gang.play(f"+1, +{second_stop_s - 0.5}").got(0, "Stop")) == 1
    assert len(gang.play("+1, stop").got(0, "Stop")) == 2
    assert type(gang.same_verdict()) is errors.LaunchTimeout
    assert said in str(gang.same_verdict())
    assert not gang.play("+100").got(0, "Abort"), "the time is up once"


def test_the_steps_time_counts_while_nodes_gather_and_says_who_was_waited_for():
    gang = GangOf(3, deadline=1060.0, join=False)
    assert not gang.play("join 0 1, ready 0, +59").got(0, "Verdict")
    error = gang.play("+2, join 2, ready 1, ready 2").same_verdict()
    waited = "launch 0 waited for node 2 to start and for node 1 to call current.torch.run"
    assert f"ode 0 (host host-0) ran {ALLOWS}, while {waited}" in error.message
    assert [each.kind for each in gang.got(0, "Verdict")[0].events][-3:] == ["timeout", "cause", "failed"]
    again = gang.play("all_ready 1, +1, stop").same_verdict(launch=1)  # whoever goes on launches in vain
    assert type(error) is type(again) is errors.LaunchTimeout


@pytest.mark.parametrize(("when", "count"), [("in a pause", 1), ("in its own code", 2), ("after its end", 0)])
def test_the_steps_time_ends_a_pause_and_the_steps_own_code_once(when, count):
    gang = running(2, max_restarts=1, deadline=1000.5)
    gang.fail(crash()) if when == "in a pause" else gang.all_ended()
    gang.done(*[0] * (when == "after its end"))
    assert not gang.play("+0.4").got(0, "Abort")
    found = [abort.error for node in (0, 1) for abort in gang.play("+0.2, +2").got(node, "Abort")]
    found += [gang.same_verdict()] if when == "in a pause" else []
    assert [type(each) for each in found] == [errors.LaunchTimeout] * count
    assert all(ALLOWS in str(each) for each in found)


# --- what goes to the datastore --------------------------------------------------------------------


@pytest.mark.parametrize(
    "limit", [{"hang_timeout_s": 20.0, "timeout_s": 40.0, "max_restarts": 3}, {"deadline": 1100.0}]
)
def test_who_stores_neither_hangs_nor_is_too_slow_but_for_the_step_and_is_named_every_30_s(limit):
    gang = running(7, **limit)
    gang.all_ended(*range(6), stores=True)
    gang.ended(6)
    for node in range(5):
        gang.say(node, Report("storing", 0, 0, {"what": f"rank {node * 2}'s value"}))
    others = "node 2 stores rank 4's value; node 3 stores rank 6's value; so do 2 other nodes (for 30 s so far)"
    assert gang.play("+30.1").notes(0) == [f"node 1 stores rank 2's value; {others}"]
    left = "node 5 stores what its workers have left"
    assert gang.play("stored 0 1 2 3 4, +30.1").notes(0)[1:] == [f"{left} (for 60 s so far)"]
    assert len(gang.play("+40.1").got(1, "Stop")) == ("deadline" in limit)
    error = gang.play("stored 0 1 2 3 4 5").same_verdict()
    assert type(error) is (errors.LaunchTimeout if "deadline" in limit else type(None))
    assert "deadline" not in limit or f"{left} (for 100 s so far)" in str(error)


@pytest.mark.parametrize(("deadline_s", "within_s"), [(500.0, 120.0), (70.0, 70.0), (3.0, 30.0)])
@pytest.mark.parametrize("in_time", [True, False])
def test_a_launch_that_fails_ends_when_what_it_has_left_is_stored_or_the_time_is_up(deadline_s, within_s, in_time):
    gang = running(deadline=1000.0 + deadline_s)
    gang.ended(1, crash(), stores=True)
    gang.stop(0, 2, stores=in_time)
    (store,) = gang.got(0, "Store")
    assert store is gang.got(2, "Store")[0], "each knows why, even if the control node is lost now"
    assert (store.within_s, [event.kind for event in store.events]) == (within_s, ["go", "stopping", "cause"])
    assert gang.play(f"+{within_s + 14.0}").is_undecided()  # and the index of what was stored
    assert gang.play("stored 0 1 2" if in_time else "+2").same_verdict() is store.error
    assert (store.error.cause["rank"], len(gang.recorded("cause"))) == (2, 1)


def test_a_value_that_can_not_be_stored_fails_the_launch_and_restarts_nothing():
    gang = running(max_restarts=3)
    gang.all_ended(stores=True)
    gang.stored(1, fails=[crash(kind="store", text="has ended well, but its value could not be stored")])
    assert (type(gang.same_verdict()), gang.same_verdict().cause["category"]) == (errors.LaunchFailed, "store")
    assert f"Rank 2 on {NODE_1} has ended well, but its value could not be stored." in str(gang.same_verdict())
    assert [len(gang.got(0, kind)) for kind in ("Stop", "Store", "Restart")] == [1, 1, 0], "nothing more is stored"


def test_a_failure_in_the_pause_before_a_restart_is_the_cause_and_what_is_left_is_stored():
    gang = running(2, max_restarts=1)
    gang.ended(1, crash())
    gang.stop(0, stores=True)
    gang.play("lost 1").say(0, Report("outputs", 0, 0, {"key": "k", "files": 1, "size": 2}))
    error = gang.play("stored 0").verdict(0)
    assert gang.got(0, "Verdict")[0].features == {"outputs": {"nodes": {"0": ["k", 1, 2]}}}, (
        "the verdict comes after it"
    )
    assert (error.cause["node"], error.cause["kind"]) == (1, "lost")
    assert f"All workers were about to start again after an earlier failure: Rank 2 on {NODE_1}" in str(error)
    assert "after 1 restart" not in str(error), "there was none"


# --- preemption, spares, and fewer nodes -----------------------------------------------------------


@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.parametrize("is_told", [True, False])
def test_a_preemption_sends_the_users_signal_and_tells_who_saved(node, is_told):
    gang = running(2, preemption_signal=signal.SIGUSR1)
    gang.failed(node, preemption(node) if is_told else crash(node))
    assert [gang.got(each, "Stop")[0].signal for each in (0, 1)] == [signal.SIGUSR1 if is_told else None] * 2
    gang.stop(node, exit_codes={2 * node: 0, 2 * node + 1: 0})
    gang.give_up(node, preemption(node))  # a second order to end, while the other node's workers still save
    gang.stop(1 - node, exit_codes={2 - 2 * node: 1, 3 - 2 * node: 0})
    error, saved = gang.same_verdict(), "0, 1, 3" if node == 0 else "1, 2, 3"
    assert (type(error) is errors.TorchrunPreempted) is is_told
    assert (f"exited with code 0 in time: {saved}." in str(error)) is is_told
    assert ("Meanwhile host host-" in str(error)) is not is_told


@pytest.mark.parametrize("rules", [{"spare_nodes": 1}, {"min_nodes": 3}])
def test_a_node_that_is_told_to_end_hears_that_alone_and_the_others_start_again_at_once_as_no_restart(rules):
    gang, came = running(4, max_restarts=1, **rules), (3,) * ("spare_nodes" in rules)
    gang.play("told 1, stop 1, ready 1 1, stop 0 2" + ", stop 3" * (not came))
    for launch in (0, 1, 2):  # also that which it has called before, or calls after
        error = gang.play("ready 1 2" if launch == 2 else "+0").verdict(1, launch)
        assert "its task got SIGTERM. The other nodes go on without it, if enough are left." in str(error)
        assert "@retry" not in str(error), "this run goes on"
    (restart,), last = gang.got(0, "Restart"), gang.got(0, "Go")[-1]
    assert (restart.number, restart.counted, restart.of, restart.pause_s, restart.waits_for) == (1, 0, 1, 0.0, ())
    assert (last.group.nodes, last.left, last.came, last.restarts, last.max_restarts) == ((0, 2, 3), (1,), came, 1, 2)
    gang.leave(1, failed=True)
    assert (gang.state.view.restarts_left, gang.state.broken, len(gang.got(0, "Stop"))) == (1, None, 1)
    gang = running(4, max_restarts=1, **rules)
    gang.failed(2, crash(2), age_s=5.0)  # this counts, even if a node is told to end after it
    assert gang.play("told 1, stop").state.view.restarts_left == 0


def test_a_spare_waits_and_takes_the_place_of_a_lost_node_at_once():
    gang = running(5, spare_nodes=2, max_restarts=3).play("lost 1, lost 2, stop 0")
    assert gang.groups() == gang.groups(4) == [(0, 1, 2), (0, 3, 4)]
    (restart,), last = gang.got(3, "Restart"), gang.got(3, "Go")[-1]
    assert (restart.number, restart.counted, restart.of, restart.pause_s) == (1, 1, 3, 0.0)
    assert (last.left, last.came) == ((1, 2), (3, 4))
    assert gang.notes(0) == [f"node 2 (host host-2) failed: {SIGKILL}"], "each lost node is named"
    assert [each.nodes for each in gang.recorded("left_out", "taken_in")] == [[1, 2], [3, 4]]
    assert gang.play("all_ended 0 3 4").same_verdict(0, 3, 4) is None


def test_a_spare_that_was_not_needed_stays_after_a_failure_and_leaves_after_success():
    gang = running(4, spare_nodes=1)
    gang.fail(crash())
    assert gang.same_verdict() is not None
    assert gang.play("all_ready 1, all_ended").same_verdict(launch=1) is None
    assert gang.got(3, "Verdict")[-1].is_without(3)
    assert gang.notes(0) == ["node 3 leaves: launch 1 has ended well without it"]
    assert gang.play("ready 0 2, ready 1 2, ready 2 2").groups() == [(0, 1, 2)] * 3, "nobody waits for it"
    gang.leave(3, of_node("step", 3))
    assert (gang.state.without, gang.state.broken, len(gang.got(0, "Stop"))) == (set(), None, 1)


# What happens beside nodes 0, 2 and 3, before node 2 calls `run`, and what the log says.
BEFORE = {
    "join 1, lost 1": f"{NODE_1} failed: {SIGKILL}{GO_ON}",
    "join 1, prepare 1, quit 1": f"{NODE_1} was preempted: its task got SIGTERM{GO_ON}",
    "ready 2, +61": f"node 1 (host unknown) failed: it has not joined within 60 s{GO_ON}",
    "ready 2, join 1, ready 1": "",  # it is a spare
}


@pytest.mark.parametrize("story", BEFORE)
def test_who_is_here_takes_part_and_who_comes_late_is_a_spare(story):
    gang, said = GangOf(4, spare_nodes=1, join=False, started_timeout_s=60.0), BEFORE[story]
    gang.play(f"join 0 2 3, ready 0, ready 3, {story}, ready 2")
    assert (gang.groups(), gang.notes(0)) == ([(0, 2, 3)], [said] * bool(said)), "no launch waits for a spare"
    assert len(gang.recorded("spare")) == (not said)
    assert gang.play("all_ended 0 2 3").same_verdict(0, 2, 3) is gang.state.broken is None


@pytest.mark.parametrize(
    ("given", "story", "why"),
    [
        ({"max_restarts": 0}, "lost 1", "max_restarts=0 allows no more restarts."),
        ({"restart_on": frozenset({"user"})}, "lost 1", "restart_on does not have 'node_lost'."),
        ({}, "lost 1, give_up 2", "the call of run has ended on node 2, too."),
        ({}, "told 0, lost 1", "node 0 is the control node."),
        ({}, "lost 1, lost 3", "2 nodes are left, and it needs 3 (spare_nodes, min_nodes)."),
        ({"min_nodes": 3, "spare_nodes": 0}, "lost 2, stop 0 1 3, lost 1", "2 nodes are left, and it needs 3 (spare"),
        ({"spare_nodes": 0}, "lost 1", ""),  # by default a loss ends the launch
    ],
)
def test_the_error_says_why_nothing_goes_on_without_a_lost_node(given, story, why):
    gang = running(4, **{"spare_nodes": 1, "max_restarts": 3, **given})
    said = str(gang.play(f"{story}, stop 0 2 3").verdict(0))
    assert ("\nIt can't go on without that node: " in said) == bool(why)
    assert why in said
    assert "With max_restarts=N" not in said


@pytest.mark.parametrize("ends", ["stop 1", "cut 1", "+2"])
@pytest.mark.parametrize("first", ["killed 1", "lost 1", "told 2, stop 2"])
def test_a_spare_waits_until_the_workers_of_a_lost_node_are_gone_but_not_for_ever(first, ends):
    """They may save for all of their grace, and must not live beside those of the same ranks."""
    gang = running(4, spare_nodes=1, max_restarts=1)
    if first == "lost 1":  # as the control node of a local run says, before the node's supervisor does
        gang.lost(1, SIGKILL, is_connected=True)
    gang.play("killed 1" if first == "lost 1" else first)
    assert gang.play(f"stop 0 2, +{STOP_S - 1.0}").groups() == [(0, 1, 2)]
    lives = first == "told 2, stop 2" and ends == "stop 1"
    assert gang.play(ends).groups()[1:] == [(0, 1, 3)] * lives or [(0, 2, 3)] * (first != "told 2, stop 2")


# --- another task in the place of a lost node ------------------------------------------------------


def replacing(num_nodes=3, **given):
    """Return a gang on Kubernetes whose first launch runs."""
    return running(num_nodes, **{"replaces": True, "max_restarts": 3, "started_timeout_s": 300.0, **given})


@pytest.mark.parametrize("state", ["+0", "told 1", "done 1"])
def test_a_task_that_comes_before_the_one_in_its_place_has_ended_tries_again_or_gives_way_to_a_newer_one(state):
    gang, older, newer = replacing().play(state), newcomer(1, "b", "b"), newcomer(1, "c", "c")
    for join in (older, newer, older):
        assert not gang.state.may_join(join)
        answer = gang.turn_away(join)
        assert (answer.is_early, answer.hold_s) == (True, 0.0)
        assert "the task before it, on host host-1, has not ended yet" in str(answer.error)
    assert gang.farewells(1) == ["replaced"] * (state != "told 1")
    assert not gang.turn_away(newcomer(0)).is_early, "the control node has no other task"
    gang.play("stop 1, lost 1, stop 0 2")
    assert gang.state.may_join(older)
    gang.say(1, newer)
    assert "a newer task has taken its place" in str(gang.turn_away(older).error)
    gang.post(gang.state.give_up(errors.GangError("The channel failed.")))
    assert "The channel failed." in str(gang.turn_away(newcomer(1, "d", "d")).error)


def test_the_workers_start_again_when_the_task_that_takes_its_place_is_ready():
    gang = replacing(why_it_waits=lambda node: f"ask about {node}")
    for number in (1, 2, 3):  # as often as restarts are left
        restart = gang.play("lost 1, stop 0 2").got(0, "Restart")[-1]
        assert (restart.number, restart.counted, restart.pause_s, restart.waits_for) == (number, number, 0.0, (1,))
        said = "launch 0 waits for node 1 to start. To see why node 1 is missing: ask about 1"
        assert (gang.play("+60").notes(0)[-1], gang.state.due_at) == (said, float("inf"))
        assert len(gang.play("come 1, +1").groups()) == number, "it has not called run"
        last = gang.play("ready 1, +0").got(1, "Go")[-1]
        assert (last.generation, last.group.nodes, last.left, last.came) == (number, (0, 1, 2), (1,), (1,))
    assert "max_restarts=3 allows no more restarts" in str(gang.play("lost 1, stop 0 2").verdict(0))


# What comes after the loss of node 1: who takes part with a spare; what becomes of three nodes; and if two are enough.
WAITS = {
    "+302": ([(0, 2, 3)], "No other task has taken its place.", [(0, 2)]),
    "come 1, lost 1, +302": ([(0, 2, 3)], "2 nodes are left, and it needs 3", [(0, 2)]),
    "come 1, +302": ([(0, 2, 3)], "2 nodes are left, and it needs 3", [(0, 2)]),  # it does not call `run`
    "come 1, +299, ready 1": ([(0, 2, 3)], [(0, 1, 2)], [(0, 1, 2)]),
    "come 1, ready 1, +0, lost 2, stop 0 1": ([(0, 2, 3)], [(0, 1, 2)], [(0, 1, 2)]),
    "+302, come 1, ready 1, lost 2, stop 0, +302": ([(0, 2, 3)], "it needs 3", [(0, 2), (0, 1)]),  # it is a spare
}


@pytest.mark.parametrize("story", WAITS)
def test_whether_another_task_comes_decides_who_takes_part(story):
    for given, then in zip(({"num_nodes": 4, "spare_nodes": 1}, {}, {"min_nodes": 2}), WAITS[story], strict=True):
        gang = replacing(**given).play(f"lost 1, stop 0 2, {story}, +0")
        assert then in str(gang.verdict(0)) if isinstance(then, str) else gang.groups()[1:] == then


@pytest.mark.parametrize("how", ["contradicts", "fails", "raises"])
def test_the_own_error_of_a_new_task_harms_nobody_else(how):
    gang = replacing(4, spare_nodes=1).play("lost 1, stop 0 2, come 1")
    if how == "contradicts":
        gang.ready(1, nproc=7)
        said = "The nodes differ in the processes per node"
    elif how == "fails":
        gang.play("prepare 1").failed(1, of_node("command"), generation=None)
        said = "before_run failed. The others go on without it.\nNode 1"
    else:
        gang.leave(1, crash(1, kind="step"))
    if how != "raises":
        assert str(gang.verdict(1)).startswith(said)
        assert gang.verdict(1).cause["node"] == 1, "no other node shows it"
    assert (len(gang.groups()), len(gang.got(0, "Stop")), gang.state.view.restarts_left) == (2, 1, 2)
    assert gang.play("all_ended 0 2 3").same_verdict(0, 2, 3) is None


@pytest.mark.parametrize("how", ["lost 1", "told 1"])
@pytest.mark.parametrize("number", [0, 1])
def test_a_node_lost_between_launches_is_waited_for_and_its_new_task_gets_the_verdicts_before(how, number):
    gang = GangOf(3, replaces=True).play("all_ready, all_ended" if number else "ready 0")
    gang.leave(1, preemption()) if how == "told 1" else gang.lost(1)
    gang.play(f"ready 0 {number}, ready 2 {number}, come 1")
    if number:
        (late,) = gang.play("ready 1 0").got(1, "Verdict")[1:]
        assert (late.launch, late.error, late.group.nodes) == (0, None, (0, 1, 2))
    assert len(gang.groups()) == number
    assert gang.play(f"ready 1 {number}, all_ended").groups()[number:] == [(0, 1, 2)]
    gang.play("lost 1, done 0 2, leave 2")
    assert (gang.got(0, "Restart"), gang.farewells(0)) == ([], []), "it waits for the new task"
    assert gang.play(f"come 1, ready 1 {number}").got(1, "Verdict")[-1].error is None
    assert gang.play("done 1, leave 1").farewells(0) == ["alone"]
    assert gang.turn_away(newcomer()).is_early, "it will find the record of the gang's end"


@pytest.mark.parametrize("before", ["come 1, ready 1", "come 1", "+0"])
def test_a_task_that_comes_too_late_to_take_part_leaves(before):
    """A spare has taken its place; the others wait for it neither in the next launch nor at the end."""
    gang = replacing(4, spare_nodes=1).play(f"lost 1, stop 0 2, {before}, all_ended 0 2 3, ready 0 1, ready 2 1")
    after = {"come 1": "ready 1", "+0": "come 1, ready 1"}.get(before, "+0")
    (verdict,) = gang.play(f"{after}, ready 3 1").got(1, "Verdict")
    assert verdict.is_without(1)
    assert gang.groups()[2:] == [(0, 2, 3)]
    assert gang.play("all_ended 0 2 3, done 0 2 3, leave 2, leave 3").farewells(0) == ["alone"]


def test_a_task_that_needs_the_verdicts_of_thousands_of_launches_is_told_that_they_are_forgotten():
    gang, sizes = replacing(min_nodes=2).play("all_ended"), []
    for number in range(1, 2501):
        gang.play(f"all_ready {number}, all_ended")
        sizes.append(len(encode(gang.got(1, "Verdict")[-1])))
        for sent in gang.sent.values():
            del sent[:-2]
    assert sizes[-1] < sizes[0] + 60, "but for longer numbers"
    assert gang.state.view.left_out > 1000 >= len(gang.state.view.events)
    late = gang.play("lost 1, come 1, ready 1 1600, ready 1 0").got(1, "Verdict")[-2:]
    assert [type(each.error) for each in late] == [type(None), errors.GangError]
    assert "The end of launch 0 is not known any more: a task that comes late can make up for 1000" in str(
        late[1].error
    )


# --- before_run ----------------------------------------------------------------------------------


def no_data(node):
    return of_node("command", node, "before_run 1/2 (make data) exited with code 2")


def test_nothing_starts_before_the_last_command_of_the_last_node():
    gang, said = (
        GangOf(2).play("ready 0, prepare 1"),
        {"text": "it exited with code 0", "exit_code": 0, "seconds": 600.0},
    )
    gang.say(1, Report("command", 0, data=said))
    assert not gang.got(0, "Go")
    gang.play("ready 1, all_ended")
    kinds = [each.kind for each in gang.got(0, "Verdict")[0].events if each.kind not in ("joined", "stopped")]
    assert kinds == ["ready", "before_run", "command", "ready", "go", "done"]
    (command,) = gang.recorded("command")
    assert (command.nodes, command.text, command.exit_code, command.seconds) == ([1], *said.values())


@pytest.mark.parametrize("late", ["prepare 0", "ready 0"])
def test_a_launch_whose_commands_have_failed_ends_when_the_last_node_has_called_run(late):
    """Else the control node could be gone before the last one hears why."""
    gang = GangOf(3).play("prepare 1 2")
    for node in (1, 2):
        gang.failed(node, no_data(node))
    assert gang.play("+11").is_undecided()
    error = gang.play(late).same_verdict()
    assert str(error).startswith(
        "before_run failed, so no worker was started.\nNode 1 (host host-1) failed: before_run"
    )
    assert (error.cause["category"], error.cause["node"], gang.got(0, "Go")) == ("before_run", 1, [])


@pytest.mark.parametrize("node", [0, 1, 2])
def test_a_node_whose_commands_fail_is_left_out_where_more_are_here_than_needed(node):
    gang, others = GangOf(4, spare_nodes=1, min_nodes=2).play(f"prepare {node}"), sorted({0, 1, 2, 3} - {node})
    gang.failed(node, no_data(node))
    for each in others:
        gang.ready(each)
    if node == 0:
        assert gang.same_verdict(0, 1, 2).cause["node"] == 0, "not so the control node"
        return
    assert str(gang.verdict(node)).startswith("before_run failed. The others go on without it.\nNode")
    gang.leave(node, failed=True)
    gang.all_ended(*others)
    assert (gang.groups(), gang.same_verdict(*others), gang.state.broken) == ([tuple(others)], None, None)


# --- thousands -----------------------------------------------------------------------------------


def lines_of_the_machine(num_nodes):
    """Return how many lines of `gang.py` run in the life of a gang, for each of its nodes."""
    count, nodes = 0, range(num_nodes)

    def trace(frame, event, _):
        nonlocal count
        count += event == "line"
        return trace if frame.f_code.co_filename == machine.__file__ else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        gang = running(num_nodes)
        gang.all_ended(stores=True)
        gang.stored(*nodes)
        gang.all_ready(1)
        for node in nodes:
            gang.failed(node, crash(node))
        gang.stop()
        for node in nodes:
            gang.play(f"done {node}, +0.1")
        for node in reversed(nodes):
            gang.leave(node)
    finally:
        sys.settrace(before)
    return count / num_nodes


def test_no_message_of_one_node_makes_the_gang_look_through_all_nodes():
    """With thousands of nodes that would be millions of looks, while all of them wait."""
    assert lines_of_the_machine(300) < lines_of_the_machine(30) * 1.2


def test_the_verdict_of_thousands_is_made_once_and_its_error_is_told_in_short():
    """What is the same object is made into bytes once, and all hear it in about a second."""
    gang = running(300).play("all_ended")
    for node in range(300):
        gang.ready(node, 1, digest=f"digest-{node}")
    for verdicts in zip(*[gang.got(node, "Verdict") for node in range(1, 300)], strict=True):
        assert all(each is verdicts[0] for each in verdicts)
    error = str(gang.same_verdict(launch=1))
    assert "node 0: digest-0, node 1: digest-1" in error
    assert "and 292 more values" in error
    assert len(error) < 1000
    assert names([*range(1, 38), 40, 42]) == "nodes 1-37, 40, 42"
    assert names(range(0, 4000, 2)) == "nodes 0, 2, 4, 6, 8, 10, 12, 14 and 1992 more"


def test_the_change_of_nodes_is_told():
    for left, came, said in (
        ((), (), ""),
        ((1,), (3,), "node 3, a spare, takes the place of node 1"),
        ((1, 2), (3, 4), "nodes 3, 4, spares, take the places of nodes 1, 2"),
        ((1, 2), (3,), "node 3, a spare, takes part; the launch goes on without nodes 1, 2, on 3 nodes"),
        ((1,), (), "the launch goes on without node 1, on 3 nodes"),
        ((1,), (1,), "node 1 is started again"),
        ((1, 2), (2, 3), "node 2 is started again; node 3, a spare, takes the place of node 1"),
    ):
        assert change_of_nodes(left, came, 3) == said
