"""The agent's program, with a stand-in for torchrun."""

import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from limits import limit_s
from unit_helpers import eventually, write

from metaflow_extensions.torchrun.plugins.torchrun.machine.processes import has_signal
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.command import AGENT, HALT_SIGNAL

STAND_IN = Path(__file__).parents[1] / "stand_in"
OPTIONS = ["--nnodes=1", "--node-rank=0", "--nproc-per-node=2", "--rdzv-endpoint=127.0.0.1:1", "--rdzv-id=some"]


# torchrun is told to halt at the very moment in which it has reaped a worker.
HALTED_AT_ONCE = f"""
import signal, subprocess
class Popen(subprocess.Popen):
    def poll(self):
        status = super().poll()
        if status is not None:
            signal.raise_signal({HALT_SIGNAL})
        return status
"""


def test_an_agent_that_is_halted_while_it_reaps_a_worker_has_told_of_it(tmp_path):
    shutil.copytree(STAND_IN / "torch", tmp_path / "torch")
    handler = tmp_path / "torch/distributed/elastic/multiprocessing/subprocess_handler/subprocess_handler.py"
    write(handler, handler.read_text().replace("from subprocess import Popen", HALTED_AT_ONCE))
    words = [f"--log-dir={tmp_path}", *OPTIONS, "--no-python", "--", "sh", "-c", "exit 3"]
    os.mkfifo(path := tmp_path / "agent.workers")
    news, told = os.open(path, os.O_RDWR | os.O_NONBLOCK), []

    def has_told():
        with suppress(BlockingIOError):
            told.extend(line.split()[::2] for line in os.read(news, 65536).decode().splitlines())
        return ["ended", "3"] in told

    command = [sys.executable, AGENT, str(tmp_path), str(HALT_SIGNAL), *words]
    agent = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    try:
        eventually(has_told, "the worker's end", limit_s(10))
        eventually(lambda: has_signal(agent.pid, "SigBlk", HALT_SIGNAL), "the agent's halt", limit_s(10))
    finally:
        agent.kill()
        agent.wait()
        os.close(news)
