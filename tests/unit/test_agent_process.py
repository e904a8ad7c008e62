"""A supervisor's agent: our program around a stand-in for torchrun, with real workers."""

import os
import signal
import sys
from pathlib import Path

from limits import limit_s
from supervised import Supervised
from unit_helpers import HANG_S, eventually, write

from metaflow_extensions.torchrun.plugins.torchrun.supervisor.agent import End, WorkerEnded
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.command import AGENT, HALT_SIGNAL

STAND_IN = Path(__file__).parents[1] / "stand_in"
OPTIONS = ["--nnodes=1", "--node-rank=0", "--nproc-per-node=3", "--rdzv-endpoint=127.0.0.1:1", "--rdzv-id=some"]

# What a step's code may have done before: it ignores and blocks all signals.
INSENSITIVE = """
for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
"""
# Rank 0 fails at its first SIGTERM; the others have time to get a second one, as torchrun would send it then.
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
        eventually(lambda: len(list(tmp_path.glob("*.ready"))) == 3, "workers")
        for _ in range(2):
            supervised.ask("agents[0].stop(3600.0)")
        events = supervised.events(0)
        seen = [events.get(timeout=limit_s(HANG_S))]
        while not isinstance(seen[-1], End):
            seen.append(events.get(timeout=limit_s(HANG_S)))
    finally:
        supervised.close()
    ended = [event for event in seen if isinstance(event, WorkerEnded)]
    assert sorted((event.rank, event.status, event.stopped) for event in ended) == [
        (0, 3, True),
        (1, 0, True),
        (2, 0, True),
    ]
    assert [(tmp_path / f"{rank}.count").read_text() for rank in (1, 2)] == ["1", "1"]
    ignored, blocked = (int(word, 16) for word in (tmp_path / "1.ready").read_text().split())
    own = 1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1  # Python's own
    # Those between SIGSYS and SIGRTMIN belong to the C library, whose posix_spawn ignores them: `make` starts us by it.
    own |= sum(1 << number - 1 for number in range(signal.SIGSYS + 1, signal.SIGRTMIN))
    assert (ignored & ~own, blocked) == (0, 0)
