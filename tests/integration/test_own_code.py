"""What the step's own code does to its process counts for its workers, too, although another process starts them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from flow_runs import STAND_IN
from limits import limit_s


@pytest.mark.parametrize("warm", ["agent", "off"])
def test_workers_have_what_the_step_has_changed_and_write_where_it_prints(warm, run_flow):
    flow = run_flow(flow="own_code.py", env={"WARM": warm}, stand_in=True)
    # On a local run the tasks of all other nodes are children of node 0's.
    assert flow.note("children-1") == {"ends": 0, "living": False}
    for node in (0, 1):
        assert flow.note(f"seen-{node}") == {
            "cwd": str(flow.out / f"here-{node}"),
            "step": "größe",
        }
        assert flow.note(f"memory-{node}") == f"[rank {node}] größe * memory of {node}\n"
        assert (flow.out / f"file-{node}").read_text() == f"[rank {node}] größe * a file of {node}\n"
        for where, printed in (("memory", False), ("a file", False), ("the terminal", True)):
            assert (f"größe * {where} of {node}" in flow.text) is printed
            assert f"[rank {node}] error in {where} of {node}" in flow.text


LAUNCHES = """
import os, signal, sys, threading
from metaflow import TorchrunSingleNodeMultiGPU

here = TorchrunSingleNodeMultiGPU()
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])

def launch(who):
    print(who, "ended well:", here.run([sys.executable, "-c", sys.argv[1]], nproc_per_node=1).exit_codes, flush=True)

thread = threading.Thread(target=launch, args=["a thread"])
thread.start()
thread.join()
if not (child := os.fork()):
    launch("a fork")
    sys.exit()
os.waitpid(child, 0)
launch("its parent")
"""


HEARS_SIGUSR1 = """
import signal
status = dict(line.split(":") for line in open("/proc/self/status") if line.startswith("Sig"))
assert not (int(status["SigIgn"], 16) | int(status["SigBlk"], 16)) & 1 << signal.SIGUSR1 - 1
"""


def test_a_thread_may_launch_and_so_may_a_fork_and_what_ignores_and_blocks_a_signal(tmp_path):
    env = {**os.environ, "METAFLOW_USER": "tester", "PYTHONPATH": str(STAND_IN)}
    command = [sys.executable, "-c", LAUNCHES, HEARS_SIGUSR1]
    done = subprocess.run(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True, timeout=limit_s(60.0))
    wanted = [f"{who} ended well: {{0: 0}}" for who in ("a thread", "a fork", "its parent")]
    assert (done.returncode, done.stdout.splitlines()) == (0, wanted)
