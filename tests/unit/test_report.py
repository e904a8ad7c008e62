"""What a node's terminal shows of the error that ends its task."""

import traceback

import pytest
from metaflow.exception import MetaflowException

from metaflow_extensions.torchrun.plugins.torchrun.errors import EntrypointError, LaunchFailed
from metaflow_extensions.torchrun.plugins.torchrun.gang.cause import Cause
from metaflow_extensions.torchrun.plugins.torchrun.gang.failures import of_launch
from metaflow_extensions.torchrun.plugins.torchrun.gang.launch import Launch
from metaflow_extensions.torchrun.plugins.torchrun.run_arguments import Runner
from metaflow_extensions.torchrun.plugins.torchrun.task import report as module
from metaflow_extensions.torchrun.plugins.torchrun.tracebacks import cut_frames_around, user_traceback

TEXT = "ValueError: expected 2*3*4 values 🙂\n  *second* line"
TRACE = f"Traceback (most recent call last):\n  File 'train.py', line 1\n{TEXT}"
RAISED = Cause("exception", 1, "b", 3, 1, 1, TEXT, TRACE)


def runner(launched):
    """Return an object whose `run` calls this."""
    return type("Ours", (Runner,), {"launched": lambda self, given: launched()})()


def verdict(cause=RAISED):
    return of_launch(Launch(0), cause)


def report(error, node, shared=True, known=True, live=True):
    return module.report(error, node, shared, known, lambda cause: live)


def code_in(filename, body, **names):
    """Return a function of the file `filename`."""
    exec(compile(f"def function():\n    {body}\n", filename, "exec"), names)
    return names["function"]


def call(filename, inner):
    """Return a function of the file `filename` that calls `inner`."""
    return code_in(filename, "inner()", inner=inner)


def raised(function):
    with pytest.raises(Exception) as info:  # noqa: PT011 - whatever it raises
        function()
    return info.value.with_traceback(info.value.__traceback__.tb_next)  # without the frame here


# --- who tells what -------------------------------------------------------------------------------


LONG = Cause("exception", 1, "b", 3, 1, 1, TEXT, f"{TRACE}\n" * 1000)


@pytest.mark.parametrize(
    ("cause", "where", "is_whole"),
    [
        pytest.param(LONG, {"node": 1}, False, id="is above, and long"),
        pytest.param(RAISED, {"node": 1, "live": False}, True, id="written unseen"),
        pytest.param(RAISED, {"node": 0, "shared": False, "live": False}, True, id="another node's log"),
        pytest.param(RAISED, {"node": 1, "shared": False}, False, id="its own log"),
    ],
)
def test_the_traceback_is_in_the_report_unless_it_stands_above(cause, where, is_whole):
    assert ("File 'train.py', line 1" in report(verdict(cause), **where)) is is_whole


@pytest.mark.parametrize(
    ("kind", "who"),
    [
        ("lost", "Node 1 (host b) failed: why. "),
        ("unreachable", "Node 1 (host b) why. "),
        ("timeout", ""),
        ("hang", ""),
    ],
)
def test_the_control_node_tells_what_no_other_can(kind, who):
    error = verdict(Cause(kind, 1, "b", exception="why"))
    assert "why" in report(error, 0)
    assert report(error, 2) == f"{error.headline}: {who}Node 0 shows the whole error."


def test_what_every_node_says_itself_and_an_interruption_are_not_repeated():
    assert report(verdict(Cause("interrupted", 0, "b", exception="KeyboardInterrupt")), 1) == ""
    called = verdict(Cause("call", 0, "b", exception="EntrypointError: no a.py"))
    assert report(called, 1) == "LaunchFailed: Node 0 shows the whole error."
    told = verdict(Cause("terminated", 0, "b", exception="its Metaflow task got SIGTERM"))
    assert report(told, 1) == "TorchrunPreempted: Node 0 (host b) was preempted: its Metaflow task got SIGTERM."


def test_a_node_that_hears_that_it_counts_as_lost_tells_it_itself():
    error = verdict(Cause("lost", 1, "b", exception="nothing arrived from it"))
    assert "nothing arrived from it.\n" in report(error, 1)
    killed = verdict(Cause("lost", 0, "host", exception="its task was killed by SIGKILL"))
    assert "Launch 0 was stopped" in report(killed, 1), "the control node's own task can't print any more"


def test_an_error_that_the_gang_does_not_know_is_told_where_it_is_and_metaflows_own_are_left_to_it():
    assert report(MetaflowException("Step *train*"), 0) is None
    assert report(EntrypointError("no a*b.py"), 1, known=False) == "    EntrypointError: no a*b.py"


def test_what_a_function_raised_is_shown_from_the_users_line_on_without_the_verdict_before_it():
    hand_on = code_in(module.__file__, "raise ValueError('a*b') from verdict", verdict=verdict())
    error = raised(call("/users/flow.py", call(module.__file__, hand_on)))
    told = report(error, 1)
    assert "/users/flow.py" in told
    assert "Launch 0 was stopped on all nodes" in told
    assert "ValueError: a*b" in told
    assert TEXT not in told
    assert module.__file__ not in told
    assert report(error, 0).endswith("Node 1 shows the whole error.")
    assert "File 'train.py', line 1" in report(error, 0, shared=False, live=False)


# --- tracebacks -----------------------------------------------------------------------------------


def test_a_failed_run_shows_its_caller_one_frame_of_ours():
    """A notebook shows all frames that there are."""

    def launch(self):
        try:
            raise verdict()
        except LaunchFailed as error:
            raise ValueError("of a rank") from error

    ours = code_in(module.__file__, "launch(None)", launch=launch)
    error = raised(lambda: runner(ours).run())
    assert [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)][:1] == ["<lambda>"]
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    assert module.__file__ not in files
    assert error.__cause__.__traceback__ is None


def test_an_error_in_our_own_code_keeps_its_frames():
    error = raised(call("/users/flow.py", code_in(module.__file__, "raise LookupError")))
    assert module.__file__ in user_traceback(error)
    cut_frames_around(error)
    assert module.__file__ in user_traceback(error)
