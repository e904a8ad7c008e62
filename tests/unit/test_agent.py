"""The agent's program, with a stand-in for torchrun: what it tells of its workers, and what these get."""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from limits import limit_s
from supervised import Supervised
from unit_helpers import HANG_S, eventually, write

from metaflow_extensions.torchrun.plugins.torchrun.machine.processes import has_signal
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.agent import End, WorkerEnded
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.command import AGENT, HALT_SIGNAL

STAND_IN = Path(__file__).parents[1] / "stand_in"
OPTIONS = ["--nnodes=1", "--node-rank=0", "--nproc-per-node=2", "--rdzv-endpoint=127.0.0.1:1", "--rdzv-id=some"]


@pytest.mark.parametrize(
    ("env", "seen"),
    [
        ({"TORCHRUN_RESTARTS": "2/3"}, "2 3 /it's größe $HOME/{}.jsonl"),
        ({"TORCHRUN_METRICS": "mine"}, "0 0 mine"),
    ],
)
def test_it_tells_of_its_workers_and_whatever_they_start_has_their_variables(env, seen, tmp_path):
    """Also a wrapper that does not become the script's Python, as a profiler in PYTHON_EXEC."""
    shows = "sh -c 'echo $TORCHELASTIC_RESTART_COUNT $TORCHELASTIC_MAX_RESTARTS $TORCHRUN_RESTARTS$TORCHRUN_METRICS'"
    words = [f"--log-dir={tmp_path}", *OPTIONS, "--no-python", "--", "sh", "-c", shows]
    env = {**os.environ, "PYTHONPATH": str(STAND_IN), "TORCHRUN_METRICS_FOLDER": "/it's größe $HOME", **env}
    os.mkfifo(path := tmp_path / "agent.workers")
    news = os.open(path, os.O_RDWR)  # as its supervisor
    subprocess.run([sys.executable, AGENT, str(tmp_path), str(HALT_SIGNAL), *words], env=env, check=True, timeout=60)
    told = [line.split() for line in os.read(news, 65536).decode().splitlines()]
    os.close(news)
    started = {words[1] for words in told if words[0] == "started"}
    assert {words[1] for words in told if words[0] == "ended" and words[2] == "0"} == started
    assert sorted(words[2:] for words in told if words[0] == "started") == [["0", "0"], ["1", "1"]]
    assert [(tmp_path / f"{rank}.stdout").read_text() for rank in (0, 1)] == [
        f"{seen.format(rank)}\n" for rank in (0, 1)
    ]


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


# What a step's code may have done before: it ignores and blocks all signals.
INSENSITIVE = """
for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
"""
# Rank 0 fails at its first SIGTERM; rank 1 has time to get a second one, as torchrun would send it then.
COUNTING = """
import os, signal, sys, time
status = dict(line.split(":", 1) for line in open("/proc/self/status") if line.startswith("Sig"))
got, rank = [], os.environ["RANK"]
signal.signal(signal.SIGTERM, lambda *_: got.append(1))
with open(rank + ".part", "w") as file:
    file.write(status["SigIgn"].strip() + " " + status["SigBlk"].strip())
os.rename(rank + ".part", rank + ".ready")
while not got:
    signal.pause()
if rank == "0":
    sys.exit(3)
end = time.monotonic() + 0.6
while time.monotonic() < end:
    time.sleep(0.05)
with open(rank + ".count", "w") as file:
    file.write(str(len(got)))
"""


def test_every_worker_gets_sigterm_exactly_once_whatever_the_step_ignores_and_blocks(tmp_path):
    script = str(write(tmp_path / "wörker & co.py", COUNTING))
    os.mkfifo(news := str(tmp_path / "agent.workers"))
    logs = {stream: str(tmp_path / f"agent.{stream}") for stream in ("stdout", "stderr")}
    options = {**logs, "news": news, "grace_s": 5.0, "halt_signal": HALT_SIGNAL, "cwd": str(tmp_path)}
    command = [sys.executable, AGENT, str(tmp_path), str(HALT_SIGNAL), f"--log-dir={tmp_path}", *OPTIONS, "--", script]
    supervised = Supervised(INSENSITIVE)
    try:
        env = {**os.environ, "PYTHONPATH": str(STAND_IN)}
        supervised.ask("start(0, command, env, options)", command=command, env=env, options=options)
        eventually(lambda: len(list(tmp_path.glob("*.ready"))) == 2, "workers")
        for _ in range(2):
            supervised.ask("agents[0].stop(3600.0)")
        events = supervised.events(0)
        seen = [events.get(timeout=limit_s(HANG_S))]
        while not isinstance(seen[-1], End):
            seen.append(events.get(timeout=limit_s(HANG_S)))
    finally:
        supervised.close()
    ended = [event for event in seen if isinstance(event, WorkerEnded)]
    assert sorted((event.rank, event.status, event.stopped) for event in ended) == [(0, 3, True), (1, 0, True)]
    assert (tmp_path / "1.count").read_text() == "1"
    ignored, blocked = (int(word, 16) for word in (tmp_path / "1.ready").read_text().split())
    own = 1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1  # Python's own
    # Those between SIGSYS and SIGRTMIN belong to the C library, whose posix_spawn ignores them: `make` starts us by it.
    own |= sum(1 << number - 1 for number in range(signal.SIGSYS + 1, signal.SIGRTMIN))
    assert (ignored & ~own, blocked) == (0, 0)
