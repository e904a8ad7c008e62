"""Real process trees: started, watched, stopped to the last grandchild, whatever dies."""

import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
from limits import limit_s
from supervised import Supervised
from unit_helpers import HANG_S, eventually, is_running, write

from metaflow_extensions.torchrun.plugins.torchrun.supervisor.agent import (
    End,
    WorkerEnded,
    WorkerStarted,
)
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.command import AGENT as AGENT_PROGRAM
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.command import HALT_SIGNAL

PYTHON = [sys.executable, "-I", "-S"]
STAND_IN = Path(__file__).parents[1] / "stand_in"

# Does what torchrun's agent does: workers in sessions of their own, told who they are; waits for all.
# With "hang" it never goes, not even after its workers or on SIGTERM.
AGENT = """
import os, signal, subprocess, sys, time
worker, count, how = sys.argv[1], int(sys.argv[2]), sys.argv[3]
if how == "hang":
    signal.signal(signal.SIGTERM, lambda *_: None)
os.environ["TORCHRUN_AGENT_PID"] = str(os.getpid())  # as our hook does
notes = os.environ["NOTES"]
news = os.open(os.path.join(notes, "agent.workers"), os.O_WRONLY)
def tell(*words):
    os.write(news, " ".join(map(str, words)).encode() + b"\\n")
def start(i):
    w = subprocess.Popen([sys.executable, "-I", "-S", worker], start_new_session=True,
                         env={**os.environ, "RANK": str(10 + i), "LOCAL_RANK": str(i)})
    tell("started", w.pid, 10 + i, i)
    return w
workers = [start(i) for i in range(count)]
open(os.path.join(notes, "agent.pid"), "w").write(str(os.getpid()))
while how == "meddle" and all(w.poll() is None for w in workers):
    time.sleep(0.01)
if how == "meddle":  # as torchrun does when one of its workers has ended
    for w in workers:
        if w.poll() is None:
            tell("stopping", w.pid, time.monotonic())
            w.send_signal(signal.SIGTERM)
        else:
            tell("ended", w.pid, w.returncode)
for w in workers:
    w.returncode is None and os.waitid(os.P_PID, w.pid, os.WEXITED | os.WNOWAIT)
time.sleep(0.3)  # torchrun polls, so it reaps a worker a moment after its end
codes = [w.wait() for w in workers]
while how == "hang":
    time.sleep(60)
sys.exit(1 if any(codes) else 0)
"""

# Before every worker's script: it notes its pid, and that it is ready, in one step.
NOTE = """
import os, signal, subprocess, sys, time
notes, rank = os.environ["NOTES"], os.environ.get("LOCAL_RANK")
def note(name, text=""):
    path = os.path.join(notes, name)
    with open(path + ".part", "w") as file:
        file.write(str(text))
    os.replace(path + ".part", path)
def ready():
    note(f"{rank}.pid", os.getpid())
def forever():
    while True:
        time.sleep(60)
def until_let_go():
    ready()
    while not os.path.exists(os.path.join(notes, f"let go {os.getpid()}")):
        time.sleep(0.01)
"""

ENDLESS = "ready(); forever()"
# Counts signals; rank 0 ends at the first.
COUNTING = """
got = []
signal.signal(signal.SIGTERM, lambda *_: got.append(1))
ready()
while not got:
    signal.pause()
if rank == "0":
    sys.exit(0)
limit = time.monotonic() + 0.3  # time for a second one to arrive
while time.monotonic() < limit:
    time.sleep(0.05)
note(f"{rank}.count", len(got))
"""


def program(root, worker):
    """Write agent and worker into a folder, under hostile names; return their paths."""
    return str(write(root / "an agent's script.py", AGENT)), str(write(root / "wörker & co.py", NOTE + worker))


def noted(root, *names):
    """Return the pids that scripts note in `root`, as soon as they have."""
    paths = [root / name for name in names]
    eventually(lambda: all(path.exists() and path.read_text() for path in paths), f"{names}")
    return [int(path.read_text()) for path in paths]


class Tree:
    """One agent of a process that stands for the supervisor."""

    def __init__(self, root, worker, count=2, how="wait", command=None, before="", **options):
        self.root, self.count = root, count
        agent, script = program(root, worker)
        logs = {stream: str(root / f"agent.{stream}") for stream in ("stdout", "stderr")}
        self.seen = []
        os.mkfifo(news := str(root / "agent.workers"))
        options = {**logs, "news": news, "grace_s": 5.0, **options}
        command = command or [*PYTHON, agent, script, str(count), how]
        self.supervised = Supervised(before)
        self.events = self.supervised.events(0)
        env = {**os.environ, "NOTES": str(root)}
        self.supervised.ask("start(0, command, env, options)", command=command, env=env, options=options)

    def stop(self, grace_s, first_signal=None):
        self.supervised.ask("agents[0].stop(grace_s, first)", grace_s=grace_s, first=first_signal)

    def expect(self, kind):
        deadline = time.monotonic() + limit_s(HANG_S)
        while True:
            event = self.events.get(timeout=max(0.01, deadline - time.monotonic()))
            self.seen.append(event)
            if isinstance(event, End):
                assert not self.running(), "the last event, and something still runs"
            if isinstance(event, kind):
                return event

    def await_workers(self):
        """Wait until the workers run and are known; return their pids by local rank."""
        pids = noted(self.root, *[f"{rank}.pid" for rank in range(self.count)])
        known = sorted((event.local_rank, event.pid) for event in [self.expect(WorkerStarted) for _ in pids])
        assert known == list(enumerate(pids))
        return pids

    def let_go(self, pid):
        """Have a worker end that waits for it."""
        (self.root / f"let go {pid}").touch()

    def ended(self):
        """Return the workers' exit codes after the last event, by local rank."""
        self.expect(End)
        return {event.local_rank: event.status for event in self.seen_of(WorkerEnded)}

    def seen_of(self, kind):
        return [event for event in self.seen if isinstance(event, kind)]

    def agent_pid(self):
        return self.supervised.ask("agents[0].pid")

    def running(self):
        """Return the pids of what has noted itself and runs."""
        return [pid for path in self.root.glob("*.pid") if is_running(pid := int(path.read_text()))]


@pytest.fixture
def tree(tmp_path):
    made = []

    def start(worker=ENDLESS, **options):
        made.append(Tree(tmp_path, worker, **options))
        return made[-1]

    yield start
    for one in made:
        one.supervised.close()
        left = one.running()
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left, "left running"


# --- the tree ends by itself -----------------------------------------------------------------------


def test_a_workers_end_is_told_at_once_and_how_it_ended(tree):
    one = tree("until_let_go(); sys.exit(7)", how="hang")
    pids = one.await_workers()
    one.let_go(pids[1])
    event = one.expect(WorkerEnded)
    assert [event.local_rank, event.rank, event.status, event.stopped] == [1, 11, 7, False]
    killed_at = time.monotonic()
    os.kill(pids[0], signal.SIGKILL)
    event = one.expect(WorkerEnded)
    assert [event.local_rank, event.status, event.stopped] == [0, -signal.SIGKILL, False]
    assert event.at - killed_at < 1.0
    assert is_running(one.agent_pid())


# What a step's code may have done before: it ignores and blocks all signals.
INSENSITIVE = """
for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
"""


def test_what_the_step_ignores_and_blocks_reaches_neither_supervisor_nor_workers(tree, tmp_path):
    status = "status = dict(line.split(':', 1) for line in open('/proc/self/status') if line.startswith('Sig'));"
    tell = "note('signals', status['SigIgn'].strip() + ' ' + status['SigBlk'].strip());"
    one = tree(status + tell + "until_let_go()", count=1, before=INSENSITIVE)
    one.let_go(*one.await_workers())
    assert one.ended() == {0: 0}
    ignored, blocked = (int(word, 16) for word in (tmp_path / "signals").read_text().split())
    own = 1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1  # Python's own
    # Those between SIGSYS and SIGRTMIN belong to the C library, whose posix_spawn ignores them: `make` starts us by it.
    own |= sum(1 << number - 1 for number in range(signal.SIGSYS + 1, signal.SIGRTMIN))
    assert (ignored & ~own, blocked) == (0, 0)


# --- stopping --------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["hang", "meddle"])
def test_every_worker_gets_sigterm_exactly_once_and_may_end_in_its_own_way(how, tree, tmp_path):
    """Not once more of an agent that stops all workers when one has ended."""
    one = tree(COUNTING, count=3, how=how)
    one.await_workers()
    one.stop(3600.0)
    one.stop(3600.0)
    assert one.ended() == {0: 0, 1: 0, 2: 0}
    assert [(tmp_path / f"{rank}.count").read_text() for rank in (1, 2)] == ["1", "1"]
    assert all(event.stopped for event in one.seen_of(WorkerEnded))


# --- preemption --------------------------------------------------------------------------------------

# Saves with the help of a child, as a data loader's or a compressor's, which a signal of its own would end.
SAVING = """
child = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import sys; sys.stdout.write(sys.stdin.read())"],
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
note(f"{rank}.child.pid", child.pid)
got = []
signal.signal(signal.SIGUSR1, lambda *_: got.append(1))
ready()
while not got:
    signal.pause()
time.sleep(0.3)
note(f"{rank}.saved", child.communicate("state")[0])
"""


def test_a_preemption_signals_the_workers_alone_and_gives_them_time(tree):
    one = tree(SAVING, how="hang")
    one.await_workers()
    one.stop(10.0, signal.SIGUSR1)
    assert one.ended() == {0: 0, 1: 0}
    assert [(one.root / f"{rank}.saved").read_text() for rank in (0, 1)] == ["state", "state"]


# What stands for torchrun: it hosts a store in a thread, and on SIGTERM its main thread ends the worker.
STORING = """
import os, random, signal, socket, sys, threading, time
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
def stop(number, frame):
    raise SystemExit(1)
def serve(store):
    while True:
        store.accept()[0].sendall(b"stored")
def main():
    store = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=serve, args=[store], daemon=True).start()
    env = {**os.environ, "RANK": "10", "LOCAL_RANK": "0", "STORE": str(store.getsockname()[1])}
    signal.signal(signal.SIGTERM, stop)
    words = [sys.executable, "-I", "-S", sys.argv[1]]
    worker = subprocess_handler.SubprocessHandler(words, env, None, None).proc
    open(os.path.join(os.environ["NOTES"], "agent.pid"), "w").write(str(os.getpid()))
    try:
        while worker.poll() is None:
            time.sleep(0.01)
    finally:
        worker.terminate()
        worker.wait()
"""
SAVING_WITH_THE_STORE = """
import socket
got = []
signal.signal(signal.SIGUSR1, lambda *_: got.append(1))
ready()
while not got:
    signal.pause()
os.kill(os.getppid(), signal.SIGTERM)  # somebody signals all processes
time.sleep(0.3)
with socket.create_connection(("127.0.0.1", int(os.environ["STORE"])), 10) as store:
    note("saved", store.recv(100).decode())
"""


@pytest.fixture
def storing(tree, tmp_path, monkeypatch):
    """An agent whose working directory has files with the names of Python's modules."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    for name, source in (("__init__", ""), ("distributed/__init__", ""), ("distributed/run", STORING)):
        write(tmp_path / "site" / "torch" / f"{name}.py", source)
    shutil.copytree(STAND_IN / "torch" / "distributed" / "elastic", tmp_path / "site/torch/distributed/elastic")
    for name in ("random", "signal", "torch"):
        write(tmp_path / "cwd" / f"{name}.py", f"raise AssertionError('{name} of the working directory')")
    command = [sys.executable, AGENT_PROGRAM, str(tmp_path), str(HALT_SIGNAL), str(tmp_path / "wörker & co.py")]
    more = {"cwd": str(tmp_path / "cwd"), "halt_signal": HALT_SIGNAL}
    return lambda worker: tree(worker, count=1, command=command, **more)


def test_a_worker_that_saves_still_has_the_store_in_its_agent(storing):
    """The agent acts on its workers no more, whatever signals it gets."""
    one = storing(SAVING_WITH_THE_STORE)
    one.await_workers()
    one.stop(20.0, signal.SIGUSR1)
    assert one.ended() == {0: 0}
    assert (one.root / "saved").read_text() == "stored"
