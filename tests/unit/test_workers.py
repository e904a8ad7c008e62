"""How the guardian looks for workers, and for processes that somebody has frozen."""

import os
import signal
import subprocess

import pytest
from unit_helpers import eventually

from metaflow_extensions.torchrun.plugins.torchrun.machine import processes
from metaflow_extensions.torchrun.plugins.torchrun.machine.frozen import FrozenWatch


@pytest.fixture
def frozen():
    with subprocess.Popen(["sleep", "600"]) as process:
        process.send_signal(signal.SIGSTOP)
        await_state(process.pid, "T")
        yield process
        process.kill()


def await_state(pid, *states):
    eventually(lambda: processes.find(pid).state in states, f"state {states}")


def looks(watch, pid, moments):
    return [watch.overdue([pid, os.getpid()], moment) for moment in moments]


def test_who_is_frozen_for_too_long_is_told_once(frozen):
    looked = looks(FrozenWatch(1.2), frozen.pid, [100.0, 100.5, 101.0, 101.1, 101.5, 102.0, 104.0])
    assert looked == [[], [], [], [], [frozen.pid], [], []]


def test_who_is_continued_in_time_is_nothing_to_tell(frozen):
    watch = FrozenWatch(2.0)
    assert looks(watch, frozen.pid, [100.0, 101.0]) == [[], []]
    frozen.send_signal(signal.SIGCONT)
    await_state(frozen.pid, "S", "R")
    assert looks(watch, frozen.pid, [101.5]) == [[]]
    frozen.send_signal(signal.SIGSTOP)
    await_state(frozen.pid, "T")
    assert looks(watch, frozen.pid, [102.0, 103.0, 104.0]) == [[], [], [frozen.pid]]


def test_one_that_was_frozen_itself_begins_anew(frozen):
    """As part of a container that was paused."""
    assert looks(FrozenWatch(2.0), frozen.pid, [100.0, 110.0, 111.0, 112.0]) == [[], [], [], [frozen.pid]]
