"""Real process trees: started, watched, stopped to the last grandchild, whatever dies."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
from unit_helpers import eventually, is_running, write

from metaflow_extensions.torchrun.plugins.torchrun import guardian
from metaflow_extensions.torchrun.plugins.torchrun.process import AgentProcess

PYTHON = [sys.executable, "-I", "-S"]

# Does what torchrun's agent does: workers in sessions of their own, told who they are; waits for all.
# With "exit" it goes as soon as they are ready; with "hang" it never does, not even after its workers or on SIGTERM.
AGENT = """
import os, signal, subprocess, sys, time
worker, count, how = sys.argv[1], int(sys.argv[2]), sys.argv[3]
if how == "hang":
    signal.signal(signal.SIGTERM, lambda *_: None)
notes = os.environ["NOTES"]
os.makedirs(os.path.join(notes, "launch0-0_x", "attempt_0"))
workers = [
    subprocess.Popen([sys.executable, "-I", "-S", worker], start_new_session=True,
                     env={**os.environ, "RANK": str(10 + i), "LOCAL_RANK": str(i)})
    for i in range(count)
]
open(os.path.join(notes, "agent.pid"), "w").write(str(os.getpid()))
while how == "exit" and not all(os.path.exists(os.path.join(notes, f"{i}.pid")) for i in range(count)):
    time.sleep(0.01)
while how == "meddle" and all(w.poll() is None for w in workers):
    time.sleep(0.01)
if how == "meddle":  # as torchrun does when one of its workers has ended
    for w in workers:
        w.send_signal(signal.SIGTERM)
if how != "exit":
    for w in workers:
        w.returncode is None and os.waitid(os.P_PID, w.pid, os.WEXITED | os.WNOWAIT)
    time.sleep(0.3)  # torchrun polls, so it reaps a worker a moment after its end
codes = [] if how == "exit" else [w.wait() for w in workers]
while how == "hang":
    time.sleep(60)
sys.exit(1 if any(codes) else 0)
"""

# Every worker notes its pid, and that it is ready, in one step.
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
"""

ENDLESS = NOTE + "ready(); forever()"
STUBBORN = NOTE + "signal.signal(signal.SIGTERM, signal.SIG_IGN); ready(); forever()"
COUNTING = (
    NOTE
    + """
got = []
signal.signal(signal.SIGTERM, lambda *_: got.append(1))
ready()
while not got:
    signal.pause()
limit = time.monotonic() + 0.4  # time for a second one to arrive
while time.monotonic() < limit:
    time.sleep(0.05)
note(f"{rank}.count", len(got))
"""
)
# A grandchild that forks twice and opens a session of its own, and one that keeps its parent.
FAMILY = (
    NOTE
    + """
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
"""
)


class Tree:
    """One agent under its guardian."""

    def __init__(
        self, root, worker, count=2, how="wait", grace_s=5.0, command=None, cwd=None, silence_s=30.0, restarts=False
    ):
        self.root, self.count = root, count
        agent = write(root / "an agent's script.py", AGENT)
        script = write(root / "wörker & co.py", worker)
        self.logs = {stream: str(write(root / f"agent.{stream}", "")) for stream in ("stdout", "stderr")}
        env = {**os.environ, "NOTES": str(root)}
        for name in ("RANK", "LOCAL_RANK"):
            env.pop(name, None)
        self.events = queue.SimpleQueue()
        self.seen = []
        command = command or [*PYTHON, str(agent), str(script), str(count), how]
        self.process = AgentProcess(command, env, self.logs, grace_s, self.events.put, count, silence_s, restarts, cwd)
        self.started_at = time.monotonic()
        self.process.start()

    def expect(self, kind, deadline_s=20.0):
        deadline = time.monotonic() + deadline_s
        while True:
            event = self.events.get(timeout=max(0.01, deadline - time.monotonic()))
            self.seen.append(event)
            if event["event"] == kind:
                return event

    def await_pids(self, *names):
        """Return the pids that the scripts have noted."""
        names = names or [f"{rank}.pid" for rank in range(self.count)]
        paths = [self.root / name for name in names]
        eventually(lambda: all(path.exists() for path in paths), f"{names}", 20.0)
        return [int(path.read_text()) for path in paths]

    def await_workers(self):
        """Wait until the workers run and the guardian knows them; return their pids by local rank."""
        pids = self.await_pids()
        known = {}
        while len(known) < self.count:
            event = self.expect("worker")
            known[event["local_rank"]] = event["pid"]
        assert [known[rank] for rank in range(self.count)] == pids
        return pids

    def agent_pid(self):
        return next((e for e in self.seen if e["event"] == "agent"), None)["pid"]

    def ends(self):
        return {event["local_rank"]: event for event in self.seen if event["event"] == "worker_end"}

    def noted_pids(self):
        return [int(path.read_text()) for path in self.root.glob("*.pid")]

    def assert_gone(self):
        pids = self.noted_pids()
        eventually(lambda: not [pid for pid in pids if is_running(pid)], "the end of all processes", 5.0)


@pytest.fixture
def tree(tmp_path):
    made = []

    def start(worker=ENDLESS, **options):
        made.append(Tree(tmp_path, worker, **options))
        return made[-1]

    yield start
    for one in made:
        one.process.close(0.0)
        left = [pid for pid in one.noted_pids() if is_running(pid)]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left, "left running"


# --- the tree ends by itself -----------------------------------------------------------------------


def test_a_normal_end_is_reported_for_agent_and_workers(tree):
    one = tree(NOTE + "ready(); time.sleep(0.3)", count=3)
    end = one.expect("end")
    assert (end["status"], end["error"], end["left"]) == (0, None, [])
    assert {rank: event["status"] for rank, event in one.ends().items()} == {0: 0, 1: 0, 2: 0}
    assert {rank: event["rank"] for rank, event in one.ends().items()} == {0: 10, 1: 11, 2: 12}
    assert "stopping" not in [event["event"] for event in one.seen]


def test_a_workers_exit_code_is_seen_before_the_agent_ends(tree):
    one = tree(NOTE + "ready(); time.sleep(0.3 if rank == '1' else 600); sys.exit(7)", how="hang")
    event = one.expect("worker_end")
    assert (event["local_rank"], event["rank"], event["status"], event["stopped"]) == (1, 11, 7, False)
    assert is_running(one.agent_pid())
    one.process.stop(5.0)
    one.expect("end")


def test_a_killed_workers_signal_is_seen_at_once(tree):
    one = tree(how="hang")
    pids = one.await_workers()
    killed_at = time.monotonic()
    os.kill(pids[0], signal.SIGKILL)
    event = one.expect("worker_end")
    assert (event["local_rank"], event["status"], event["stopped"]) == (0, -signal.SIGKILL, False)
    assert event["t"] - killed_at < 1.0
    one.process.stop(5.0)
    one.expect("end")


def test_a_failing_agent_is_reported_with_its_code(tree):
    one = tree(NOTE + "ready(); time.sleep(0.3); sys.exit(3)", count=1)
    assert one.expect("agent_end")["status"] == 1
    assert one.expect("end")["status"] == 1


def test_what_the_workers_left_behind_is_stopped_and_named(tree):
    one = tree(FAMILY, count=1)
    end = one.expect("end")
    left = "\n".join(end["left"])
    for pid in one.await_pids("0.child.pid", "0.detached.pid"):
        assert str(pid) in left
    assert end["status"] == 0
    one.assert_gone()


def test_an_agent_that_forgets_its_workers_does_not_leave_them(tree):
    one = tree(how="exit")
    one.await_pids()
    assert one.expect("end")["status"] == 0
    one.assert_gone()


def test_the_agents_output_goes_to_its_files(tree, tmp_path):
    script = "import sys; print('größe'); print('oops', file=sys.stderr)"
    one = tree(command=[sys.executable, "-X", "utf8", "-c", script])
    one.expect("end")
    assert (tmp_path / "agent.stdout").read_text(encoding="utf-8") == "größe\n"
    assert (tmp_path / "agent.stderr").read_text(encoding="utf-8") == "oops\n"


def test_arguments_and_folder_reach_the_agent_unharmed(tree, tmp_path):
    folder = tmp_path / "a folder's $HOME"
    folder.mkdir()
    words = ["--grace", "--", "-x", "two words", 'q"', "$HOME", "", "größe\n"]
    script = "import json, os, sys; print(json.dumps([os.getcwd(), *sys.argv[1:]]))"
    one = tree(command=[*PYTHON, "-c", script, *words], cwd=str(folder))
    one.expect("end")
    assert json.loads((tmp_path / "agent.stdout").read_text()) == [str(folder), *words]


def test_workers_hear_signals_as_any_program_does(tree, tmp_path):
    heard = "note(f'{rank}.ignored', [s.name for s in signal.Signals if signal.getsignal(s) == signal.SIG_IGN])"
    tree(NOTE + heard + "; ready()", count=1).expect("end")
    ignored = (tmp_path / "0.ignored").read_text()
    assert "SIGINT" not in ignored
    assert "SIGTERM" not in ignored


# A step whose code ignores signals, as many do with SIGCHLD, and starts a launch in a thread that blocks all.
INSENSITIVE = """
import json, os, signal, sys
sys.path[:0] = {path!r}
from metaflow_extensions.torchrun.plugins.torchrun.process import AgentProcess
for number in signal.valid_signals() - {{signal.SIGKILL, signal.SIGSTOP}}:
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
logs = {{stream: os.path.join(sys.argv[1], "agent." + stream) for stream in ("stdout", "stderr")}}
say = lambda event: print(json.dumps(event), flush=True)
process = AgentProcess(sys.argv[2:], {{**os.environ, "NOTES": sys.argv[1]}}, logs, 1.0, say, 1, 30.0)
process.start()
print(json.dumps({{"event": "guardian", "pid": process._guardian.pid}}), flush=True)
process._reader.join()
"""
SENSITIVE = (
    NOTE
    + """
status = dict(line.split(":", 1) for line in open("/proc/self/status") if line.startswith("Sig"))
note("signals", status["SigIgn"].strip() + " " + status["SigBlk"].strip())
ready()
"""
)


@pytest.fixture
def insensitive(tmp_path):
    """Return a function that starts such a step's process."""
    started = []

    def start(worker):
        agent, script = write(tmp_path / "agent.py", AGENT), write(tmp_path / "worker.py", worker)
        code = INSENSITIVE.format(path=[path for path in sys.path if path])
        command = [sys.executable, "-c", code, str(tmp_path), *PYTHON, str(agent), str(script), "1", "wait"]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_what_the_step_ignores_and_blocks_reaches_neither_guardian_nor_workers(insensitive, tmp_path):
    output, _ = insensitive(SENSITIVE).communicate(timeout=30)
    events = [json.loads(line) for line in output.splitlines()]
    assert [(event["event"], event.get("status")) for event in events][-3:] == [
        *([("worker_end", 0)]),
        ("agent_end", 0),
        ("end", 0),
    ]
    ignored, blocked = (int(word, 16) for word in (tmp_path / "signals").read_text().split())
    own = 1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1  # Python's own
    # Those between SIGSYS and SIGRTMIN belong to the C library, whose posix_spawn ignores them: `make` starts us by it.
    own |= sum(1 << number - 1 for number in range(signal.SIGSYS + 1, signal.SIGRTMIN))
    assert (ignored & ~own, blocked) == (0, 0)


def test_a_guardian_whose_end_nobody_can_learn_is_not_said_to_have_ended_well(insensitive, tmp_path):
    task = insensitive(ENDLESS)
    guardian_pid = None
    for line in task.stdout:
        event = json.loads(line)
        guardian_pid = event["pid"] if event["event"] == "guardian" else guardian_pid
        if event["event"] == "worker":
            os.kill(guardian_pid, signal.SIGKILL)
        if event["event"] == "end":
            assert "how is not known" in event["error"]
    assert not is_running(int((tmp_path / "0.pid").read_text()))


@pytest.mark.parametrize("missing", ["/no such/python", "nowhere-to-be-found"])
def test_a_command_that_does_not_exist_is_an_end_with_an_error(missing, tree):
    end = tree(command=[missing, "x"]).expect("end")
    assert end["status"] is None
    assert "could not be started" in end["error"]
    assert missing in end["error"]


def test_a_folder_that_does_not_exist_is_an_end_with_an_error(tree, tmp_path):
    assert "could not be started" in tree(cwd=str(tmp_path / "gone")).expect("end")["error"]


# --- stopping --------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["wait", "hang"])
def test_every_worker_gets_sigterm_exactly_once_and_may_end_in_its_own_way(how, tree, tmp_path):
    one = tree(COUNTING, count=3, how=how)
    one.await_workers()
    one.process.stop(10.0)
    one.process.stop(10.0)
    one.expect("end")
    assert [(tmp_path / f"{rank}.count").read_text() for rank in range(3)] == ["1", "1", "1"]
    assert {rank: event["status"] for rank, event in one.ends().items()} == {0: 0, 1: 0, 2: 0}
    assert all(event["stopped"] for event in one.ends().values())
    assert time.monotonic() - one.started_at < 9.0  # it does not sit out the grace


def test_the_agent_can_not_meddle_while_its_workers_are_stopped(tree, tmp_path):
    hasty = COUNTING.replace("limit =", "if rank == '0':\n    sys.exit(0)\nlimit =")
    one = tree(hasty, count=2, how="meddle")
    one.await_workers()
    one.process.stop(10.0)
    one.expect("end")
    assert (tmp_path / "1.count").read_text() == "1"


def test_workers_that_obey_are_reported_as_stopped_by_sigterm(tree):
    one = tree(how="hang")
    one.await_workers()
    one.process.stop(10.0)
    one.expect("end")
    assert {(e["status"], e["stopped"]) for e in one.ends().values()} == {(-signal.SIGTERM, True)}
    one.assert_gone()


@pytest.mark.parametrize("how", ["wait", "hang"])
def test_a_worker_that_ignores_sigterm_is_killed_after_the_grace(how, tree):
    one = tree(STUBBORN, how=how)
    one.await_workers()
    begun = time.monotonic()
    one.process.stop(0.5)
    one.expect("end")
    assert 0.5 <= time.monotonic() - begun < 5.0
    assert {event["status"] for event in one.ends().values()} == {-signal.SIGKILL}
    one.assert_gone()


def test_a_worker_that_is_halted_is_stopped_too(tree):
    one = tree(how="hang")
    pids = one.await_workers()
    os.kill(pids[0], signal.SIGSTOP)
    begun = time.monotonic()
    one.process.stop(20.0)
    one.expect("end")
    assert time.monotonic() - begun < 10.0
    one.assert_gone()


def test_grandchildren_that_detached_themselves_are_found(tree):
    one = tree(FAMILY + "forever()", count=2, how="hang")
    one.await_workers()
    one.await_pids("0.child.pid", "0.detached.pid", "1.child.pid", "1.detached.pid")
    one.process.stop(0.3)
    one.expect("end")
    assert len(one.noted_pids()) == 7
    one.assert_gone()


def test_stop_before_the_workers_appear_leaves_nothing(tree):
    one = tree()
    one.process.stop(1.0)
    one.expect("end")
    one.assert_gone()


def test_close_waits_for_the_end_and_may_be_called_again(tree):
    one = tree(STUBBORN)
    one.await_workers()
    one.process.close(0.1)
    one.assert_gone()
    one.process.close(0.1)
    one.process.stop(0.1)


def test_a_process_that_was_never_started_can_be_closed(tmp_path):
    logs = {stream: str(tmp_path / stream) for stream in ("stdout", "stderr")}
    never = AgentProcess(["true"], {}, logs, 1.0, print, 1, 30.0)
    never.stop(1.0)
    never.close(1.0)


# --- sudden deaths -----------------------------------------------------------------------------------


def test_workers_of_a_killed_agent_are_stopped(tree):
    one = tree()
    one.await_workers()
    os.kill(one.agent_pid(), signal.SIGKILL)
    assert one.expect("agent_end")["status"] == -signal.SIGKILL
    assert one.expect("end")["status"] == -signal.SIGKILL
    assert {event["status"] for event in one.ends().values()} == {-signal.SIGTERM}
    one.assert_gone()


@pytest.mark.parametrize("worker", [ENDLESS, STUBBORN], ids=["obedient", "stubborn"])
def test_when_the_guardian_is_killed_the_task_cleans_up_and_says_so(worker, tree):
    one = tree(worker, how="hang", grace_s=0.5)
    one.await_workers()
    one.process._guardian.kill()
    end = one.expect("end")
    assert (end["status"], end["error"], end["guardian"]) == (None, None, -signal.SIGKILL)
    one.assert_gone()


def test_a_child_of_the_step_that_holds_the_guardians_pipes_does_not_hide_its_end(tree, monkeypatch):
    """It was forked in the very moment in which the guardian started, so that it has both ends of both pipes."""
    get_handles, held = subprocess.Popen._get_handles, []

    def get_and_hold(*args):
        handles = get_handles(*args)
        held.extend(os.dup(fd) for fd in handles[:4])
        return handles

    monkeypatch.setattr(subprocess.Popen, "_get_handles", get_and_hold)
    one = tree(how="hang", grace_s=0.5)
    monkeypatch.undo()
    one.await_workers()
    one.process._guardian.kill()
    assert one.expect("end", 10.0)["guardian"] == -signal.SIGKILL
    for fd in held:
        os.close(fd)


def test_whoever_has_got_the_number_of_a_process_that_is_gone_is_left_alone(tree):
    one = tree(how="hang", grace_s=0.2)
    one.await_workers()
    with subprocess.Popen(["sleep", "600"]) as stranger:
        one.process._tree[stranger.pid] = "1"  # as if a worker had had it, in the first 10 ms of this machine
        one.process._guardian.kill()
        one.expect("end")
        assert stranger.poll() is None
        stranger.kill()
    one.assert_gone()


TASK = """
import os, sys, time
sys.path[:0] = {path!r}
from metaflow_extensions.torchrun.plugins.torchrun.process import AgentProcess
root, grace, command = sys.argv[1], float(sys.argv[2]), sys.argv[3:]
logs = {{stream: os.path.join(root, "agent." + stream) for stream in ("stdout", "stderr")}}
scratch = [os.path.join(root, name) for name in ("scratch of logs", "scratch of a call")]
for folder in scratch:
    os.makedirs(os.path.join(folder, "values"))
task = AgentProcess(command, {{**os.environ, "NOTES": root}}, logs, grace, print, 2, {silence!r}, scratch=scratch)
task.start()
if {forks}:  # as data loaders and preprocessing of a step's own do; it has our pipes as well
    if os.fork() == 0:
        os.setsid()
        open(os.path.join(root, "forked"), "w").write(str(os.getpid()))
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("worker", "grace_s"),
    [(ENDLESS, 20.0), (STUBBORN, 0.5), (FAMILY + "forever()", 0.5)],
    ids=["calm", "stubborn", "family"],
)
def test_when_the_task_is_killed_nothing_of_it_stays(worker, grace_s, tmp_path):
    agent, script = write(tmp_path / "agent.py", AGENT), write(tmp_path / "worker.py", worker)
    command = [*PYTHON, str(agent), str(script), "2", "hang"]
    code = TASK.format(path=[path for path in sys.path if path], silence=30.0, forks=False)
    task = subprocess.Popen([sys.executable, "-c", code, str(tmp_path), str(grace_s), *command])
    try:
        notes = [tmp_path / name for name in ("0.pid", "1.pid", "agent.pid")]
        eventually(lambda: all(note.exists() for note in notes), "the workers", 20.0)
        tree = {child.pid for child in psutil.Process(task.pid).children(recursive=True)}
        tree |= {int(path.read_text()) for path in tmp_path.glob("*.pid")}
        assert len(tree) >= 4  # guardian, agent, two workers
    finally:
        task.kill()
        task.wait()
    assert len(list(tmp_path.glob("scratch of *"))) == 2  # while it lived, they were the task's own affair
    eventually(lambda: not [pid for pid in tree if is_running(pid)], "the end of everything", 10.0)
    assert not list(tmp_path.glob("scratch of *"))


def test_when_the_task_is_killed_a_child_that_it_forked_does_not_keep_its_workers(tmp_path):
    agent, script = write(tmp_path / "agent.py", AGENT), write(tmp_path / "worker.py", ENDLESS)
    code = TASK.format(path=[path for path in sys.path if path], silence=30.0, forks=True)
    task = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path), "5", *PYTHON, str(agent), str(script), "2", "hang"]
    )
    notes = [tmp_path / name for name in ("0.pid", "1.pid", "agent.pid", "forked")]
    try:
        eventually(lambda: all(note.exists() and note.read_text() for note in notes), "the workers", 20.0)
    finally:
        task.kill()
        task.wait()
    *pids, forked = [int(note.read_text()) for note in notes]
    try:
        eventually(lambda: not [pid for pid in pids if is_running(pid)], "the end of agent and workers", 3.0)
        assert is_running(forked)  # that is the step's own
    finally:
        os.kill(forked, signal.SIGKILL)


def test_when_the_task_is_frozen_its_workers_are_stopped(tmp_path):
    agent, script = write(tmp_path / "agent.py", AGENT), write(tmp_path / "worker.py", ENDLESS)
    code = TASK.format(path=[path for path in sys.path if path], silence=1.0, forks=False)
    task = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path), "5", *PYTHON, str(agent), str(script), "2", "hang"]
    )
    try:
        notes = [tmp_path / name for name in ("0.pid", "1.pid", "agent.pid")]
        eventually(lambda: all(note.exists() for note in notes), "the workers", 20.0)
        task.send_signal(signal.SIGSTOP)
        pids = [int(note.read_text()) for note in notes]
        eventually(lambda: not [pid for pid in pids if is_running(pid)], "the end of agent and workers", 10.0)
        assert psutil.Process(task.pid).status() == psutil.STATUS_STOPPED
    finally:
        task.kill()
        task.wait()


def test_a_guardian_that_is_told_to_end_says_so_and_stops_everything(tree):
    one = tree(how="hang")
    one.await_workers()
    one.process._guardian.terminate()
    one.expect("terminated")
    one.expect("end")
    assert {event["status"] for event in one.ends().values()} == {-signal.SIGTERM}
    one.assert_gone()


# --- frozen processes --------------------------------------------------------------------------------


@pytest.mark.parametrize("whom", ["worker", "agent"])
def test_a_process_that_somebody_stops_and_does_not_continue_is_told_once(whom, tree):
    one = tree(how="hang", silence_s=1.2)
    worker = one.await_workers()[1]
    frozen = worker if whom == "worker" else one.agent_pid()
    begun = time.monotonic()
    os.kill(frozen, signal.SIGSTOP)
    event = one.expect("frozen")
    assert time.monotonic() - begun >= 1.2
    assert (event["pid"], event["rank"], event["local_rank"]) == (
        frozen,
        *((11, 1) if whom == "worker" else (None, None)),
    )
    time.sleep(1.2)
    one.process.stop(5.0)
    one.expect("end")
    assert [e["event"] for e in one.seen].count("frozen") == 1
    assert {event["status"] for event in one.ends().values()} == {-signal.SIGTERM}  # the frozen one heard it, too


def test_a_process_that_is_continued_in_time_is_nothing_to_tell(tree):
    one = tree(how="hang", silence_s=2.0)
    worker = one.await_workers()[0]
    for _ in range(2):  # 2.6 s in all, but never 2 s on end
        os.kill(worker, signal.SIGSTOP)
        time.sleep(1.3)
        os.kill(worker, signal.SIGCONT)
        time.sleep(0.7)
    one.process.stop(5.0)
    one.expect("end")
    assert "frozen" not in [event["event"] for event in one.seen]


# --- looking for workers ------------------------------------------------------------------------------


def test_the_guardian_looks_ever_more_seldom_until_torchrun_makes_its_folders(tmp_path):
    """The agent imports torch meanwhile, which takes minutes where both have a tenth of a CPU."""
    words = ["--stdout", str(tmp_path / "out"), "--stderr", str(tmp_path / "err"), "--grace", "1"]
    words += ["--task", str(os.getpid()), "--workers", "1", "--silence", "30", "--", "sleep", "600"]
    one = guardian.Guardian(guardian._parse(words))
    one._start(one._options.argv)
    one._task_gone = True  # no commands are read here
    try:
        for _ in range(100):
            one._find_workers(one._agent.pid)
        assert one._search_s == guardian._WATCH_S
        for folder in ("launch0-0_x", "launch0-0_x/attempt_1"):  # of a first start, and of a restart
            one._wait(0.0)
            one._search_s = guardian._WATCH_S
            (tmp_path / folder).mkdir()
            begun = time.monotonic()
            one._wait(20.0)
            assert time.monotonic() - begun < 10.0
            assert one._search_s == guardian._SEARCH_S
    finally:
        one._agent.kill()
        one._agent.wait()
        for fd in (one._inotify, *one._pidfds):
            os.close(fd)


# --- preemption --------------------------------------------------------------------------------------

# Saves with the help of a child, as a data loader's or a compressor's, which a signal of its own would end.
SAVING = (
    NOTE
    + """
child = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import sys; sys.stdout.write(sys.stdin.read())"],
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
note(f"{rank}.child.pid", child.pid)
got = []
signal.signal(signal.SIGUSR1, lambda *_: got.append(1))
ready()
while not got:
    signal.pause()
time.sleep(0.5)
note(f"{rank}.saved", child.communicate("state")[0])
"""
)


def test_a_preemption_signals_the_workers_alone_and_gives_them_time(tree):
    one = tree(SAVING, how="hang")
    one.await_workers()
    one.process.preempt(10.0, signal.SIGUSR1)
    one.expect("end")
    assert {event["status"] for event in one.ends().values()} == {0}
    assert [(one.root / f"{rank}.saved").read_text() for rank in (0, 1)] == ["state", "state"]
    one.assert_gone()


def test_what_workers_leave_behind_after_a_preemption_does_not_use_up_the_grace(tree):
    one = tree(FAMILY + "forever()", how="hang")
    one.await_workers()
    begun = time.monotonic()
    one.process.preempt(60.0, signal.SIGTERM)
    one.expect("end")
    assert time.monotonic() - begun < 10
    one.assert_gone()


def test_workers_that_ignore_the_preemption_are_killed_after_the_grace(tree):
    one = tree(STUBBORN, how="hang")
    one.await_workers()
    one.process.preempt(0.5, signal.SIGTERM)
    one.expect("end")
    assert {event["status"] for event in one.ends().values()} == {-signal.SIGKILL}


# --- an agent that restarts its workers ---------------------------------------------------------------

RESTARTING = """
import os, subprocess, sys
for count in range(2):
    env = {**os.environ, "RANK": "10", "LOCAL_RANK": "0"}
    worker = subprocess.Popen([sys.executable, "-I", "-S", sys.argv[1]], start_new_session=True, env=env)
    worker.wait()
"""


def test_workers_of_a_second_round_are_found_too(tmp_path, tree):
    agent = write(tmp_path / "restarting.py", RESTARTING)
    command = [*PYTHON, str(agent), str(tmp_path / "wörker & co.py")]
    one = tree(NOTE + "ready(); time.sleep(0.5)", count=1, command=command, restarts=True)
    one.expect("end")
    assert len({event["pid"] for event in one.seen if event["event"] == "worker"}) == 2


# --- the process table -------------------------------------------------------------------------------


def test_living_descendants_are_all_and_only_the_living():
    script = "import subprocess, sys; print(subprocess.Popen(['sleep', '600']).pid, flush=True); sys.stdin.read()"
    with subprocess.Popen([*PYTHON, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        grandchild = int(child.stdout.readline())
        assert {child.pid, grandchild} <= set(guardian.living_descendants(os.getpid()))
        assert guardian.living_descendants(child.pid) == [grandchild]
        os.kill(grandchild, signal.SIGKILL)  # a zombie now: its parent does not look
        eventually(lambda: guardian.living_descendants(child.pid) == [], "the grandchild's end")
        child.kill()


def test_a_command_with_odd_characters_in_its_name_is_read(tmp_path):
    odd = tmp_path / "a) Z (b"
    odd.symlink_to("/bin/sleep")
    with subprocess.Popen([str(odd), "600"]) as child:
        eventually(lambda: child.pid in guardian.living_descendants(os.getpid()))
        child.kill()


def test_await_or_kill_waits_for_those_that_end_and_kills_those_that_do_not():
    quick, slow = subprocess.Popen(["sleep", "0.2"]), subprocess.Popen(["sleep", "600"])
    reapers = [threading.Thread(target=child.wait) for child in (quick, slow)]
    for reaper in reapers:
        reaper.start()
    guardian.await_or_kill({quick.pid, slow.pid}, 1.0)
    for reaper in reapers:
        reaper.join(10.0)
    assert (quick.returncode, slow.returncode) == (0, -signal.SIGKILL)


def test_the_guardian_needs_nothing_but_the_standard_library():
    done = subprocess.run([*PYTHON, guardian.__file__], capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 2
    assert "usage: guardian" in done.stderr
