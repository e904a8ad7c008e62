"""The agent's program, with a stand-in for torchrun."""

import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from limits import limit_s
from supervised import Supervised
from unit_helpers import HANG_S, eventually, write

from metaflow_extensions.torchrun.plugins.torchrun.machine.processes import has_signal
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.agent import End, WorkerEnded
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


# Rank 0 fails at its first SIGTERM; rank 1 has time to get a second one, as torchrun would send it then.
COUNTING = """
import os, signal, sys, time
got, rank = [], os.environ["RANK"]
signal.signal(signal.SIGTERM, lambda *_: got.append(1))
open(rank + ".ready", "w").close()
while not got:
    signal.pause()
if rank == "0":
    sys.exit(3)
end = time.monotonic() + 0.6
while time.monotonic() < end:
    time.sleep(0.05)
sys.exit(len(got))
"""


def test_every_worker_gets_sigterm_exactly_once(tmp_path):
    script = str(write(tmp_path / "wörker & co.py", COUNTING))
    os.mkfifo(news := str(tmp_path / "agent.workers"))
    logs = {stream: str(tmp_path / f"agent.{stream}") for stream in ("stdout", "stderr")}
    options = {**logs, "news": news, "grace_s": 5.0, "halt_signal": HALT_SIGNAL, "cwd": str(tmp_path)}
    command = [sys.executable, AGENT, str(tmp_path), str(HALT_SIGNAL), f"--log-dir={tmp_path}", *OPTIONS, "--", script]
    supervised, seen = Supervised(), []
    try:
        env = {**os.environ, "PYTHONPATH": str(STAND_IN)}
        supervised.ask("start(0, command, env, options)", command=command, env=env, options=options)
        eventually(lambda: len(list(tmp_path.glob("*.ready"))) == 2, "workers")
        for _ in range(2):
            supervised.ask("agents[0].stop(3600.0)")
        while not seen or not isinstance(seen[-1], End):
            seen.append(supervised.events(0).get(timeout=limit_s(HANG_S)))
    finally:
        supervised.close()
    ended = [event for event in seen if isinstance(event, WorkerEnded)]
    assert sorted((event.rank, event.status, event.stopped) for event in ended) == [(0, 3, True), (1, 1, True)]
