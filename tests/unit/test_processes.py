"""Who lives, who descends from whom, and the end of a tree of processes."""

import os
import signal
import subprocess
import sys

from unit_helpers import eventually

from metaflow_extensions.torchrun.plugins.torchrun.machine import processes

PYTHON = [sys.executable, "-I", "-S"]


def test_living_descendants_are_all_and_only_the_living():
    script = "import subprocess, sys; print(subprocess.Popen(['sleep', '600']).pid, flush=True); sys.stdin.read()"
    with subprocess.Popen([*PYTHON, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        grandchild = int(child.stdout.readline())
        assert {child.pid, grandchild} <= set(processes.living_descendants())
        assert processes.living_descendants(child.pid) == [grandchild]
        os.kill(grandchild, signal.SIGKILL)  # a zombie now: its parent does not look
        eventually(lambda: processes.living_descendants(child.pid) == [], "the grandchild's end")
        child.kill()
