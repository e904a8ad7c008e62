"""A node's seat: the news reaches its code wherever it is, and it leaves once."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from unit_helpers import eventually

from metaflow_extensions.torchrun.plugins.torchrun import membership
from metaflow_extensions.torchrun.plugins.torchrun.errors import (
    GangError,
    LaunchFailed,
    TorchrunPreempted,
    to_wire,
)
from metaflow_extensions.torchrun.plugins.torchrun.membership import Membership

POOL = Path(__file__).parent / "programs" / "pool.py"
CRASH = LaunchFailed("Rank 3 failed", {"kind": "exception", "node": 1, "host": "host-1"})


class Link:
    """A control node that acknowledges a leave, unless it is told not to."""

    def __init__(self):
        self.sent, self.closed, self.seat, self.answers = [], 0, None, True

    def send(self, message):
        self.sent.append(message)
        if message["type"] == "leave" and self.answers:
            self.seat.deliver({"type": "ack"})

    def close(self):
        self.closed += 1

    def leaves(self):
        return [message for message in self.sent if message["type"] == "leave"]


@pytest.fixture
def seated():
    """Return a seat, its link and its events; SIGTERM is given back in any case."""
    before = signal.getsignal(signal.SIGTERM)
    link, events = Link(), []
    seat = Membership(1, 3, events.append)
    link.seat = seat
    seat.sit_down(link, link.close)
    seat.deliver({"type": "welcome"})
    yield seat, link, events
    seat.leave()
    assert signal.getsignal(signal.SIGTERM) is before
    signal.signal(signal.SIGTERM, before)


def abort(error=CRASH):
    return {"type": "abort", "error": to_wire(error)}


# --- leaving -------------------------------------------------------------------------------------


def test_leaving_happens_once(seated):
    seat, link, _ = seated
    seat.leave()
    seat.leave(ValueError("late"))
    assert link.leaves() == [{"type": "leave", "cause": None, "failed": False}]
    assert link.closed == 1


def test_the_seat_is_kept_until_the_results_are_stored(seated):
    seat, link, _ = seated
    seat.finish()
    assert link.sent == [{"type": "done"}]
    assert link.closed == 0
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    seat.deliver(abort())  # too late for this node's code, which has ended
    seat.leave()
    assert link.sent[1:] == [{"type": "leave", "cause": None, "failed": False}]
    assert link.closed == 1


def test_no_launch_after_the_steps_end(seated):
    seat, _, _ = seated
    seat.finish()
    with pytest.raises(GangError, match="after the gang had ended"):
        seat.begin_launch()


def test_the_others_are_waited_for_and_the_wait_is_told(seated, monkeypatch):
    monkeypatch.setattr(membership, "QUIET_S", 0.1)
    monkeypatch.setattr(membership, "REMIND_S", 0.1)
    seat, _, events = seated
    left = [[2], [1, 2]]

    def remaining():
        nodes = left.pop()
        if not left:
            seat.deliver({"type": "alone"})
        return nodes

    seat.await_others(remaining)
    assert [event.text for event in events] == [
        f"done here; waiting until {nodes} ended the step and stored the results" for nodes in ("nodes 1, 2", "node 2")
    ]


def test_a_node_that_fails_while_it_is_waited_for_ends_the_wait(seated):
    seat, _, _ = seated
    timer = threading.Timer(0.1, seat.deliver, [abort()])
    timer.start()
    with pytest.raises(LaunchFailed, match="Rank 3 failed"):
        seat.await_others(lambda: [2])
    timer.join()


def test_the_last_that_leaves_with_an_error_ends_the_wait_with_it(seated):
    """Its error and its leaving are told in this order."""
    seat, _, _ = seated
    signal.signal(membership._WAKE, signal.SIG_IGN)  # as in another thread than the main one
    seat.deliver(abort())
    seat.deliver({"type": "alone"})
    with pytest.raises(LaunchFailed, match="Rank 3 failed"):
        seat.await_others(list)
    signal.signal(membership._WAKE, signal.SIG_DFL)


def test_a_control_node_whose_step_is_done_is_still_interrupted():
    """On a local run Metaflow's code has the main thread then: it waits for the nodes' tasks."""
    link = Link()
    link.seat = seat = Membership(0, 3, print)
    seat.sit_down(link, link.close)
    seat.deliver({"type": "welcome"})
    timer = threading.Timer(0.1, seat.deliver, [abort()])
    try:
        seat.finish()
        assert link.sent == [{"type": "done"}]
        timer.start()
        with pytest.raises(LaunchFailed, match="Rank 3 failed"):
            sleep_through()
    finally:
        timer.join()
        seat.leave()


def test_an_exception_of_the_step_is_news_for_the_gang(seated):
    seat, link, _ = seated
    try:
        raise KeyError("größe")
    except KeyError as error:
        seat.leave(error)
    cause = link.leaves()[0]["cause"]
    assert (cause["kind"], cause["node"], cause["host"]) == ("step", 1, seat.host)
    assert cause["exception"] == "KeyError: 'größe'"
    assert "Traceback (most recent call last):" in cause["detail"]


def test_a_cause_that_is_known_is_passed_on_as_it_is(seated):
    seat, link, _ = seated
    seat.leave(CRASH)
    assert link.leaves()[0]["cause"] == CRASH.cause


def test_the_gangs_own_verdict_is_no_news(seated):
    seat, link, _ = seated
    seat.begin_launch()
    seat.end_launch(CRASH)
    seat.leave(CRASH)
    assert link.leaves() == [{"type": "leave", "cause": None, "failed": True}]


@pytest.mark.parametrize("explicitly", [True, False])
def test_an_exception_chained_to_the_verdict_is_no_news(explicitly, seated):
    seat, link, _ = seated
    seat.begin_launch()
    seat.end_launch(CRASH)
    try:
        try:
            raise CRASH
        except LaunchFailed as known:
            if explicitly:
                raise ValueError("wrapped") from known
            raise ValueError("wrapped")  # noqa: B904 - chained by context
    except ValueError as error:
        seat.leave(error)
    assert link.leaves()[0]["cause"] is None


def test_another_exception_after_a_verdict_is_news(seated):
    seat, link, _ = seated
    seat.begin_launch()
    seat.end_launch(CRASH)
    seat.leave(OSError("disk full"))
    assert link.leaves()[0]["cause"]["exception"] == "OSError: disk full"


def test_leaving_does_not_wait_for_ever_for_the_receipt(seated, monkeypatch):
    monkeypatch.setattr("metaflow_extensions.torchrun.plugins.torchrun.membership._ACK_WAIT_S", 0.1)
    seat, link, _ = seated
    link.answers = False
    begun = time.monotonic()
    seat.leave(OSError("x"))
    assert 0.1 <= time.monotonic() - begun < 2.0
    assert link.closed == 1


def test_a_node_that_was_never_taken_in_does_not_wait_for_a_receipt():
    link = Link()
    seat = Membership(1, 3, [].append)
    seat.sit_down(link, link.close)
    link.answers = False
    begun = time.monotonic()
    seat.leave(OSError("x"))
    assert time.monotonic() - begun < 1.0


def test_a_link_that_breaks_is_closed_all_the_same(seated):
    seat, link, _ = seated
    link.send = lambda message: 1 / 0
    with pytest.raises(ZeroDivisionError):
        seat.leave()
    assert link.closed == 1


def test_a_seat_that_was_never_taken_is_left_silently():
    Membership(1, 2, print).leave(OSError("x"))


# --- launches ------------------------------------------------------------------------------------


def test_launches_are_numbered(seated):
    seat, _, _ = seated
    numbers = []
    for _ in range(3):
        numbers.append(seat.begin_launch())
        seat.end_launch(None)
    assert numbers == [0, 1, 2]


def test_mail_of_the_launch_before_is_thrown_away(seated):
    seat, _, _ = seated
    seat.begin_launch()
    seat.deliver({"type": "verdict", "launch": 0, "error": None})
    seat.end_launch(None)
    seat.begin_launch()
    assert seat.inbox.empty()
    seat.end_launch(None)


def test_messages_for_the_launch_arrive_in_order(seated):
    seat, _, _ = seated
    seat.begin_launch()
    for kind in ("go", "stop", "verdict"):
        seat.deliver({"type": kind})
    assert [seat.inbox.get(timeout=1)["type"] for _ in range(3)] == ["go", "stop", "verdict"]
    seat.end_launch(None)


def test_a_broken_gang_begins_no_launch(seated):
    seat, _, _ = seated
    seat.begin_launch()
    seat.deliver(abort())
    assert seat.inbox.get(timeout=1) == {"type": "abort"}
    assert str(seat.broken) == "Rank 3 failed"
    seat.end_launch(seat.broken)
    with pytest.raises(LaunchFailed, match="Rank 3 failed"):
        seat.begin_launch()


def test_a_launch_after_the_control_node_has_left_says_what_is_wrong(seated):
    seat, _, _ = seated
    seat.deliver({"type": "bye"})
    with pytest.raises(GangError, match="same number of times"):
        seat.begin_launch()


def test_a_control_node_that_vanishes_after_its_goodbye_is_no_news(seated):
    seat, _, _ = seated
    seat.deliver({"type": "bye"})
    seat.deliver({"type": "control_lost", "reason": "closed"})
    assert seat.broken is None


def test_a_control_node_that_vanishes_in_a_launch_breaks_the_gang(seated):
    seat, _, _ = seated
    seat.begin_launch()
    seat.deliver({"type": "control_lost", "reason": "its task was killed"})
    assert seat.inbox.get(timeout=1) == {"type": "abort"}
    assert "Node 0 (the control node) is lost: its task was killed" in str(seat.broken)
    seat.end_launch(seat.broken)


def test_only_the_first_bad_news_counts(seated):
    seat, _, _ = seated
    seat.begin_launch()
    seat.deliver(abort())
    seat.deliver(abort(LaunchFailed("another")))
    assert str(seat.broken) == "Rank 3 failed"
    seat.end_launch(seat.broken)


def test_a_control_node_that_is_not_heard_any_more_is_told_so(seated):
    """It may hear this node well, and would not know why it leaves."""
    seat, link, _ = seated
    seat.begin_launch()
    seat.deliver({"type": "control_lost", "reason": "nothing was heard from it for 5 s"})
    assert not seat.gang_knows(seat.broken)
    seat.end_launch(None, failing=True)
    seat.leave(seat.broken)
    (leave,) = link.leaves()
    assert (leave["cause"]["kind"], leave["cause"]["node"]) == ("lost", 1)
    assert "does not hear the control node any more: nothing was heard from it for 5 s" in leave["cause"]["exception"]


NEWS = {
    "abort": lambda seat: seat.deliver(abort()),
    "control lost": lambda seat: seat.deliver({"type": "control_lost", "reason": "its task was killed"}),
    "SIGTERM": lambda seat: signal.raise_signal(signal.SIGTERM),
    "notice": lambda seat: seat.notice("a spot notice says so"),
    "@timeout": lambda seat: seat.time_out("longer than the step's @timeout allows"),
}


def with_news_at(moment, function, news):
    """Call a function, with news in the middle of it: before its `moment`th line; return how many lines it ran."""
    lines = 0

    def trace(frame, event, _):
        nonlocal lines
        if frame.f_code.co_filename != membership.__file__ or frame.f_code.co_name in ("deliver", "notice", "time_out"):
            return None
        if event == "line":
            lines += 1
            if lines == moment:
                sys.settrace(None)
                news()
        return trace

    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(None)
    return lines


@pytest.mark.parametrize("kind", NEWS)
@pytest.mark.parametrize("what", ["begin_launch", "end_launch", "finish"])
def test_news_at_any_moment_is_never_lost(what, kind):
    """It is raised, or is in the launch's inbox; `finish` is the control node's, which then waits for the others."""
    moment, ended = 0, False
    while not ended:
        moment += 1
        link = Link()
        link.seat = seat = Membership(0, 3, print)
        seat.sit_down(link, link.close)
        seat.deliver({"type": "welcome"})
        calls = {
            "begin_launch": seat.begin_launch,
            "end_launch": lambda seat=seat: seat.end_launch(None),
            "finish": seat.finish,
        }
        if what == "end_launch":
            seat.begin_launch()
        told = False
        try:
            ran = with_news_at(moment, calls[what], lambda seat=seat: NEWS[kind](seat))
            ended = ran < moment
            deadline = time.monotonic() + 0.5
            told = what == "begin_launch" and not seat.inbox.empty()
            while not told and not ended and time.monotonic() < deadline:
                time.sleep(0.01)  # the wake may still be on its way
        except LaunchFailed:
            told = True
        finally:
            seat.leave()
        assert told or ended, f"lost before line {moment}"
    assert moment > 8


def test_only_one_thread_at_a_time_is_in_a_launch(seated):
    seat, link, _ = seated
    assert seat.begin_launch() == 0
    said = []

    def second():
        try:
            seat.begin_launch()
        except GangError as error:
            said.append(str(error))

    thread = threading.Thread(target=second)
    thread.start()
    thread.join(5)
    assert "while launch 0 still ran there, in another thread" in said[0]
    seat.deliver({"type": "go"})  # the first is unharmed
    assert seat.inbox.get(timeout=1) == {"type": "go"}
    seat.end_launch(None)
    assert seat.begin_launch() == 1
    seat.end_launch(None)
    assert link.sent == []


def test_a_step_that_ends_before_a_launch_in_another_thread_is_an_error(seated):
    seat, link, _ = seated
    seat.begin_launch()
    with pytest.raises(GangError, match="launch 0 still ran there in another thread") as caught:
        seat.finish()
    seat.leave(caught.value)
    assert seat.inbox.get(timeout=1) == {"type": "abort"}  # the launch ends, too
    seat.end_launch(None, failing=True)
    assert link.leaves()[0]["cause"]["kind"] == "call"


def test_a_note_of_the_control_node_is_an_event(seated):
    seat, _, events = seated
    seat.deliver({"type": "note", "text": "waits for node 2"})
    assert [(event.kind, event.node, event.text) for event in events] == [("note", 1, "waits for node 2")]


def test_not_being_taken_in_is_an_error_that_says_why():
    seat = Membership(1, 3, [].append)
    with pytest.raises(GangError, match="same node index"):
        seat.await_welcome(0.05)
    seat.deliver({"type": "welcome"})
    seat.await_welcome(0.05)


# --- SIGTERM -------------------------------------------------------------------------------------


def sleep_through(limit_s=10.0):
    time.sleep(limit_s)  # a step's own blocking call
    pytest.fail("was not interrupted")


def test_bad_news_interrupts_the_steps_own_blocking_code(seated):
    seat, _, _ = seated
    timer = threading.Timer(0.1, seat.deliver, [abort()])
    timer.start()
    with pytest.raises(LaunchFailed, match="Rank 3 failed"):
        sleep_through()
    timer.join()


def test_bad_news_after_a_failed_launch_does_not_interrupt_its_handling(seated):
    seat, _, _ = seated
    seat.begin_launch()
    seat.end_launch(CRASH)
    seat.deliver(abort())
    time.sleep(0.05)  # an exception would rise here
    assert seat.broken is not None


def test_sigterm_outside_of_a_launch_tells_the_gang_and_ends_the_step(seated):
    _, link, _ = seated
    with pytest.raises(TorchrunPreempted, match="got SIGTERM") as caught:
        signal.raise_signal(signal.SIGTERM)
    assert caught.value.cause["kind"] == "terminated"
    assert link.leaves() == [{"type": "leave", "cause": caught.value.cause, "failed": True}]


def test_sigterm_in_a_launch_is_mail_for_its_supervisor(seated):
    seat, link, _ = seated
    seat.begin_launch()
    signal.raise_signal(signal.SIGTERM)
    assert seat.inbox.get(timeout=1) == {"type": "terminated"}
    assert not link.leaves()
    seat.end_launch(None)


def test_the_previous_handler_is_back_after_leaving():
    def mine(number, frame):
        raise AssertionError

    before = signal.signal(signal.SIGTERM, mine)
    try:
        link = Link()
        link.seat = seat = Membership(0, 1, print)
        seat.sit_down(link, link.close)
        assert signal.getsignal(signal.SIGTERM) is not mine
        seat.leave()
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_seat_taken_in_another_thread_leaves_signals_alone():
    before = signal.getsignal(signal.SIGTERM)
    link, done = Link(), []

    def other():
        link.seat = seat = Membership(0, 1, print)
        seat.sit_down(link, link.close)
        seat.deliver(abort())
        seat.leave()
        done.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join(10.0)
    eventually(lambda: done == [before])


def test_after_an_error_the_control_nodes_end_is_awaited(seated):
    seat, link, _ = seated
    threading.Timer(0.3, seat.deliver, [{"type": "control_lost", "reason": "closed"}]).start()
    begin = time.monotonic()
    seat.leave(ValueError("x"), hold_s=20)
    assert 0.2 < time.monotonic() - begin < 10
    assert link.closed == 1


def test_without_an_error_nobody_is_held(seated):
    seat, _, _ = seated
    begin = time.monotonic()
    seat.leave(None, hold_s=20)
    assert time.monotonic() - begin < 1


# --- what is the task's, and not its children's ---------------------------------------------------


def in_child(function):
    """Call a function in a forked child and return what it returns, or the text of what it raises."""
    mine, its = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            said = str(function())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(its, said.encode())
        os._exit(0)
    os.close(its)
    with os.fdopen(mine) as answer:
        said = answer.read()
    os.waitpid(pid, 0)
    return said


@pytest.mark.parametrize("where", ["main", "thread"])
def test_pools_of_the_steps_end_at_once_and_tell_nobody(where):
    """Some of their processes get SIGTERM in the moment in which they are forked."""
    done = subprocess.run([sys.executable, POOL, where], capture_output=True, text=True, timeout=30, check=True)
    assert done.stderr == ""
    said = json.loads(done.stdout)
    assert said["sent"] == []
    assert said["longest_s"] < 2


def test_a_child_that_is_told_to_end_in_the_moment_of_the_fork_ends(seated):
    pid = os.fork()
    if pid == 0:
        time.sleep(20)
        os._exit(0)
    os.kill(pid, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM


def test_a_forked_child_has_the_former_handlers_and_the_task_has_ours(seated):
    _, _, _ = seated
    child = in_child(lambda: [signal.getsignal(signal.SIGTERM), signal.getsignal(membership._WAKE)])
    assert child == str([signal.SIG_DFL, signal.SIG_DFL])
    with pytest.raises(TorchrunPreempted):
        signal.raise_signal(signal.SIGTERM)


def test_a_handler_that_the_step_has_set_is_its_own_in_a_child_and_after_the_end(seated):
    seat, _, _ = seated
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert in_child(lambda: signal.getsignal(signal.SIGTERM)) == str(signal.SIG_IGN)
    seat.leave()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_a_forked_child_can_not_launch_finish_or_leave(seated):
    seat, link, _ = seated
    assert "was forked from the task" in in_child(seat.begin_launch)
    for deed in (seat.finish, seat.leave, lambda: seat.leave(ValueError("x")), lambda: seat.await_others(lambda: [2])):
        assert in_child(deed) == "None"
    assert link.sent == []
    assert seat.begin_launch() == 0
    seat.end_launch(None)


# --- waking ---------------------------------------------------------------------------------------


def work(limit_s=10.0):
    """Do what a step does that blocks in no call."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.mark.parametrize("way", [signal.SIG_DFL, signal.SIG_IGN])
def test_a_step_that_resets_sigterm_is_woken_all_the_same(way, seated):
    seat, _, _ = seated
    signal.signal(signal.SIGTERM, way)
    timer = threading.Timer(0.1, seat.deliver, [abort()])
    begun = time.monotonic()
    timer.start()
    try:
        with pytest.raises(LaunchFailed, match="Rank 3 failed"):
            sleep_through()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert time.monotonic() - begun < 8  # in the middle of the blocking call
    timer.join()


def test_a_step_that_blocks_all_signals_is_woken_between_its_calls_and_lives_on(seated):
    seat, _, _ = seated
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        timer = threading.Timer(0.1, seat.deliver, [abort()])
        timer.start()
        with pytest.raises(LaunchFailed, match="Rank 3 failed"):
            work()
        timer.join()
        assert membership._WAKE in signal.sigpending()
        seat.leave()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)  # what is pending would kill now


def test_news_is_raised_once(seated):
    seat, _, _ = seated
    with pytest.raises(LaunchFailed):
        seat.deliver(abort())
    work(0.2)  # further wakes would rise here


def test_the_news_of_a_gang_reach_its_step_inside_of_a_seat_of_one_node(seated):
    """`TorchrunSingleNodeMultiGPU` in a gang's step."""
    seat, _, _ = seated
    link = Link()
    link.seat = inner = Membership(0, 1, print)
    inner.sit_down(link, link.close)
    inner.deliver({"type": "welcome"})
    inner.begin_launch()
    with pytest.raises(LaunchFailed, match="Rank 3 failed"):
        seat.deliver(abort())
    assert inner.inbox.empty()  # nobody was preempted
    signal.raise_signal(signal.SIGTERM)
    assert inner.inbox.get(timeout=1) == {"type": "terminated"}
    inner.end_launch(None, failing=True)
    inner.leave()


def test_a_notice_reaches_the_launch_that_runs(seated):
    seat, link, _ = seated
    seat.begin_launch()
    seat.notice("a spot notice says so")
    assert seat.inbox.get(timeout=1) == {"type": "terminated"}
    assert "was preempted: a spot notice says so" in str(seat.terminated())
    seat.deliver(
        {"type": "replaced", "why": "another task has come"}
    )  # as true, but the second order would end it at once
    assert seat.inbox.empty()
    seat.end_launch(None, failing=True)
    with pytest.raises(TorchrunPreempted, match="was preempted: its machine goes"):
        seat.deliver({"type": "replaced", "why": "its machine goes"})
    assert link.leaves()[0]["cause"]["exception"] == "its machine goes"
