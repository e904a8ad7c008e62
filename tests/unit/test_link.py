"""A task and its supervisor, as two processes, and the link between them."""

import os
import random
import signal
import subprocess
import sys
import threading

import psutil
import pytest
from fake_link import supervisor_of
from unit_helpers import HANG_S, eventually, is_running

from metaflow_extensions.torchrun.plugins.torchrun.errors import GangError, LaunchFailed
from metaflow_extensions.torchrun.plugins.torchrun.machine.packets import PACKET_BYTES, Packets, packets
from metaflow_extensions.torchrun.plugins.torchrun.settings import DEFAULTS, parse_settings
from metaflow_extensions.torchrun.plugins.torchrun.task import join as joining

HOST = "127.0.0.1"
SETTINGS = parse_settings({**DEFAULTS, "grace_s": 1.0}, "train")


def ignore(event):
    """Write no lines."""


@pytest.fixture
def gang():
    """Return functions that make a control node and other members, which have not joined; all leave."""
    made, token = [], "a token"

    def control(num_nodes=2):
        made.append(joining.begin_gang(SETTINGS, ignore, {}, {}, num_nodes, token))
        return made[-1]

    def member(node=1):
        made.append(joining.begin_member(node, 2, SETTINGS, ignore))
        return made[-1]

    yield control, member, token
    for each in made[::-1]:
        each.leave()


def test_frames_of_any_length_arrive_whole_and_in_any_mixture():
    """A signal handler sends one in the midst of another's packets."""
    chance = random.Random(7)
    values = [["x" * chance.choice([0, 5, PACKET_BYTES, 3 * PACKET_BYTES]), number] for number in range(20)]
    left = [packets(number, value) for number, value in enumerate(values)]
    come, found = Packets(), []
    while left := [each for each in left if each]:
        value = come.add(chance.choice(left).pop(0))
        found += [] if value is None else [value]
    assert sorted(found, key=lambda value: value[1]) == values


def test_a_gang_joins_and_its_last_words_stay(gang):
    control, member = gang[0](), gang[1]()
    port = control.link.call("listen", None, HOST)
    assert member.link.call("connect", [HOST], port, gang[2], 5.0) == HOST
    assert eventually(lambda: control.link.call("states") == ["HERE", "HERE"])
    member.leave()
    control.leave()
    words = control.link.last_words
    assert words["states"] == ["GONE", "GONE"]
    assert words["view"]["events"][0]["nodes"] == [0, 1]


def test_a_supervisor_that_is_killed_is_missed_at_the_next_call_and_no_call_waits(gang):
    control = gang[0]()
    pid = supervisor_of(control.link)
    os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: not is_running(pid))
    with pytest.raises((GangError, LaunchFailed), match=rf"pid {pid}"):
        control.link.call("states")
    with pytest.raises(LaunchFailed, match=f"pid {pid}"):
        control.begin_launch()


def test_a_supervisor_is_no_child_of_its_task_and_ends_with_it(gang):
    control = gang[0]()
    pid = supervisor_of(control.link)
    assert psutil.Process().children(recursive=True) == []
    between = psutil.Process(pid).parent()
    control.leave()
    assert not is_running(pid)
    assert not is_running(between.pid)


def test_a_fork_of_the_task_says_and_hears_nothing(gang):
    control = gang[0]()
    pid = os.fork()
    if pid == 0:
        try:
            control.link.send("call", 99, "close", [0.0, False, False])
            control.leave()
            control.begin_launch()
        except GangError as error:
            os._exit(3 if "was forked from the task" in str(error) else 4)
        os._exit(5)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    assert control.link.call("states")[0] == "HERE"


def test_another_thread_may_wait_while_the_steps_code_runs_and_leaves_when_that_ends(gang):
    control = gang[0](1)
    told = threading.Event()
    thread = threading.Thread(target=lambda: control.link.wait(lambda: control.is_leaving, HANG_S) and told.set())
    thread.start()
    assert eventually(lambda: control.link.waiter == thread.ident)
    control.leave()
    assert told.wait(HANG_S)


TASK = f"""
import os, signal, sys
sys.path[:0] = {sys.path!r}
import metaflow
from metaflow_extensions.torchrun.plugins.torchrun.settings import DEFAULTS, parse_settings
from metaflow_extensions.torchrun.plugins.torchrun.task import join as joining
settings = parse_settings({{**DEFAULTS, "grace_s": 1.0}}, "train")
member = joining.begin_member(1, 2, settings, list)
member.link.call("connect", ["127.0.0.1"], int(sys.argv[1]), sys.argv[2], 5.0)
"""


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
        ("os._exit(3)", "code 3"),
        ("sys.exit('x')", "code 1"),
    ],
)
def test_the_end_of_a_task_is_told_with_its_signal_or_code(how, said, gang):
    control = gang[0]()
    port = control.link.call("listen", None, HOST)
    with pytest.raises(LaunchFailed, match=said):  # noqa: PT012 - the news may come at once
        subprocess.run([sys.executable, "-c", TASK + how, str(port), gang[2]], stderr=subprocess.PIPE, check=False)
        control.link.wait(bool, HANG_S)


def test_a_link_that_is_read_by_nobody_holds_no_supervisor_up(gang):
    """The step's own code may run for hours."""
    control = gang[0]()
    control.link.wait(lambda: control.link._processes, HANG_S)
    for number in range(3000):
        control.link.send("show", "note", 0, f"line {number} " + "x" * 1000, True)
    assert control.link.call("states")[0] == "HERE"
