"""What the control node says of a launch in a line."""

from metaflow_extensions.torchrun.plugins.torchrun.errors import LaunchFailed, LaunchHung
from metaflow_extensions.torchrun.plugins.torchrun.gang.cause import Cause, FailureText, failed
from metaflow_extensions.torchrun.plugins.torchrun.gang.messages import Go
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.call import Call
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.launch import end_line

GO = Go(2, 0, 29500, "gang", 0, 0)


def call_of(nproc, num_nodes):
    return Call("train.py", (), False, nproc, num_nodes, 0, "python3")


def test_the_end_says_how_long_and_how_often():
    call = call_of(2, 2)
    assert end_line(0, call, 3.14, 0, None) == "launch 0 has ended well: ranks 0-3, trained 3 s"
    assert end_line(1, call, 3600, 1, LaunchFailed("x")).endswith("has failed: ranks 0-3, trained 1 h 0 min, 1 restart")
    assert end_line(1, call_of(1, 1), 1, 2, None).endswith("rank 0, trained 1 s, 2 restarts")
    cause = Cause("exception", 1, "b", 3, 1, 1, "ValueError: no\nmore", place="train.py:7")
    failed_line = end_line(0, call, 8.0, 1, failed(LaunchFailed, FailureText(cause)))
    assert failed_line == "launch 0 has failed (trained 8 s, 1 restart): rank 3 on node 1 (host b) failed first"
    gone = failed(LaunchFailed, FailureText(Cause("terminated", 1, "b", exception="its task got SIGTERM")))
    told = "launch 0 has failed (trained 8 s): node 1 (host b) was preempted: its task got SIGTERM"
    assert end_line(0, call, 8.0, 0, gone) == told
    hung = failed(LaunchHung, FailureText(Cause("hang", 0, "a", exception="silence")))
    assert end_line(0, call, 8.0, 0, hung) == "launch 0 has failed: ranks 0-3, trained 8 s", "no rank is to blame"
