"""A node in its gang: the news reaches its code wherever it is, and it leaves once."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from limits import limit_s
from unit_helpers import HANG_S

from metaflow_extensions.torchrun.plugins.torchrun.errors import GangError, LaunchFailed, TorchrunPreempted
from metaflow_extensions.torchrun.plugins.torchrun.gang import member as member_module
from metaflow_extensions.torchrun.plugins.torchrun.gang import wakeup
from metaflow_extensions.torchrun.plugins.torchrun.gang.cause import Cause
from metaflow_extensions.torchrun.plugins.torchrun.gang.member import Member
from metaflow_extensions.torchrun.plugins.torchrun.gang.protocol import (
    Abort,
    Ack,
    Alone,
    Bye,
    Done,
    Leave,
    Replaced,
    Welcome,
)
from metaflow_extensions.torchrun.plugins.torchrun.machine.wake import SIGNAL

POOL = Path(__file__).parent / "programs" / "pool.py"
CRASH = LaunchFailed("Rank 3 failed", {"kind": "exception", "node": 1, "host": "host-1"})
ABORT = Abort(CRASH)


class Link:
    """A control node that acknowledges a leave, unless it is told not to."""

    own_address, is_gone = None, False

    def __init__(self, member):
        self.member, self.sent, self.closed, self.answers = member, [], 0, True
        self.interruptions = []  # what the supervisor was told of them

    def send(self, message):
        self.sent.append(message)
        if isinstance(message, Leave) and self.answers:
            self.member.deliver(Ack())

    def end_spares(self):
        pass

    def interrupt(self, why):
        self.interruptions.append(why)

    time_out = interrupt

    def look(self):
        return True

    def show(self, event):
        self.member.emit(event)
        return True

    def signal_end(self, is_on):
        pass

    def call_if_missed(self, call):
        pass

    def wait(self, is_over, timeout_s):
        deadline = time.monotonic() + timeout_s
        while not is_over() and time.monotonic() < deadline:
            time.sleep(0.002)
        return is_over()

    def close(self):
        self.closed += 1

    def leaves(self):
        return [message for message in self.sent if isinstance(message, Leave)]


def attach(node=1, num_nodes=3, emit=print):
    """Return a member that the control node has not taken in yet, and its link."""
    member = Member(node, num_nodes, emit)
    link = Link(member)
    member.attach(link)
    return member, link


@pytest.fixture
def join():
    """Return a function that returns a member and its link; the signals are given back in any case."""
    members = []

    def join(*args):
        member, link = attach(*args)
        members.append(member)
        member.deliver(Welcome())
        return member, link

    yield join
    for member in members[::-1]:
        member.leave()
    assert signal.signal(signal.SIGTERM, signal.SIG_DFL) is signal.SIG_DFL


def work(limit_s):
    """Do what a step does that blocks in no call."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        time.sleep(0.01)


def blocked(limit_s):
    time.sleep(limit_s)  # a step's own blocking call
    pytest.fail("was not interrupted")


def seconds_of(function, *args, **options):
    begun = time.monotonic()
    function(*args, **options)
    return time.monotonic() - begun


def interrupted(member, what=blocked):
    """Have bad news come while the main thread is in `what`, which raises it."""
    timer = threading.Timer(0.1, member.deliver, [ABORT])
    timer.start()
    with pytest.raises(LaunchFailed, match="Rank 3 failed"):
        what(limit_s(HANG_S))
    timer.join()
    assert not member.has_news()  # it is raised once


def test_an_order_to_end_is_raised_although_the_link_is_being_read_or_is_stuck(join):
    _, link = join()
    link.look = lambda: False
    threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGTERM]).start()
    with pytest.raises(TorchrunPreempted):
        blocked(limit_s(HANG_S))
    assert isinstance(link.sent[-1], Leave)


def test_a_step_that_could_not_be_interrupted_hears_at_its_end_why_the_gang_has_failed(join):
    """As where its code has blocked all signals; what the supervisor has said is read then."""
    member, link = join()
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        link.look = lambda: member.deliver(ABORT)
        with pytest.raises(LaunchFailed, match="Rank 3 failed"):
            member.finish()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, ())


def test_a_handler_that_raises_while_the_link_is_being_read_does_not_hide_what_it_says(join):
    member, link = join()
    looks = []

    def look():
        looks.append(True)
        if len(looks) == 1:
            raise TimeoutError  # as an alarm of the step's own may, which the step catches
        member.deliver(ABORT)

    link.look = look

    def step():
        try:
            signal.raise_signal(SIGNAL)
            time.sleep(1)
        except TimeoutError:
            blocked(limit_s(HANG_S))

    with pytest.raises(LaunchFailed):
        step()


# --- leaving -------------------------------------------------------------------------------------


def test_a_member_stays_one_until_its_results_are_stored(join):
    member, link = join()
    member.finish()
    assert (link.sent, link.closed) == ([Done()], 0)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with pytest.raises(GangError, match="after the gang had ended"):
        member.begin_launch()
    member.deliver(ABORT)  # too late for this node's code, which has ended
    member.leave()
    member.leave(ValueError("late"))
    assert (link.sent[1:], link.closed) == ([Leave(failed=False)], 1)


def test_the_control_node_waits_for_the_others_and_says_so(join, monkeypatch):
    monkeypatch.setattr(member_module, "QUIET_S", 0.05)
    monkeypatch.setattr(member_module, "REMIND_S", 0.05)
    events, left = [], [[2], [1, 2]]
    member, _ = join(0, 3, events.append)
    member.deliver(Alone())  # too early: its own step has not ended
    member.finish()

    def remaining():
        nodes = left.pop()
        if not left:
            member.deliver(Alone())
        return nodes

    member.await_others(remaining)
    waits = [event.text for event in events]
    assert [re.search(r"until (nodes? [\d, ]+) ended", text)[1] for text in waits] == ["nodes 1, 2", "node 2"]


@pytest.mark.parametrize(
    "news", [(ABORT,), (ABORT, Alone()), (Alone(), ABORT)], ids=["one fails", "the last one", "it has left"]
)
def test_a_node_that_fails_ends_the_wait_for_it(join, news):
    member, _ = join(0)
    member.finish()
    handler = signal.signal(wakeup.SIGNAL, signal.SIG_IGN)  # the wait itself has to end
    try:
        for message in news:
            member.deliver(message)
        assert member.has_news()  # Metaflow's own code may run, which waits for the processes of local nodes
        with pytest.raises(LaunchFailed, match="Rank 3 failed"):
            member.await_others(list)
    finally:
        signal.signal(wakeup.SIGNAL, handler)


def test_a_control_node_whose_step_has_swallowed_the_gangs_error_fails_at_its_end(join):
    member, _ = join(0)
    with pytest.raises(LaunchFailed):
        member.deliver(ABORT)
    with pytest.raises(LaunchFailed, match="Rank 3 failed"):
        member.finish()


def chained(cause=None, context=None):
    error = ValueError("wrapped")
    error.__cause__, error.__context__ = cause, context
    return error


OTHER = LaunchFailed("another", {**CRASH.cause, "node": 2})


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (CRASH, None),
        (chained(cause=CRASH), None),
        (chained(context=CRASH), None),
        (KeyError("größe"), ("step", 1, "KeyError: 'größe'")),
        (GangError("run was called"), ("call", 1, "GangError: run was called")),
        (OTHER, ("exception", 2, None)),  # passed on as it is
    ],
)
def test_the_gang_is_told_of_all_but_its_own_verdict(error, told, join):
    member, link = join()
    member.begin_launch()
    member.end_launch(CRASH)
    member.leave(error)
    (leave,) = link.leaves()
    assert leave.failed
    assert (leave.cause and (leave.cause.kind, leave.cause.node, leave.cause.exception)) == told
    if told is not None and told[0] != "exception":
        assert leave.cause.host == member.host
        assert told[2] in leave.cause.detail


def test_the_receipt_is_awaited_but_not_for_ever_and_the_link_is_closed_whatever_happens(join, monkeypatch):
    monkeypatch.setattr(member_module, "_ACK_WAIT_S", 0.1)
    (member, link), (other, broken) = join(), join()
    broken.send = lambda message: 1 / 0
    with pytest.raises(ZeroDivisionError):
        other.leave()
    link.answers = False
    assert seconds_of(member.leave, OSError("x")) >= 0.1
    assert (link.closed, broken.closed) == (1, 1)


@pytest.mark.parametrize("why", [None, OSError("x"), "SIGTERM"])
def test_a_node_that_was_never_taken_in_waits_for_nothing(why):
    member, link = attach()
    link.answers = False
    if why == "SIGTERM":
        with pytest.raises(TorchrunPreempted) as caught:
            signal.raise_signal(signal.SIGTERM)
        why = caught.value
    assert seconds_of(member.leave, why) < member_module._ACK_WAIT_S
    assert seconds_of(Member(1, 2, print).leave, why) < member_module._ACK_WAIT_S  # nor does one without a channel
    assert link.closed == 1


def test_after_an_error_alone_the_control_nodes_end_is_awaited(join):
    (member, link), (other, _) = join(), join()
    other.leave(None, hold_s=3600)
    timer = threading.Timer(0.2, member.lose_control, ["closed"])
    timer.start()
    assert seconds_of(member.leave, ValueError("x"), hold_s=3600) > 0.1
    assert link.closed == 1
    timer.join()


# --- launches ------------------------------------------------------------------------------------


def test_launches_are_numbered_and_hear_of_no_interruption_of_an_earlier_one(join):
    member, link = join()
    for number in range(3):
        assert member.begin_launch() == number
        member.time_out(f"too long {number}")
        assert len(link.interruptions) == number, "its supervisor does not know of this launch yet"
        member.has_begun()
        assert link.interruptions == [f"too long {each}" for each in range(number + 1)]
        member.end_launch(None, handled=1)


def test_in_a_broken_gang_no_launch_begins(join):
    member, _ = join()
    member.begin_launch()
    member.deliver(ABORT)  # the supervisor hears so, too, and ends the launch
    member.deliver(Abort(LaunchFailed("another")))  # only the first bad news counts
    assert member.broken is CRASH
    member.end_launch(member.broken, failing=True, handled=0)
    with pytest.raises(LaunchFailed, match="Rank 3 failed"):
        member.begin_launch()


def test_a_launch_after_the_control_node_has_left_says_what_is_wrong(join):
    member, _ = join()
    member.deliver(Bye())
    with pytest.raises(GangError, match="same number of times"):
        member.begin_launch()
    member.lose_control("closed")
    assert member.broken is None  # that it vanishes after its goodbye is no news


def test_a_control_node_that_vanishes_breaks_the_gang_and_is_told_why_this_node_leaves(join):
    """It may hear this node well, and would not know."""
    member, link = join()
    member.begin_launch()
    member.lose_control("nothing arrived from it for 5 s")
    assert "nothing arrived from it for 5 s" in str(member.broken)
    assert not member.gang_knows(member.broken)
    member.end_launch(None, failing=True)
    member.leave(member.broken)
    (leave,) = link.leaves()
    assert (leave.cause.kind, leave.cause.node) == ("lost", 1)
    assert "lost the connection to the control node" in leave.cause.exception


def test_only_one_thread_at_a_time_is_in_a_launch(join):
    member, _ = join()
    assert member.begin_launch() == 0
    with ThreadPoolExecutor() as pool, pytest.raises(GangError, match=r"launch 0 still ran .* in another thread"):
        pool.submit(member.begin_launch).result()
    member.end_launch(None)
    assert member.begin_launch() == 1
    member.end_launch(None)


def test_a_step_that_ends_before_a_launch_in_another_thread_is_an_error(join):
    member, link = join()
    member.begin_launch()
    with pytest.raises(GangError, match=r"launch 0 still ran .* in another thread") as caught:
        member.finish()
    member.leave(caught.value)
    assert member.has_left  # the launch sees so, and ends, too
    member.end_launch(None, failing=True)
    assert link.leaves()[0].cause.kind == "call"


# --- no news is lost ------------------------------------------------------------------------------

NEWS = {
    "abort": lambda member: member.deliver(ABORT),
    "control lost": lambda member: member.lose_control("its task was killed"),
    "SIGTERM": lambda member: signal.raise_signal(signal.SIGTERM),
    "notice": lambda member: member.notice("a spot notice says so"),
    "@timeout": lambda member: member.time_out("longer than the step's @timeout allows"),
}
TRACED = {member_module.__file__, wakeup.__file__}


def with_news_at(moment, function, news):
    """Call a function, with news in the middle of it: before its `moment`th line; return how many lines it ran."""
    lines = 0

    def trace(frame, event, _):
        nonlocal lines
        if frame.f_code.co_filename not in TRACED:
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


def is_told(what, kind, moment):
    """Tell whether the step hears of news that comes at a moment of what it does; None if that is over before."""
    member, link = attach(0)
    member.deliver(Welcome())
    if what in ("end_launch", "SIGTERM"):
        member.begin_launch()
    steps = {
        "begin_launch": member.begin_launch,
        "end_launch": lambda: member.end_launch(None, handled=0),
        "finish": member.finish,
        "SIGTERM": lambda: signal.raise_signal(signal.SIGTERM),
    }
    try:
        if with_news_at(moment, steps[what], lambda: NEWS[kind](member)) < moment:
            return None
        if what in ("begin_launch", "SIGTERM"):
            member.has_begun()
        if what == "begin_launch" and (link.interruptions or member.broken is not None):
            return True  # of a broken gang the supervisor hears by itself
        if what == "SIGTERM":  # which the launch hears of, too
            of_gang = kind in ("abort", "control lost") and member.broken is not None
            return len(link.interruptions) == (1 if of_gang else 2) or kind == "notice"
        work(0.5)  # the wake may still be on its way
        return False
    except TorchrunPreempted:
        return link.leaves() != []
    except LaunchFailed:
        return True
    finally:
        member.leave()


def is_told_apart(*arguments):
    """Do it in a generator, which has an exception state of its own.

    Where a trace function raises in an exception handler, CPython 3.11 goes on with that handler's exception as the one
    being handled; it would be the context of whatever later tests raise.
    """
    yield is_told(*arguments)


@pytest.mark.parametrize("kind", NEWS)
@pytest.mark.parametrize("what", ["begin_launch", "end_launch", "finish", "SIGTERM"])
def test_news_at_any_moment_is_never_lost(what, kind):
    """It is raised, or the launch's supervisor hears of it; `finish` is the control node's."""
    moment = 1
    while (told := next(is_told_apart(what, kind, moment))) is not None:
        assert told, f"lost before line {moment}"
        moment += 1
    assert moment > 8


# --- SIGTERM and notices --------------------------------------------------------------------------


def test_sigterm_outside_of_a_launch_tells_the_gang_at_once_and_ends_the_step(join):
    member, link = join()
    with pytest.raises(TorchrunPreempted, match="got SIGTERM") as caught:
        signal.raise_signal(signal.SIGTERM)
    assert caught.value.cause["kind"] == "terminated"
    told = [Leave(Cause.from_dict(caught.value.cause), failed=True)]
    assert (link.sent, link.closed) == (told, 0)
    # The step's code has the error and may take its time; a second SIGTERM would end it, as by default.
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    member.deliver(ABORT)
    member.leave(caught.value, hold_s=20)
    assert (link.sent, link.closed) == (told, 1)


@pytest.mark.parametrize("call", [Member.begin_launch, Member.finish])
def test_an_order_to_end_that_the_step_swallows_is_raised_again(call, join):
    member, link = join()
    timer = threading.Timer(0.1, member.notice, ["the machine goes away"])
    timer.start()
    with pytest.raises(TorchrunPreempted, match="the machine goes away"):
        blocked(limit_s(HANG_S))
    timer.join()
    with pytest.raises(TorchrunPreempted, match="the machine goes away") as caught:
        call(member)
    member.leave(caught.value)
    assert len(link.sent) == 1


def test_a_notice_reaches_the_launch_that_runs(join):
    member, link = join()
    member.begin_launch()
    member.has_begun()
    member.notice("a spot notice says so")
    assert link.interruptions == ["a spot notice says so"]
    assert "was preempted: a spot notice says so" in str(member.terminated())
    assert "With Metaflow's @retry a new gang starts" in str(member.terminated())
    member.may_go_on = True
    assert str(member.terminated()).endswith("The other nodes go on without it if they can.")
    member.deliver(Replaced(why="another task has come"))  # as true, but the second order would end it at once
    assert len(link.interruptions) == 1
    member.end_launch(None, failing=True)
    with pytest.raises(TorchrunPreempted, match="was preempted: its machine goes"):
        member.deliver(Replaced(why="its machine goes"))
    assert link.leaves()[0].cause.exception == "its machine goes"


def test_the_previous_handler_is_back_after_leaving(join):
    def mine(number, frame):
        raise AssertionError

    before = signal.signal(signal.SIGTERM, mine)
    try:
        member, _ = attach()
        assert signal.getsignal(signal.SIGTERM) is not mine
        member.leave()
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


def test_joining_in_another_thread_leaves_signals_alone():
    with ThreadPoolExecutor() as pool:
        member, _ = pool.submit(attach).result()
        member.deliver(ABORT)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        member.leave()


# --- waking ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [None, signal.SIG_DFL, signal.SIG_IGN])
def test_bad_news_interrupts_a_blocking_call_whatever_the_step_does_with_sigterm(way, join):
    member, _ = join()
    if way is not None:
        signal.signal(signal.SIGTERM, way)
    try:
        interrupted(member)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_a_step_that_blocks_all_signals_is_woken_between_its_calls_and_lives_on(join):
    member, _ = join()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        interrupted(member, work)
        assert wakeup.SIGNAL in signal.sigpending()
        member.leave()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)  # what is pending would kill now


def test_bad_news_after_a_failed_launch_does_not_interrupt_its_handling(join):
    member, _ = join()
    member.begin_launch()
    member.end_launch(CRASH)
    member.deliver(ABORT)
    assert member.broken is not None
    assert not member.has_news()


def test_the_news_of_a_gang_reaches_its_step_inside_of_a_gang_of_one_node(join):
    """`TorchrunSingleNodeMultiGPU` in a gang's step."""
    member, _ = join()
    inner, link = join(0, 1)
    inner.begin_launch()
    inner.has_begun()
    with pytest.raises(LaunchFailed, match="Rank 3 failed"):
        member.deliver(ABORT)
    assert link.interruptions == []  # nobody was preempted
    for tell in (lambda: signal.raise_signal(signal.SIGTERM), lambda: member.notice("its machine goes")):
        tell()
        assert len(link.interruptions) == 1
        link.interruptions.clear()
        inner.end_launch(None, failing=True)
        inner.begin_launch()
        inner.has_begun()
    inner.end_launch(None, failing=True)


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
    done = subprocess.run([sys.executable, POOL, where], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    said = json.loads(done.stdout)
    assert said["sent"] == []
    assert said["longest_s"] < 10


def test_a_child_that_is_told_to_end_in_the_moment_of_the_fork_ends(join):
    join()
    pid = os.fork()
    if pid == 0:
        time.sleep(20)
        os._exit(0)
    os.kill(pid, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM


def test_a_forked_child_has_the_former_handlers_and_the_task_has_ours(join):
    join()
    child = in_child(lambda: [signal.getsignal(signal.SIGTERM), signal.getsignal(wakeup.SIGNAL)])
    assert child == str([signal.SIG_DFL, signal.SIG_DFL])
    with pytest.raises(TorchrunPreempted):
        signal.raise_signal(signal.SIGTERM)


def test_a_handler_that_the_step_has_set_is_its_own_in_a_child_and_after_the_end(join):
    member, _ = join()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert in_child(lambda: signal.getsignal(signal.SIGTERM)) == str(signal.SIG_IGN)
    member.leave()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_a_forked_child_can_not_launch_finish_or_leave(join):
    member, link = join()
    calls = (
        member.finish,
        member.leave,
        lambda: member.leave(ValueError("x")),
        lambda: member.await_others(lambda: [2]),
        lambda: signal.raise_signal(wakeup.SIGNAL),
    )
    member.record_sigterm()
    assert "was forked from the task" in in_child(member.begin_launch)
    assert [in_child(call) for call in calls] == ["None"] * len(calls)
    with pytest.raises(TorchrunPreempted):
        member.raise_news()
    assert link.leaves()
