"""Agents that are forked from a warm process, which has imported some module and no PyTorch."""

import ast
import json
import os
import queue
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import mypy
import pytest
from unit_helpers import eventually, is_running, write

from metaflow_extensions.torchrun.plugins import torchrun as package
from metaflow_extensions.torchrun.plugins.torchrun.launch.command import WORKER_HOOKS
from metaflow_extensions.torchrun.plugins.torchrun.machine.processes import children, living_descendants
from metaflow_extensions.torchrun.plugins.torchrun.node import guardian_process
from metaflow_extensions.torchrun.plugins.torchrun.node.agent import AgentProcess
from metaflow_extensions.torchrun.plugins.torchrun.node.agent_events import AgentStarted, End, Refused, WorkerStarted
from metaflow_extensions.torchrun.plugins.torchrun.node.guardian import Options
from metaflow_extensions.torchrun.plugins.torchrun.node.warm_start import WarmNode, WarmStart
from metaflow_extensions.torchrun.plugins.torchrun.scripts.warm_python import imports

# What an agent does in these tests: it tells what it sees, starts a worker where it is to, and waits where it is to.
AGENT = """
import json, os, subprocess, sys, time
out, what = sys.argv[1:3]
umask = os.umask(0)
seen = {"pid": os.getpid(), "parent": os.getppid(), "imported": "imported_early" in sys.modules, "umask": umask,
        "cwd": os.getcwd(), "env": dict(os.environ), "argv": sys.argv, "files": os.listdir("/proc/self/fd"),
        "cmdline": open("/proc/self/cmdline").read().split(chr(0))[:-1]}
worker = None
if what in ("worker", "wait"):
    env = {**os.environ, "RANK": "1", "LOCAL_RANK": "0"}
    worker = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"], env=env)
with open(out + ".part", "w") as file:
    json.dump(seen, file)
os.replace(out + ".part", out)
while what == "wait":
    time.sleep(60)
if what == "worker":
    time.sleep(0.3)  # so that the guardian sees it
    worker.terminate()
    worker.wait()
sys.exit(5 if what == "fail" else 0)
"""


class Warm:
    """A warm process with its guardian, and the agents that are asked of it one after the other."""

    def __init__(self, root, early="", modules=("imported_early",)):
        self.root, self.count = root, 0
        write(root / "imported_early.py", early)
        self.script = str(write(root / "agent.py", AGENT))
        self.env = {**os.environ, "PYTHONPATH": f"{WORKER_HOOKS}:{root}", "TORCHRUN_AGENT_PID": ""}
        self.node = WarmNode(modules, self.env)
        self.guardian = self.node.begin()
        self.agents = []

    def start(self, what="", env=None, **options):
        """Ask for an agent; return what its events come to."""
        self.count += 1
        out = self.root / f"seen-{self.count}.json"
        logs = [str(self.root / f"agent.{stream}") for stream in ("stdout", "stderr")]
        events = queue.SimpleQueue()
        options = Options(*logs, workers=1, **{"grace_s": 2.0, "silence_s": 30.0, **options})
        command = [sys.executable, self.script, str(out), what]
        agent = AgentProcess(command, {**self.env, **(env or {})}, options, events.put, WarmStart(self.node, command))
        self.agents.append(agent)
        agent.start()
        return Agent(agent, events, out)

    @property
    def process(self):
        """The pid of the warm process."""
        found = []
        eventually(lambda: found.extend(children(self.node._guardian.pid)) or found, "a warm process")
        return found[0]

    def close(self):
        for agent in self.agents:
            agent.close(0.0)
        self.node.close()
        for guardian in {self.guardian, self.node._guardian}:
            guardian.wait(10.0)


class Agent:
    """One agent and its events."""

    def __init__(self, process, events, out):
        self.process, self.out, self._events, self.seen = process, out, events, []

    def expect(self, kind):
        while True:
            event = self._events.get(timeout=20.0)
            self.seen.append(event)
            if isinstance(event, kind):
                return event

    def end(self):
        """Wait for its end; return what it has noted, with whether it was forked and its exit code."""
        end = self.expect(End)
        noted = json.loads(self.out.read_text())
        refused = [event.reason for event in self.seen if isinstance(event, Refused)]
        return {**noted, "status": end.status, "refused": refused[0] if refused else None}


@pytest.fixture
def warm(tmp_path):
    made = []

    def start(**options):
        made.append(Warm(tmp_path, **options))
        return made[-1]

    yield start
    for one in made:
        one.close()
        assert not living_descendants(one.guardian.pid)


def test_agents_are_forked_one_after_the_other_and_each_has_what_it_was_asked_with(warm, tmp_path):
    one = warm(early="print('said early')")
    folder = tmp_path / "another folder"
    folder.mkdir()
    first = one.start().end()
    umask = os.umask(0o013)
    try:
        second = one.start("fail", env={"SOME": "vÄlue"}, cwd=str(folder)).end()
    finally:
        os.umask(umask)
    assert [first["refused"], second["refused"]] == [None, None]
    assert [first["status"], second["status"]] == [0, 5]
    assert [first["imported"], second["imported"]] == [True, True]
    assert first["pid"] != second["pid"]
    assert first["parent"] == second["parent"] == one.guardian.pid
    assert (second["cwd"], second["umask"], first["umask"]) == (str(folder), 0o013, umask)
    assert second["env"]["SOME"] == "vÄlue"
    assert "SOME" not in first["env"]
    assert "TORCHRUN_WARM" not in first["env"]
    assert first["cmdline"] == [sys.executable, "-u", *first["argv"]]
    assert first["files"] == ["0", "1", "2", "3"]  # the fourth lists them
    assert (tmp_path / "agent.stdout").read_text() == "said early\n" * 2


def test_stopping_ends_all_but_the_warm_process(warm):
    one = warm()
    agent = one.start("wait")
    agent.expect(WorkerStarted)
    warm_process = one.process
    agent.process.stop(0.5)
    assert agent.end()["status"] == -signal.SIGKILL  # it is frozen first, as any agent
    assert living_descendants(one.guardian.pid) == [warm_process]
    assert one.start("worker").end()["refused"] is None
    assert one.process == warm_process


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        ({"PYTHONHASHSEED": "3"}, "PYTHONHASHSEED"),
        ({"READ_EARLY": "now"}, "READ_EARLY"),
        ({"OMP_NUM_THREADS": "7"}, None),  # for a worker it would count
        ({"RANK": "3"}, None),
    ],
)
def test_a_variable_that_counts_at_imports_starts_anew_and_another_warm_process_is_made_ready(warm, env, reason):
    one = warm(early="import os; os.environ.get('READ_EARLY')")
    begun = one.start(env=env).end()
    assert (begun["refused"] or "").partition(" ")[0] == (reason or "")
    assert begun["imported"] is (reason is None)
    assert begun["env"].items() >= env.items()
    again = one.start(env=env).end()
    assert (again["refused"], again["imported"]) == (None, True)


@pytest.mark.parametrize(
    ("module", "env", "reason"),
    [
        ("tqdm.utils", {"OF_THE_LAUNCH": "now"}, None),
        ("tqdm.utils", {"TQDM_ASCII": "1"}, "TQDM_ASCII"),
        ("another", {"OF_THE_LAUNCH": "now"}, "OF_THE_LAUNCH"),
    ],
)
@pytest.mark.parametrize("how", ["environ.items()", "environ.copy().items()"])
def test_who_goes_through_all_variables_and_wants_few_is_known(warm, tmp_path, monkeypatch, module, env, reason, how):
    monkeypatch.setenv("OF_THE_LAUNCH", "before")
    for name in ("tqdm/utils", "another"):
        write(tmp_path / f"{name}.py", f"import os\n{{k: v for k, v in os.{how} if k.startswith('TQDM_')}}\n")
    write(tmp_path / "tqdm" / "__init__.py", "")
    begun = warm(early=f"import {module}").start(env=env).end()
    assert (begun["refused"] or "").partition(" ")[0] == (reason or "")


@pytest.mark.parametrize(
    ("early", "reason"),
    [
        (
            "import threading, time; threading.Thread(target=time.sleep, args=[60], daemon=True).start()",
            "runs 1 threads",
        ),
        ("1 / 0", "imported_early could not be imported: ZeroDivisionError: division by zero"),
        ("import os; os._exit(3)", "has ended"),
        (
            "import os; os.write(2, b'no such device\\n'); os._exit(3)",
            "no such device",
        ),
    ],
)
def test_what_imports_do_that_no_fork_can_have_starts_anew(warm, early, reason):
    begun = warm(early=early).start().end()
    assert reason in begun["refused"]
    assert (begun["status"], begun["imported"]) == (0, False)


# What trackers do when they are imported: they see to it that the run is ended with the process, and told of errors.
TRACKER = """
import atexit, sys, weakref
class Run: pass
run = Run()
def say(what): print(what, flush=True)
atexit.register(say, "exit handler")
weakref.finalize(run, say, "finalizer")
sys.excepthook = lambda *_: say("hook")
"""


@pytest.mark.parametrize(("preload", "told"), [(["tracker"], []), ([], ["hook", "exit handler", "finalizer"])])
def test_what_preloaded_modules_do_at_the_end_is_not_done_by_agents(warm, tmp_path, preload, told):
    """An agent that imports one itself has it, as any program."""
    write(tmp_path / "tracker.py", TRACKER)
    one = warm(modules=preload)
    write(
        one.root / "agent.py",
        f"import sys\nassert ('tracker' in sys.modules) is {bool(preload)}\nimport tracker\n1 / 0",
    )
    one.start().expect(End)
    lines = (tmp_path / "agent.stdout").read_text().splitlines()
    assert sorted(lines) == sorted(told)


def test_a_worker_that_is_forked_has_them_all(tmp_path):
    write(tmp_path / "tracker.py", TRACKER)
    script = "import sys; from warm_python.imports import ExitHandlers; handlers = ExitHandlers()\n"
    script += "with handlers: import tracker\nif sys.argv[1:]: handlers.forget()\nimport weakref, tempfile\n"
    script += "own = tempfile.TemporaryDirectory(); print(own.name)\n1 / 0"
    told = []
    for words in ([], ["an agent"]):
        path = f"{os.path.dirname(WORKER_HOOKS)}:{tmp_path}"
        run = subprocess.run(
            [sys.executable, "-c", script, *words],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
        )
        folder, *lines = run.stdout.splitlines()
        assert not os.path.exists(folder)  # the standard library's own handlers stay
        told.append((sorted(lines), "ZeroDivisionError" in run.stderr))
    assert told == [(["exit handler", "finalizer", "hook"], False), ([], True)]


def optional_names():
    """Return what the package uses of Python that a Linux Python may lack, as (module, name).

    Typeshed knows which names a Python has on some systems only; the last ones need not be there on Linux either.
    """
    found = {("os", "pread"), ("socket", "send_fds"), ("socket", "recv_fds")}
    used = {
        (node.value.id, node.attr)
        for path in Path(package.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    stubs = Path(mypy.__file__).parent / "typeshed" / "stdlib"
    for module in ("os", "socket", "select", "signal", "fcntl", "resource"):
        for path in (stubs / f"{module}.pyi", stubs / f"_{module}.pyi", stubs / module / "__init__.pyi"):
            tree = ast.parse(path.read_text(encoding="utf-8") if path.exists() else "")
            found |= {(module, name) for name in names_of_some_systems(tree.body)} & used
    return sorted(found)


def names_of_some_systems(body, some=False):
    for node in body:
        if isinstance(node, ast.If):
            here = some or any(system in ast.unparse(node.test) for system in ("'linux'", "'darwin'"))
            yield from names_of_some_systems([*node.body, *node.orelse], here)
        elif some:
            targets = getattr(node, "targets", [getattr(node, "target", None)])
            aliases = getattr(node, "names", ())
            yield from [getattr(node, "name", None), *(getattr(each, "id", None) for each in targets)]
            yield from [each.asname or each.name for each in aliases]


@pytest.mark.parametrize(("module", "name"), optional_names())
def test_a_python_without_it_starts_agents_all_the_same(module, name, warm, tmp_path, monkeypatch):
    """In the task, in the guardian, in the warm process and in the agent."""
    remove = f"import {module}\nif hasattr({module}, {name!r}): del {module}.{name}\n"
    write(tmp_path / "sitecustomize.py", remove)
    monkeypatch.setattr(guardian_process, "_MAIN", remove + guardian_process._MAIN)
    monkeypatch.delattr(sys.modules[module], name)
    one = warm()
    begun = one.start("worker").end()
    cold = name in ("pread", "recv_fds", "send_fds")  # these can't be done without
    assert (f"AttributeError: module '{module}'" in (begun["refused"] or ""), begun["status"]) == (cold, 0)
    monkeypatch.setattr(one.node, "begin", None)
    again = one.start("worker").end()
    assert (again["refused"], again["status"]) == ("TypeError: 'NoneType' object is not callable", 0)


def test_a_module_that_has_changed_since_starts_anew(warm, tmp_path):
    one = warm()
    assert one.start().end()["refused"] is None
    write(tmp_path / "imported_early.py", "changed = True")
    assert one.start().end()["refused"].endswith("imported_early.py has changed since it was imported")
    assert one.start().end()["refused"] is None


def test_what_the_step_has_changed_of_what_programs_inherit_starts_anew(warm):
    one = warm()
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0 if soft else min(4096, hard) if hard > 0 else hard, hard))
    try:
        begun = one.start().end()
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))
    assert begun["refused"] == "RLIMIT_CORE changed after the step had begun"


def test_a_warm_process_that_was_killed_is_replaced(warm):
    one = warm()
    assert one.start().end()["refused"] is None
    os.kill(one.process, signal.SIGKILL)
    assert "ended" in one.start().end()["refused"]
    assert one.start().end()["refused"] is None


def test_a_guardian_that_was_killed_takes_its_warm_process_with_it_and_is_replaced(warm):
    one = warm()
    agent = one.start("wait")
    started = agent.expect(AgentStarted)
    agent.expect(WorkerStarted)
    warm_process = one.process
    os.kill(one.guardian.pid, signal.SIGKILL)
    assert agent.expect(End).guardian_gone
    eventually(lambda: not is_running(warm_process) and not is_running(started.pid), "the end of all")
    assert one.start().end()["refused"] is None


def test_a_guardian_that_dies_before_it_has_forked_anything_is_no_failure(warm):
    one = warm()
    one.start().end()
    os.kill(one.guardian.pid, signal.SIGSTOP)
    agent = one.start()
    os.kill(one.guardian.pid, signal.SIGKILL)
    end = agent.end()
    assert (end["refused"], end["status"]) == ("the guardian of the warm process has ended", 0)
    assert one.start().end()["refused"] is None


def test_an_agent_that_can_be_started_in_no_way_comes_to_an_end(warm, monkeypatch):
    one = warm(early="1 / 0")

    def fail(*_):
        raise BlockingIOError(11, "no more processes")

    monkeypatch.setattr(AgentProcess, "_own_guardian", fail)
    agent = one.start()
    assert "no more processes" in agent.expect(End).error


def test_a_launch_that_is_stopped_while_torch_is_imported_does_not_wait_for_it(warm):
    one = warm(early="import time; time.sleep(30)")
    begun = time.monotonic()
    agent = one.start("wait")
    agent.process.stop(0.1)
    agent.expect(End)
    assert time.monotonic() - begun < 15.0
    assert [event.reason for event in agent.seen if isinstance(event, Refused)] == [
        "torch was not imported before the launch was stopped"
    ]


def test_it_imports_with_the_lowest_priority_and_forks_with_the_tasks(warm, tmp_path):
    imported = tmp_path / "imported"
    early = f"import os; priority = os.getpriority(os.PRIO_PROCESS, 0); open({str(imported)!r}, 'w')"
    one = warm(early=early)
    write(
        one.root / "agent.py",
        "import imported_early, json, os, sys\n"
        "json.dump([imported_early.priority, os.getpriority(os.PRIO_PROCESS, 0)], open(sys.argv[1], 'w'))",
    )
    eventually(imported.exists, "the import")  # a request would hurry it
    agent = one.start()
    agent.expect(End)
    assert json.loads(agent.out.read_text()) == [19, os.getpriority(os.PRIO_PROCESS, 0)]


@pytest.mark.parametrize(("own", "may_raise", "then"), [(0, True, 19), (0, False, 5), (19, False, 19)])
def test_who_may_not_raise_its_priority_again_lowers_it_less(monkeypatch, own, may_raise, then):
    nice = [own]

    def set_priority(which, who, value):
        if value < nice[-1] and not may_raise:
            raise PermissionError(13, "not permitted")
        nice.append(value)

    monkeypatch.setattr(os, "setpriority", set_priority)
    monkeypatch.setattr(os, "getpriority", lambda which, who: nice[-1])
    imports.lower_priority()
    assert nice[-1] == then


def test_nothing_stays_when_the_task_is_killed_and_another_process_holds_its_pipes(tmp_path):
    """Also before any agent is asked for, and while imports go on."""
    write(tmp_path / "imported_early.py", "import time; time.sleep(60)")
    env = {**os.environ, "PYTHONPATH": f"{WORKER_HOOKS}:{tmp_path}"}
    task = (
        "import os, sys, time\n"
        "from metaflow_extensions.torchrun.plugins.torchrun.node.warm_start import WarmNode\n"
        f"node = WarmNode(['imported_early'], {env!r})\n"
        "print(node.begin().pid, flush=True)\n"
        "print(os.fork() or time.sleep(600) or 0, flush=True)\n"
        "time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", task], stdout=subprocess.PIPE, text=True) as process:
        guardian, forked = int(process.stdout.readline()), int(process.stdout.readline())
        tree = []
        eventually(lambda: len(tree) > 1 or tree.extend(living_descendants(guardian)) or tree, "a warm process")
        process.kill()
        process.wait()
        eventually(lambda: not any(map(is_running, [guardian, *tree])), "the end of all")
        os.kill(forked, signal.SIGKILL)


def test_the_end_of_the_step_ends_it_at_once(warm):
    one = warm()
    warm_process = one.process
    begun = time.monotonic()
    one.node.close()
    eventually(lambda: not is_running(warm_process), "its end")
    assert time.monotonic() - begun < 2.0
