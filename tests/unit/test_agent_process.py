"""Real process trees: started, watched, stopped to the last grandchild, whatever dies."""

import json
import os
import resource
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
from limits import limit_s
from supervised import Supervised
from unit_helpers import HANG_S, eventually, is_running, write

from metaflow_extensions.torchrun.plugins.torchrun.launch.command import AGENT as AGENT_PROGRAM
from metaflow_extensions.torchrun.plugins.torchrun.launch.command import HALT_SIGNAL
from metaflow_extensions.torchrun.plugins.torchrun.machine import processes
from metaflow_extensions.torchrun.plugins.torchrun.machine.inherited import inherited
from metaflow_extensions.torchrun.plugins.torchrun.node.agent_events import (
    AgentEnded,
    End,
    WorkerEnded,
    WorkerStarted,
)

PYTHON = [sys.executable, "-I", "-S"]
STAND_IN = Path(__file__).parents[1] / "stand_in"

# Does what torchrun's agent does: workers in sessions of their own, told who they are; waits for all.
# With "exit" it goes as soon as they are ready; with "hang" it never does, not even after its workers or on SIGTERM.
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
    if how == "first" and i == 0:
        w.wait()
    tell("started", w.pid, 10 + i, i)
    return w
workers = [start(i) for i in range(count)]
open(os.path.join(notes, "agent.pid"), "w").write(str(os.getpid()))
while how == "exit" and not all(os.path.exists(os.path.join(notes, f"{i}.pid")) for i in range(count)):
    time.sleep(0.01)
if how == "first":  # as torchrun does where it sees the end of a worker first
    tell("ended", workers[0].pid, workers[0].returncode)
    while not os.path.exists(os.path.join(notes, "1.pid")):
        time.sleep(0.01)
    tell("stopping", workers[1].pid, time.monotonic())
    workers[1].send_signal(signal.SIGTERM)
    open(os.path.join(notes, "told.pid"), "w").write(str(workers[1].pid))
    while True:
        time.sleep(60)
while how == "meddle" and all(w.poll() is None for w in workers):
    time.sleep(0.01)
if how == "meddle":  # as torchrun does when one of its workers has ended
    for w in workers:
        if w.poll() is None:
            tell("stopping", w.pid, time.monotonic())
            w.send_signal(signal.SIGTERM)
        else:
            tell("ended", w.pid, w.returncode)
if how != "exit":
    for w in workers:
        w.returncode is None and os.waitid(os.P_PID, w.pid, os.WEXITED | os.WNOWAIT)
    time.sleep(0.3)  # torchrun polls, so it reaps a worker a moment after its end
codes = [] if how == "exit" else [w.wait() for w in workers]
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
STUBBORN = "signal.signal(signal.SIGTERM, signal.SIG_IGN); ready(); forever()"
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
# A grandchild that forks twice, opens a session of its own and ignores SIGTERM, and one that keeps its parent.
FAMILY = """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        note(f"{rank}.detached.pid", os.getpid())
        forever()
    os._exit(0)
child = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"], start_new_session=True)
note(f"{rank}.child.pid", child.pid)
while not os.path.exists(os.path.join(notes, f"{rank}.detached.pid")):
    time.sleep(0.01)
ready()
forever()
"""
RELATIVES = ("0.child.pid", "0.detached.pid")


def program(root, worker):
    """Write agent and worker into a folder, under hostile names; return their paths."""
    return str(write(root / "an agent's script.py", AGENT)), str(write(root / "wörker & co.py", NOTE + worker))


def noted(root, *names):
    """Return the pids that scripts note in `root`, as soon as they have."""
    paths = [root / name for name in names]
    eventually(lambda: all(path.exists() and path.read_text() for path in paths), f"{names}")
    return [int(path.read_text()) for path in paths]


def await_the_end_of(pids):
    eventually(lambda: not [pid for pid in pids if is_running(pid)], "the end of all processes")


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


# The youngest process is not seen until another one gets SIGTERM, as if it was forked in between.
FORKED_MEANWHILE = """
agent, seen = sys.modules["ours.node.agent"], []
look, send = processes.living_descendants, agent.send_signal
def look_and_miss(*args):
    found = look(*args)
    return found if seen else [pid for pid in found if pid != max(found)]
def send_and_see(pid, number):
    seen.extend([pid] if number == signal.SIGTERM else [])
    return send(pid, number)
processes.living_descendants, agent.send_signal = look_and_miss, send_and_see
"""


def test_what_is_forked_while_the_others_are_told_to_end_is_told_too(tree):
    one = tree(count=2, before=FORKED_MEANWHILE)
    one.await_workers()
    one.stop(3600.0)
    assert one.ended() == {0: -signal.SIGTERM, 1: -signal.SIGTERM}


# --- the tree ends by itself -----------------------------------------------------------------------


@pytest.mark.parametrize(("code", "agents"), [(0, 0), (3, 1)])
def test_an_end_by_itself_is_reported_for_workers_and_agent(code, agents, tree):
    one = tree(f"until_let_go(); sys.exit({code})", count=2)
    for pid in one.await_workers():
        one.let_go(pid)
    assert one.expect(AgentEnded).status == agents
    assert one.ended() == {0: code, 1: code}
    assert {event.rank for event in one.seen_of(WorkerEnded)} == {10, 11}
    assert one.seen[-1] == End(agents, None, [])


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


@pytest.mark.parametrize("before", ["", "processes.open_pidfd = lambda pid: None"])
def test_a_worker_that_torchrun_reaps_first_is_reported_before_torchrun_has_stopped_the_others(before, tree):
    """We have no time to see it, as on a busy machine, or no pidfds; the other worker does not heed SIGTERM."""
    stubborn = "signal.signal(signal.SIGTERM, signal.SIG_IGN); ready(); forever()"
    one = tree(f"if rank == '0': sys.exit(7)\n{stubborn}", how="first", before=before)
    event = one.expect(WorkerEnded)
    assert (event.local_rank, event.status, event.stopped) == (0, 7, False)
    noted(one.root, "told.pid")
    one.stop(0.1)
    assert one.ended() == {0: 7, 1: -signal.SIGKILL}
    assert one.seen_of(WorkerEnded)[1].stopped_at is not None


def test_what_an_agent_leaves_behind_is_stopped_and_named(tree):
    one = tree(FAMILY.replace("signal.SIG_IGN", "signal.SIG_DFL"), count=1, how="exit")
    pids = noted(one.root, "0.pid", *RELATIVES)
    end = one.expect(End)
    assert {int(line.split()[0]) for line in end.left} == set(pids)
    assert "wörker & co.py" in " ".join(end.left)
    assert end.status == 0


def test_arguments_and_folder_reach_the_agent_and_its_output_its_files(tree, tmp_path):
    folder = tmp_path / "a folder's $HOME"
    folder.mkdir()
    words = ["--grace", "--", "-x", "two words", 'q"', "$HOME", "", "größe\n"]
    script = "import json, os, sys; print(json.dumps([os.getcwd(), *sys.argv[1:]])); print('größe', file=sys.stderr)"
    one = tree(command=[sys.executable, "-X", "utf8", "-c", script, *words], cwd=str(folder))
    one.expect(End)
    assert json.loads((tmp_path / "agent.stdout").read_text()) == [str(folder), *words]
    assert (tmp_path / "agent.stderr").read_text(encoding="utf-8") == "größe\n"


@pytest.mark.parametrize(
    ("command", "cwd"), [(["/no such/python", "x"], None), (["nowhere-to-be-found"], None), (["true"], "gone")]
)
def test_an_agent_that_can_not_be_started_is_an_error_at_once(command, cwd, tmp_path):
    supervised = Supervised()
    options = {"stdout": str(tmp_path / "out"), "stderr": str(tmp_path / "err"), "cwd": cwd}
    with pytest.raises(AssertionError, match=f"FileNotFoundError.*{cwd or command[0]}"):
        supervised.ask("start(0, command, {}, options)", command=command, options=options)
    supervised.ask("agents[0].close(1.0)")  # without effect
    supervised.close()


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


def test_agent_and_workers_have_what_the_task_has_and_the_supervisor_keeps_its_own(tree, tmp_path):
    note_it = "note('limits', [os.nice(0), resource.getrlimit(resource.RLIMIT_NOFILE)[0], os.umask(0)])"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    told = {**inherited(), "priority": os.nice(0) + 2, "RLIMIT_NOFILE": [64, hard]}
    one = tree(f"import resource; until_let_go(); {note_it}", count=1, inherited=told, umask=0o27)
    one.let_go(*one.await_workers())
    assert one.ended() == {0: 0}
    assert (tmp_path / "limits").read_text() == str([os.nice(0) + 2, 64, 0o27])
    assert one.supervised.ask("resource.getrlimit(resource.RLIMIT_NOFILE)") == [soft, hard]


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


def test_the_detached_obey_too_and_the_stubborn_are_killed_after_the_grace(tree):
    stubborn = "if rank == '1': signal.signal(15, signal.SIG_IGN)\n"
    one = tree(FAMILY.replace("ready()\nforever()", f"{stubborn}ready()\nforever()"), how="hang")
    one.await_workers()
    begun = time.monotonic()
    one.stop(0.5)
    assert one.ended() == {0: -signal.SIGTERM, 1: -signal.SIGKILL}
    assert time.monotonic() - begun >= 0.5
    assert len(list(one.root.glob("*.pid"))) == 7


def test_stop_before_the_workers_appear_leaves_nothing(tree):
    one = tree()
    one.stop(1.0)
    one.expect(End)


def test_close_waits_for_the_end_and_may_be_called_again(tree):
    one = tree(STUBBORN)
    one.await_workers()
    one.supervised.ask("agents[0].close(0.1)")
    assert not one.running()
    one.supervised.ask("agents[0].close(0.1)")
    one.stop(0.1)


def test_with_few_files_workers_ends_are_seen_all_the_same(tree):
    few = "import builtins\nbuiltins.errors = []\nresource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))\n"
    one = tree("until_let_go(); sys.exit(0)", count=12, before=few)
    handler = "asyncio.get_running_loop().set_exception_handler(lambda loop, about: errors.append(str(about)))"
    one.supervised.ask(handler)
    for pid in one.await_workers():
        one.let_go(pid)
    one.expect(End)
    assert one.supervised.ask("errors") == []


def test_what_goes_wrong_once_is_tried_again(tree):
    """As where no more files can be opened for a moment."""
    one = tree(how="hang")
    one.await_workers()
    fails_once = (
        "processes.real = processes._table\ndef table(): processes._table = processes.real; raise OSError(24, '')"
    )
    one.supervised.ask("do(what)", what=f"{fails_once}\nprocesses._table = table")
    one.supervised.tell("agents[0].stop(1.0)")
    assert one.ended() == dict.fromkeys((0, 1), -signal.SIGTERM)


def test_programs_of_our_own_belong_to_no_launch(tree):
    one = tree("until_let_go()")
    helper = one.supervised.ask("os.spawnlp(os.P_NOWAIT, 'sleep', 'sleep', '600')")
    one.supervised.ask("processes.HELPERS.add(pid)", pid=helper)
    for pid in one.await_workers():
        one.let_go(pid)
    assert one.expect(End) == End(0, None, [])
    assert is_running(helper)


# --- sudden deaths -----------------------------------------------------------------------------------


def test_when_the_agent_is_killed_it_is_said_and_the_workers_are_stopped(tree):
    one = tree(how="hang")
    one.await_workers()
    os.kill(one.agent_pid(), signal.SIGKILL)
    assert one.expect(AgentEnded).status == -signal.SIGKILL
    assert one.ended() == dict.fromkeys((0, 1), -signal.SIGTERM)
    assert one.seen[-1].status == -signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_order_to_all_processes_of_a_container_is_the_tasks(number, tree):
    one = tree("until_let_go()")
    pids = one.await_workers()
    for pid in (one.supervised.pid, one.supervised.between):
        os.kill(pid, number)
    for pid in pids:
        one.let_go(pid)
    assert one.ended() == {0: 0, 1: 0}


def test_when_the_supervisor_is_killed_its_parent_ends_all(tree):
    """What detached itself as well; who ignores SIGTERM is killed after the grace."""
    one = tree(FAMILY, how="hang")
    one.await_workers()
    detached = noted(one.root, *RELATIVES)[1]
    assert processes.find(detached).parent == one.supervised.pid
    one.supervised.kill()
    eventually(lambda: one.supervised.has_ended, "the parent's end")
    assert not one.running()


def test_after_the_death_of_the_supervisors_parent_all_goes_on(tree):
    one = tree("until_let_go()")
    pids = one.await_workers()
    os.kill(one.supervised.between, signal.SIGKILL)
    for pid in pids:
        one.let_go(pid)
    assert one.ended() == {0: 0, 1: 0}


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


@pytest.mark.parametrize("is_halted", [True, False])
def test_an_agent_ends_its_workers_when_both_supervisor_and_its_parent_are_killed(is_halted, storing):
    """The kernel tells it."""
    one = storing("signal.signal(signal.SIGUSR1, lambda *_: note('asked')); ready(); forever()")
    (worker,) = one.await_workers()
    agent = one.agent_pid()
    if is_halted:
        one.stop(60.0, signal.SIGUSR1)
        eventually((one.root / "asked").exists, "the signal")
    os.kill(one.supervised.between, signal.SIGKILL)
    one.supervised.kill()
    await_the_end_of([worker, agent])


@pytest.mark.parametrize(
    ("worker", "grace_s", "status"), [(FAMILY, 3600.0, -signal.SIGTERM), (STUBBORN, 0.3, -signal.SIGKILL)]
)
def test_the_grace_of_a_preemption_is_the_workers_own(worker, grace_s, status, tree):
    """What they leave behind does not use it up; who ignores the signal is killed after it."""
    one = tree(worker, count=1, how="hang")
    one.await_workers()
    one.stop(grace_s, signal.SIGTERM)
    assert one.ended() == {0: status}
