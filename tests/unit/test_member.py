"""A node in its gang: the news reaches its code wherever it is, and it leaves once."""

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from fake_link import FakeLink
from limits import limit_s
from unit_helpers import HANG_S

from metaflow_extensions.torchrun.plugins.torchrun.errors import (
    GangError,
    LaunchFailed,
    TorchrunPreempted,
)
from metaflow_extensions.torchrun.plugins.torchrun.gang.cause import Cause, FailureText, failed
from metaflow_extensions.torchrun.plugins.torchrun.gang.messages import (
    Abort,
    Answer,
    Farewell,
    Leave,
    to_wire,
)
from metaflow_extensions.torchrun.plugins.torchrun.task import link as link_module
from metaflow_extensions.torchrun.plugins.torchrun.task import member as member_module
from metaflow_extensions.torchrun.plugins.torchrun.task import orders
from metaflow_extensions.torchrun.plugins.torchrun.task.member import Member

POOL = Path(__file__).parent / "programs" / "pool.py"
CRASH = failed(LaunchFailed, FailureText(Cause("exception", 1, "host-1"), instead="Rank 3 failed"))
DONE = Leave("done")
ABORT = "deliver", to_wire(Abort(CRASH))


class Link(FakeLink):
    """A link to a supervisor whose control node acknowledges a leave, unless it is told not to."""

    def __init__(self):
        super().__init__()
        self.said, self.answers, self.interruptions = [], True, []

    def send(self, *frame):
        super().send(*frame)
        what, *rest = frame
        if what == "interrupt":
            self.interruptions += rest
        while not self.messages.empty():
            self.said.append(self.messages.get())
            if self.leaves()[-1:] == self.said[-1:] and self.answers:
                self.deliver(Farewell("received"))

    def leaves(self):
        return [message for message in self.said if isinstance(message, Leave) and message != DONE]


def attach(node=1, num_nodes=3):
    """Return a member that the control node has not taken in yet, and its link."""
    link = Link()
    return Member(node, num_nodes, link), link


@pytest.fixture
def join():
    """Return a function that returns a member and its link; the signals are given back in any case."""
    members = []
    signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs the tests in the background ignores it

    def join(*args):
        member, link = attach(*args)
        members.append(member)
        member.deliver(Answer())
        return member, link

    yield join
    for member in members[::-1]:
        member.leave()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# --- leaving -------------------------------------------------------------------------------------


def chained(cause=None, context=None):
    error = ValueError("wrapped")
    error.__cause__, error.__context__ = cause, context
    return error


OTHER = failed(LaunchFailed, FailureText(Cause("exception", 2, "host-1"), instead="another"))


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
    assert leave.how == "failed"
    assert (leave.cause and (leave.cause.kind, leave.cause.node, leave.cause.exception)) == told
    if told is not None and told[0] != "exception":
        assert leave.cause.host == member.host
        assert (told[2] in leave.cause.detail) is (told[0] == "step")  # of a call, the text says all


def test_where_ctrl_c_is_ignored_sigterm_stands_for_it(join):
    """As in the background of a script: what submits a run then sends its tasks SIGTERM."""
    member, link = join()
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    signal.signal(signal.SIGINT, handler)
    member.leave(KeyboardInterrupt())
    assert [leave.cause.kind for leave in link.leaves()] == ["interrupted"]


# --- no news is lost ------------------------------------------------------------------------------

NEWS = {
    "abort": lambda link: link.comes(*ABORT),
    "control lost": lambda link: link.comes("lost", "its task was killed"),
    "SIGTERM": lambda link: signal.raise_signal(signal.SIGTERM),
    "notice": lambda link: link.comes("must_end", "a spot notice says so"),
}
TRACED = {member_module.__file__, orders.__file__, link_module.__file__}


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
    member.deliver(Answer())
    if what == "end_launch":
        member.begin_launch()
    steps = {
        "begin_launch": member.begin_launch,
        "end_launch": lambda: member.end_launch(None, handled=0),
        "finish": member.finish,
    }
    try:
        if with_news_at(moment, steps[what], lambda: NEWS[kind](link)) < moment:
            return None
        if what == "begin_launch":
            # Of a broken gang the supervisor hears by itself, and the wait of the launch reads.
            return bool(link.interruptions or member.broken is not None or link._come)
        link.read()
        member.raise_news()  # as the wait that comes next, or the next call
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
@pytest.mark.parametrize("what", ["begin_launch", "end_launch", "finish"])
def test_news_at_any_moment_is_never_lost(what, kind):
    """It is raised, or the launch's supervisor hears of it; `finish` is the control node's."""
    moment = 1
    while (told := next(is_told_apart(what, kind, moment))) is not None:
        assert told, f"lost before line {moment}"
        moment += 1
    assert moment > 8


def test_a_failure_in_the_log_has_it_saved_and_other_news_has_not(join):
    member, link = join()
    saved = []
    member.save_log = lambda: saved.append(True)
    for kind, count in (("note", 0), ("failed", 1), ("note", 1)):
        link.says("event", kind, "größe")
        link.wait(lambda: True, 0.0)
        assert len(saved) == count


# --- SIGTERM and notices --------------------------------------------------------------------------


@pytest.mark.parametrize("call", [Member.begin_launch, Member.finish])
def test_an_order_to_end_that_the_step_swallows_is_raised_again(call, join):
    member, link = join()
    timer = threading.Timer(0.1, link.comes, ("must_end", "the machine goes away"))
    timer.start()
    with pytest.raises(TorchrunPreempted, match="the machine goes away"):
        time.sleep(limit_s(HANG_S))  # a step's own blocking call
    timer.join()
    with pytest.raises(TorchrunPreempted, match="the machine goes away") as caught:
        call(member)
    member.leave(caught.value)
    assert len(link.leaves()) == 1


def test_bad_news_after_a_failed_launch_does_not_interrupt_its_handling(join):
    member, link = join()
    member.begin_launch()
    member.end_launch(CRASH)
    link.comes(*ABORT)
    assert member.broken is not None


# --- what is the task's, and not its children's ---------------------------------------------------


@pytest.mark.parametrize("where", ["main", "thread"])
def test_pools_of_the_steps_end_at_once_and_tell_nobody(where):
    """Some of their processes get SIGTERM in the moment in which they are forked."""
    done = subprocess.run([sys.executable, POOL, where], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    said = json.loads(done.stdout)
    assert said["sent"] == []
    assert said["longest_s"] < 10
