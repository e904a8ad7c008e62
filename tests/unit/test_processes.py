"""Who lives, who descends from whom, and the end of a tree of processes."""

import os
import signal
import subprocess
import sys

from unit_helpers import EXIT_OF_A_THREAD, eventually

from metaflow_extensions.torchrun.plugins.torchrun.machine import processes

PYTHON = [sys.executable, "-I", "-S"]
# Its main thread ends, and another one goes on until it is told the exit code.
HEADLESS = f"""
import ctypes, os, sys, threading
def go_on():
    print("on", flush=True)
    os._exit(int(sys.stdin.readline()))
threading.Thread(target=go_on).start()
ctypes.CDLL(None).syscall({EXIT_OF_A_THREAD}, 0)
"""


def test_living_descendants_are_all_and_only_the_living():
    script = "import subprocess, sys; print(subprocess.Popen(['sleep', '600']).pid, flush=True); sys.stdin.read()"
    with subprocess.Popen([*PYTHON, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        grandchild = int(child.stdout.readline())
        assert {child.pid, grandchild} <= set(processes.living_descendants())
        assert processes.living_descendants(child.pid) == [grandchild]
        os.kill(grandchild, signal.SIGKILL)  # a zombie now: its parent does not look
        eventually(lambda: processes.living_descendants(child.pid) == [], "the grandchild's end")
        child.kill()


def test_a_process_lives_while_any_thread_of_it_does():
    with subprocess.Popen([*PYTHON, "-c", HEADLESS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        eventually(lambda: processes.status(child.pid)["State"][0] == "Z", "the end of its main thread")
        one = processes.Other(child.pid, processes.began(child.pid))
        assert processes.find(child.pid).status is None
        assert not one.has_ended
        assert child.pid in processes.living_descendants()
        child.stdin.write(b"7\n")
        child.stdin.flush()
        eventually(lambda: one.has_ended, "its end")
        assert processes.find(child.pid).status == 7
