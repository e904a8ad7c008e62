"""What becomes of the other nodes' tasks when that of the control node ends on a local run."""

import signal
import subprocess
import sys

from unit_helpers import is_running

from metaflow_extensions.torchrun.plugins.torchrun.task import task_gang


def test_a_node_that_writes_its_last_lines_has_its_time_after_one_that_is_lost(monkeypatch):
    """The lost one may hold the turn until it is killed."""
    sleep = [sys.executable, "-I", "-S", "-c", "import sys, time; time.sleep(float(sys.argv[1]))"]
    lost, writing = (subprocess.Popen([*sleep, seconds]) for seconds in ("600", "2"))
    monkeypatch.setattr(task_gang, "is_pipe", lambda fd: is_running(writing.pid))
    monkeypatch.setattr(task_gang, "unread_bytes", lambda fd: 1)
    task_gang.stop_local_nodes([lost, writing], 0.5, {1})
    assert (lost.wait(), writing.wait()) == (-signal.SIGKILL, 0)
