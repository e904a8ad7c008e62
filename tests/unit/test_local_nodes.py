"""What becomes of the other nodes' tasks when that of the control node ends on a local run."""

import signal
import subprocess
import sys

import pytest
from unit_helpers import is_running

from metaflow_extensions.torchrun.plugins.torchrun.gang.view import Presence
from metaflow_extensions.torchrun.plugins.torchrun.task import local_nodes
from metaflow_extensions.torchrun.plugins.torchrun.task.local_nodes import stop

SLEEP = "import time; print(flush=True); time.sleep(600)"


@pytest.fixture
def start():
    """Return a function that starts a child and waits until its program runs."""
    started = []

    def start(code=SLEEP):
        child = subprocess.Popen([sys.executable, "-I", "-S", "-c", code], stdout=subprocess.PIPE)
        started.append(child)
        child.stdout.readline()
        return child

    yield start
    for child in started:
        child.kill()
        child.wait()
        child.stdout.close()


def test_a_node_that_did_not_join_has_a_moment_and_the_others_their_time(start, monkeypatch):
    monkeypatch.setattr(local_nodes, "_SLOW_LATECOMER_S", 0.3)
    late = start()
    ending = start("import time; print(flush=True); time.sleep(0.5)")
    stop([late, ending], 3600.0, {1: Presence.ABSENT, 2: Presence.HERE})
    assert (late.wait(), ending.wait()) == (-signal.SIGKILL, 0)


def test_a_node_that_writes_its_last_lines_has_its_time_after_one_that_is_lost(start, monkeypatch):
    """The lost one may hold the turn until it is killed."""
    lost, writing = start(), start("import time; print(flush=True); time.sleep(1.5)")
    monkeypatch.setattr(local_nodes, "has_unread", lambda: is_running(writing.pid))
    stop([lost, writing], 0.5, {1: Presence.OUT, 2: Presence.GONE})
    assert (lost.wait(), writing.wait()) == (-signal.SIGKILL, 0)
