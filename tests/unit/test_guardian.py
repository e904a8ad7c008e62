"""Real process trees: started, watched, stopped to the last grandchild, whatever dies."""

import fcntl
import json
import os
import queue
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from limits import limit_s
from unit_helpers import HANG_S, OURS, eventually, is_running, write

from metaflow_extensions.torchrun.plugins.torchrun.guardian import guardian_process
from metaflow_extensions.torchrun.plugins.torchrun.guardian.agent_events import (
    AgentEnded,
    AgentStarted,
    End,
    Frozen,
    Terminated,
    WorkerEnded,
    WorkerStarted,
)
from metaflow_extensions.torchrun.plugins.torchrun.guardian.guardian import Guardian, Options
from metaflow_extensions.torchrun.plugins.torchrun.launch.command import AGENT as AGENT_PROGRAM
from metaflow_extensions.torchrun.plugins.torchrun.launch.command import HALT_SIGNAL
from metaflow_extensions.torchrun.plugins.torchrun.logs.pipes import LogReader
from metaflow_extensions.torchrun.plugins.torchrun.machine import processes
from metaflow_extensions.torchrun.plugins.torchrun.machine.inherited import inherited
from metaflow_extensions.torchrun.plugins.torchrun.node.agent import AgentProcess

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
    """One agent under its guardian."""

    def __init__(self, root, worker, count=2, how="wait", command=None, **options):
        self.root, self.count = root, count
        agent, script = program(root, worker)
        logs = [str(root / f"agent.{stream}") for stream in ("stdout", "stderr")]
        self.events, self.seen = queue.SimpleQueue(), []
        os.mkfifo(news := str(root / "agent.workers"))
        options = Options(*logs, news=news, **{"grace_s": 5.0, "silence_s": 30.0, **options})
        command = command or [*PYTHON, agent, script, str(count), how]
        self.process = AgentProcess(command, {**os.environ, "NOTES": str(root)}, options, self.events.put)
        self.process.start()

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
        """Wait until the workers run and the guardian knows them; return their pids by local rank."""
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
        return self.seen_of(AgentStarted)[0].pid

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
        one.process.close(0.0)
        left = one.running()
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left, "left running"


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


def test_a_worker_that_torchrun_reaps_first_is_reported_before_torchrun_has_stopped_the_others(tree):
    """The guardian has no time to see it, as on a busy machine; the other worker does not heed SIGTERM."""
    stubborn = "signal.signal(signal.SIGTERM, signal.SIG_IGN); ready(); forever()"
    one = tree(f"if rank == '0': sys.exit(7)\n{stubborn}", how="first")
    event = one.expect(WorkerEnded)
    assert (event.local_rank, event.status, event.stopped) == (0, 7, False)
    noted(one.root, "told.pid")
    one.process.stop(0.1)
    assert one.ended() == {0: 7, 1: -signal.SIGKILL}
    assert one.seen_of(WorkerEnded)[1].stopped_at is not None


def test_a_node_may_have_more_workers_than_select_takes_descriptors(tmp_path):
    os.mkfifo(path := str(tmp_path / "agent.workers"))
    guardian = Guardian(SimpleNamespace(has_ended=True), None, Options("", "", 1.0, 1.0, news=path))
    guardian._task_gone = True
    low, guardian._news = guardian._news, fcntl.fcntl(guardian._news, fcntl.F_DUPFD, 2000)
    with open(path, "wb") as news:
        news.write(b"ended 1 0\n")
    begun = time.monotonic()
    guardian._wait(limit_s(HANG_S))
    assert time.monotonic() - begun < limit_s(HANG_S)
    os.close(low)
    os.close(guardian._news)


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
def test_an_agent_that_can_not_be_started_is_an_end_with_an_error(command, cwd, tree):
    end = tree(command=command, cwd=cwd).expect(End)
    assert (end.status, end.left) == (None, [])
    assert "could not be started" in end.error
    assert (cwd or command[0]) in end.error


# Before every script of a task's process.
TASK = f"""{OURS}
import json, os, signal, time
from ours.node.agent import AgentProcess
from ours.guardian.guardian import Options
root, silence_s, command = sys.argv[1], float(sys.argv[2]), sys.argv[3:]
scratch = [os.path.join(root, name) for name in ("scratch of logs", "scratch of a call")]
for folder in scratch:
    os.makedirs(os.path.join(folder, "values"))
logs = [os.path.join(root, "agent." + stream) for stream in ("stdout", "stderr")]
options = Options(*logs, grace_s=0.5, silence_s=silence_s, news=os.path.join(root, "agent.workers"), scratch=scratch)
os.mkfifo(options.news)
say = lambda event: print(json.dumps({{**event._asdict(), "event": type(event).__name__}}), flush=True)
process = AgentProcess(command, {{**os.environ, "NOTES": root}}, options, say)
"""
# Its code ignores signals, as many do with SIGCHLD, and it starts a launch in a thread that blocks all.
INSENSITIVE = """
for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
process.start()
process._reader.join()
"""
# It has forked a child, as data loaders and preprocessing of a step's own do; that has our pipes as well.
FORKING = """
process.start()
if os.fork() == 0:
    os.setsid()
    open(os.path.join(root, "forked"), "w").write(str(os.getpid()))
time.sleep(600)
"""


@pytest.fixture
def task(tmp_path):
    """Return a function that starts such a process, with one worker."""
    started = []

    def start(code, worker, how="hang", silence_s=30.0):
        agent = [*PYTHON, *program(tmp_path, worker), "1", how]
        command = [*PYTHON, "-c", TASK + code, str(tmp_path), str(silence_s), *agent]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


# Its step waits for its own child and for all that it has, while a launch runs in another thread and a spare waits.
WAITING = """
import threading
from ours.features.warm.node import WarmNode
signal.alarm(60)
warm = WarmNode(["json"], dict(os.environ), 0)
warm.prepare()
assert warm.pid
launch = threading.Thread(target=process.start)
launch.start()
launch.join()
while not os.path.exists(os.path.join(root, "0.pid")):
    time.sleep(0.01)
own = os.fork() or os._exit(3)
waited = os.wait()[0] == own
try:
    os.wait()
except ChildProcessError:
    print(json.dumps({"event": "waited", "own": waited}), flush=True)
time.sleep(600)
"""
SUBREAPER = "import ctypes; ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)\n"


def test_the_step_sees_no_child_but_its_own(task, tmp_path):
    process = task(WAITING, ENDLESS)
    told = next((event for event in map(json.loads, process.stdout) if event["event"] == "waited"), None)
    assert told == {"event": "waited", "own": True}
    process.kill()
    await_the_end_of(noted(tmp_path, "agent.pid", "0.pid"))


def test_the_launch_of_a_process_that_adopts_orphans_ends_with_it(task, tmp_path):
    """As a supervisor does."""
    process = task(f"{SUBREAPER}process.start()\ntime.sleep(600)", STUBBORN)
    pids = noted(tmp_path, "agent.pid", "0.pid")
    process.kill()
    process.wait()
    await_the_end_of(pids)


def test_what_the_step_ignores_and_blocks_reaches_neither_guardian_nor_workers(task, tmp_path):
    status = "status = dict(line.split(':', 1) for line in open('/proc/self/status') if line.startswith('Sig'));"
    tell = "note('signals', status['SigIgn'].strip() + ' ' + status['SigBlk'].strip());"
    process = task(INSENSITIVE, status + tell + "until_let_go()", how="wait")
    (worker,) = noted(tmp_path, "0.pid")
    events = []
    for line in process.stdout:
        events.append(json.loads(line))
        if events[-1]["event"] == "WorkerStarted":
            (tmp_path / f"let go {worker}").touch()
    told = [(event["event"], event.get("status")) for event in events]
    assert told[-3:] == [("WorkerEnded", 0), ("AgentEnded", 0), ("End", 0)]
    ignored, blocked = (int(word, 16) for word in (tmp_path / "signals").read_text().split())
    own = 1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1  # Python's own
    # Those between SIGSYS and SIGRTMIN belong to the C library, whose posix_spawn ignores them: `make` starts us by it.
    own |= sum(1 << number - 1 for number in range(signal.SIGSYS + 1, signal.SIGRTMIN))
    assert (ignored & ~own, blocked) == (0, 0)


def test_agent_and_workers_have_what_the_task_has_and_the_guardian_keeps_its_own(tree, tmp_path):
    note_it = "note('limits', [os.nice(0), resource.getrlimit(resource.RLIMIT_NOFILE)[0], os.umask(0)])"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    told = {**inherited(), "priority": os.nice(0) + 2, "RLIMIT_NOFILE": [64, hard]}
    one = tree(f"import resource; {note_it}; until_let_go()", count=1, inherited=told, umask=0o27)
    one.let_go(*one.await_workers())
    assert one.ended() == {0: 0}
    assert (tmp_path / "limits").read_text() == str([os.nice(0) + 2, 64, 0o27])
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (soft, hard)


# --- stopping --------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["hang", "meddle"])
def test_every_worker_gets_sigterm_exactly_once_and_may_end_in_its_own_way(how, tree, tmp_path):
    """Not once more of an agent that stops all workers when one has ended."""
    one = tree(COUNTING, count=3, how=how)
    one.await_workers()
    one.process.stop(3600.0)
    one.process.stop(3600.0)
    assert one.ended() == {0: 0, 1: 0, 2: 0}
    assert [(tmp_path / f"{rank}.count").read_text() for rank in (1, 2)] == ["1", "1"]
    assert all(event.stopped for event in one.seen_of(WorkerEnded))


def test_the_halted_and_the_detached_obey_too_and_the_stubborn_are_killed_after_the_grace(tree):
    stubborn = "if rank == '1': signal.signal(15, signal.SIG_IGN)\n"
    one = tree(FAMILY.replace("ready()\nforever()", f"{stubborn}ready()\nforever()"), how="hang")
    pids = one.await_workers()
    os.kill(pids[0], signal.SIGSTOP)
    begun = time.monotonic()
    one.process.stop(0.5)
    assert one.ended() == {0: -signal.SIGTERM, 1: -signal.SIGKILL}
    assert time.monotonic() - begun >= 0.5
    assert len(list(one.root.glob("*.pid"))) == 7


def test_stop_before_the_workers_appear_leaves_nothing(tree):
    one = tree()
    one.process.stop(1.0)
    one.expect(End)


def test_a_guardian_that_somebody_has_stopped_hears_that_all_is_to_end(tree):
    one = tree(how="hang")
    one.await_workers()
    os.kill(one.process.pid, signal.SIGSTOP)
    one.process.stop(1.0)
    assert one.ended() == dict.fromkeys((0, 1), -signal.SIGTERM)
    assert not one.running()


def test_close_waits_for_the_end_and_may_be_called_again(tree):
    one = tree(STUBBORN)
    one.await_workers()
    one.process.close(0.1)
    assert not one.running()
    one.process.close(0.1)
    one.process.stop(0.1)


# --- sudden deaths -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("whose", "number", "told"), [("agent", signal.SIGKILL, AgentEnded), ("guardian", signal.SIGTERM, Terminated)]
)
def test_when_agent_or_guardian_is_told_to_end_it_is_said_and_the_workers_are_stopped(whose, number, told, tree):
    one = tree(how="hang")
    one.await_workers()
    os.kill(one.agent_pid() if whose == "agent" else one.process.pid, number)
    one.expect(told)
    assert one.ended() == dict.fromkeys((0, 1), -signal.SIGTERM)
    assert one.seen[-1].status == -signal.SIGKILL


@pytest.mark.parametrize("has_pidfds", [True, False])
def test_when_the_guardian_is_killed_the_task_cleans_up_and_says_so(has_pidfds, tree, monkeypatch):
    """A child of the step's has its pipe, and another process the number of a worker that is gone."""
    if has_pidfds:
        monkeypatch.setattr(guardian_process, "_LOOK_S", 600.0)  # nobody looks
    else:
        monkeypatch.setattr(processes, "open_pidfd", lambda pid: None)
    one = tree(STUBBORN, how="hang", grace_s=0.3)
    one.await_workers()
    with open(f"/proc/{one.process.pid}/fd/1", "wb"), subprocess.Popen(["sleep", "600"]) as unrelated:
        one.process._tree[unrelated.pid] = "1"  # as if a worker had had it, in the first 10 ms of this machine
        os.kill(one.process.pid, signal.SIGKILL)
        end = one.expect(End)
        assert unrelated.poll() is None
        unrelated.kill()
    assert end == End(None, guardian_gone=True)


def test_when_the_guardian_is_killed_what_had_detached_itself_does_not_stay(tree):
    one = tree(FAMILY, how="hang", grace_s=0.3)
    one.await_workers()
    detached = noted(one.root, *RELATIVES)[1]
    assert processes.find(detached).parent == one.process.pid
    os.kill(one.process.pid, signal.SIGKILL)
    one.expect(End)  # and nothing runs


def test_when_the_task_is_killed_nothing_of_it_stays_but_what_its_step_forked(task, tmp_path):
    process = task(FORKING, FAMILY)
    *pids, forked = noted(tmp_path, "agent.pid", "0.pid", *RELATIVES, "forked")
    try:
        process.kill()
        process.wait()
        assert len(list(tmp_path.glob("scratch of *"))) == 2  # while it lived, they were the task's own affair
        await_the_end_of(pids)
        eventually(lambda: not list(tmp_path.glob("scratch of *")), "the end of the scratch folders")
        assert is_running(forked)
    finally:
        os.kill(forked, signal.SIGKILL)


# --- frozen processes --------------------------------------------------------------------------------


def test_a_worker_and_an_agent_that_somebody_freezes_are_told_once_and_hear_sigterm_still(tree):
    one = tree(how="hang", silence_s=0.5)
    worker = one.await_workers()[1]
    begun = time.monotonic()
    for pid in (worker, one.agent_pid()):
        os.kill(pid, signal.SIGSTOP)
    told = {event.pid: (event.rank, event.local_rank) for event in (one.expect(Frozen), one.expect(Frozen))}
    assert told == {worker: (11, 1), one.agent_pid(): (None, None)}
    assert time.monotonic() - begun >= 0.5
    one.process.stop(5.0)
    assert one.ended() == dict.fromkeys((0, 1), -signal.SIGTERM)


def test_who_is_served_is_continued_when_somebody_has_stopped_it(task, tmp_path):
    process = task("process.start(); time.sleep(600)", ENDLESS, silence_s=0.5)
    pids = noted(tmp_path, "agent.pid", "0.pid")
    process.send_signal(signal.SIGSTOP)
    eventually(lambda: psutil.Process(process.pid).status() != psutil.STATUS_STOPPED, "its going on")
    process.send_signal(signal.SIGSTOP)
    process.kill()
    await_the_end_of(pids)
    eventually(lambda: not list(tmp_path.glob("scratch of *")), "the end of the scratch folders")


PRINTING = """
def last_words(*_):
    with open(os.path.join(notes, "pipes", "0.stdout"), "w") as pipe:
        pipe.writelines(f"{number}\\n" for number in range(200_000))
    sys.exit()
signal.signal(signal.SIGTERM, last_words)
ready()
forever()
"""


def test_a_guardian_that_can_hear_no_more_takes_no_output_from_a_task_that_lives(tree, tmp_path):
    """As after a signal handler that raises while its task waits for the end, or if the step's code closes all files."""
    (tmp_path / "pipes").mkdir()
    read = []
    write = lambda _, lines: read.append(lines) or True  # noqa: E731
    reader = LogReader(str(tmp_path / "pipes"), {0: ("", False)}, "", write)
    reader.start()
    one = tree(PRINTING, count=1, pipes=str(tmp_path / "pipes"))
    one.await_workers()
    one.process._guardian.close()
    assert one.ended() == {0: 0}
    reader.finish()
    assert b"".join(read).split() == [b"%d" % number for number in range(200_000)]


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
    one.process.preempt(10.0, signal.SIGUSR1)
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


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_worker_that_saves_still_has_the_store_in_its_agent(is_stopped, storing):
    """The agent acts on its workers no more, whatever signals it gets."""
    one = storing(SAVING_WITH_THE_STORE)
    one.await_workers()
    if is_stopped:
        os.kill(one.agent_pid(), signal.SIGSTOP)
    one.process.preempt(20.0, signal.SIGUSR1)
    assert one.ended() == {0: 0}
    assert (one.root / "saved").read_text() == "stored"


def test_a_halted_agent_acts_again_when_its_guardian_is_killed(storing):
    """So nothing outlives a task that is killed with it."""
    one = storing("signal.signal(signal.SIGUSR1, lambda *_: note('asked')); ready(); forever()")
    (worker,) = one.await_workers()
    one.process.preempt(60.0, signal.SIGUSR1)
    eventually((one.root / "asked").exists, "the signal")
    os.kill(one.process.pid, signal.SIGKILL)
    await_the_end_of([worker, one.agent_pid()])


@pytest.mark.parametrize(
    ("worker", "grace_s", "status"), [(FAMILY, 3600.0, -signal.SIGTERM), (STUBBORN, 0.3, -signal.SIGKILL)]
)
def test_the_grace_of_a_preemption_is_the_workers_own(worker, grace_s, status, tree):
    """What they leave behind does not use it up; who ignores the signal is killed after it."""
    one = tree(worker, count=1, how="hang")
    one.await_workers()
    one.process.preempt(grace_s, signal.SIGTERM)
    assert one.ended() == {0: status}
