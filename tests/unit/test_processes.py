"""Who lives, who descends from whom, and the end of a tree of processes."""

import os
import signal
import subprocess
import sys
import threading

from unit_helpers import eventually

from metaflow_extensions.torchrun.plugins.torchrun.machine import processes

PYTHON = [sys.executable, "-I", "-S"]


def test_living_descendants_are_all_and_only_the_living():
    script = "import subprocess, sys; print(subprocess.Popen(['sleep', '600']).pid, flush=True); sys.stdin.read()"
    with subprocess.Popen([*PYTHON, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        grandchild = int(child.stdout.readline())
        assert {child.pid, grandchild} <= set(processes.living_descendants(os.getpid()))
        assert processes.living_descendants(child.pid) == [grandchild]
        os.kill(grandchild, signal.SIGKILL)  # a zombie now: its parent does not look
        eventually(lambda: processes.living_descendants(child.pid) == [], "the grandchild's end")
        child.kill()


def test_a_command_with_odd_characters_in_its_name_is_read(tmp_path):
    odd = tmp_path / "a) Z (b"
    odd.symlink_to("/bin/sleep")
    with subprocess.Popen([str(odd), "600"]) as child:
        eventually(lambda: child.pid in processes.living_descendants(os.getpid()))
        child.kill()


def test_await_or_kill_waits_for_those_that_end_and_kills_those_that_do_not():
    quick, slow = subprocess.Popen(["sleep", "0.2"]), subprocess.Popen(["sleep", "600"])
    reapers = [threading.Thread(target=child.wait) for child in (quick, slow)]
    for reaper in reapers:
        reaper.start()
    processes.await_or_kill({quick.pid, slow.pid}, 1.0)
    for reaper in reapers:
        reaper.join(10.0)
    assert (quick.returncode, slow.returncode) == (0, -signal.SIGKILL)
