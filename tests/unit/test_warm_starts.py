"""Agents and workers that were spares: a package of the tests stands for torch, and imports in no time."""

import os
import resource
import signal
import sys
from pathlib import Path

import pytest
from unit_helpers import eventually, is_running, write
from warm_nodes import Warm

from metaflow_extensions.torchrun.plugins.torchrun.launch.command import AGENT
from metaflow_extensions.torchrun.plugins.torchrun.machine.inherited import umask
from metaflow_extensions.torchrun.plugins.torchrun.machine.processes import living_descendants
from metaflow_extensions.torchrun.plugins.torchrun.node.agent_events import (
    End,
    Refused,
    WorkerStarted,
)


@pytest.fixture
def warm(tmp_path):
    made = []

    def start(**options):
        made.append(Warm(tmp_path, **options))
        return made[-1]

    yield start
    for one in made:
        one.close()


LONG = {f"LONG_{number}": "x" * 100_000 for number in range(10)}  # more than a socket or a pipe keeps
IN_SPARE = "'spare.py' in open('/proc/self/cmdline').read()"
NEVER_IMPORTED = f"import time\nif {IN_SPARE}: time.sleep(3600)\n"


def test_agents_become_of_spares_and_each_has_what_it_was_asked_with(warm, tmp_path):
    one = warm(in_agent="print('said early')\n")
    folder = tmp_path / "another folder"
    folder.mkdir()
    one.spares()
    agent = one.start()
    first = agent.end()
    second = one.start("fail", env={"SOME": "vÄlue", **LONG}, cwd=str(folder), umask=0o013).end()
    assert [(each["refused"], each["imported"], each["status"]) for each in (first, second)] == [
        (None, True, 0),
        (None, True, 5),
    ]
    assert first["parent"] == one.supervised.pid
    assert first["main"] == AGENT
    assert (second["cwd"], second["umask"], first["umask"]) == (str(folder), 0o013, umask())
    assert second["env"].items() >= {"SOME": "vÄlue", **LONG}.items()
    assert not {"SOME", "TORCHRUN_SPARE"} & set(first["env"])
    assert first["env"]["TORCHRUN_AGENT_PID"] == str(first["pid"])
    assert first["argv"][0] == AGENT
    assert first["argv"][1:3] == [str(agent.out), ""]
    assert (tmp_path / "agent.stdout").read_text() == "said early\n" * 2


def test_workers_become_of_spares(warm, tmp_path):
    one = warm(workers=2, early="print('early')")
    spares = one.spares()
    agent = one.start(env={"SEEN": "1"})
    seen = agent.end()
    assert (seen["refused"], seen["status"], seen["left"]) == (None, 0, [])
    started = [event for event in agent.seen if isinstance(event, WorkerStarted)]
    assert {seen["pid"], *(event.pid for event in started)} == set(spares)
    assert sorted((event.rank, event.local_rank) for event in started) == [(4, 0), (5, 1)]
    assert [type(event).__name__ for event in agent.seen].count("WorkerEnded") == 2
    for local_rank in (0, 1):
        assert agent.worker(local_rank) == {
            "argv": [one.script, "löss", ""],
            "orig_argv": [sys.executable, "-u", one.script, "löss", ""],
            "path": str(tmp_path / "scripts"),
            "name": "__main__",
            "file": one.script,
            "imported": True,
            "early": True,
            "rank": str(4 + local_rank),
            "agent": str(seen["pid"]),
            "spare": False,
            "parent": seen["pid"],
            "seen": "1",
            "files": ["0", "1", "2", "3"],  # the last lists them
            "mp": False,
        }
        assert Path(f"{agent.out}.{local_rank}.out").read_text().startswith("early\n{")
        assert Path(f"{agent.out}.{local_rank}.err").read_text() == "to stderr\n"


@pytest.mark.parametrize(("count", "warm_ones"), [(1, 1), (3, 2)])
def test_more_or_fewer_workers_than_spares_all_start(warm, count, warm_ones):
    one = warm(workers=2)
    spares = one.spares()
    agent = one.start(workers=count)
    seen = agent.end()
    assert (seen["refused"], seen["status"], seen["left"]) == (None, 0, [])
    pids = {event.pid for event in agent.seen if isinstance(event, WorkerStarted)}
    assert sum(agent.worker(rank)["early"] for rank in range(count)) == warm_ones
    assert len(pids & set(spares)) == warm_ones
    assert not any(map(is_running, spares))


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("{root}/broken.py", "SyntaxError"),
        ("{root}/no such.py", "no such.py is not a file"),
        ("{root}/beside", "beside is not a file"),
        ("{root}/beside/program.py", "would be imported instead of"),
        ("-x.py", "it runs"),  # the interpreter takes it for an option
    ],
)
def test_a_script_that_a_spare_can_not_become_starts_cold(warm, tmp_path, script, reason):
    write(tmp_path / "broken.py", "if True print(1)")
    write(tmp_path / "-x.py", "")
    write(tmp_path / "beside" / "program.py", "")
    write(tmp_path / "beside" / "imported_early.py", "")
    one = warm(workers=1)
    one.spares()
    one.start(script=[script.format(root=tmp_path)], cwd=str(tmp_path)).end()
    told = (tmp_path / "agent.stderr").read_text()
    assert told.startswith("A worker starts cold: ")
    assert reason in told


def test_a_search_path_that_another_folder_or_no_folder_changes_means_a_cold_start(warm, tmp_path):
    (tmp_path / "other").mkdir()
    one = warm()
    one.env["PYTHONPATH"] += ":lib"
    one.start().end()
    assert one.start().end()["refused"] is None
    refused = one.start(cwd=str(tmp_path / "other")).end()["refused"]
    assert refused == "lib in PYTHONPATH is relative to another working directory"
    if sys.version_info >= (3, 11):
        for _ in range(2):
            refused = one.start(env={"PYTHONSAFEPATH": "1"}).end()["refused"]
        assert refused == "PYTHONSAFEPATH is set"


def test_stopping_ends_all_but_the_next_spare(warm):
    one = warm(workers=1)
    one.spares()
    agent = one.start("wait")
    agent.expect(WorkerStarted)
    next_one = one.spares()
    agent.stop(0.5)
    assert agent.end()["status"] == -signal.SIGKILL  # it is frozen first, as any agent
    assert sorted(living_descendants(one.supervised.pid)) == sorted(next_one)
    assert one.start().end()["refused"] is None


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        ({"PYTHONHASHSEED": "3"}, "PYTHONHASHSEED"),
        ({"TORCH_HOME": "now"}, "TORCH_HOME"),
        ({"IN_AGENT_LEVEL": "now"}, None),
        ({"OMP_NUM_THREADS": "7"}, None),  # for a worker it would count
        ({"TORCH_NCCL_BLOCKING_WAIT": "1"}, None),  # is read later
        ({"RANK": "3"}, None),
    ],
)
def test_a_variable_that_counts_at_imports_means_a_cold_start_and_the_next_spare_has_it(warm, env, reason):
    one = warm()
    begun = one.start(env=env).end()
    assert (begun["refused"] or "").partition(" ")[0] == (reason or "")
    assert begun["imported"] is (reason is None)
    assert begun["env"].items() >= env.items()
    again = one.start(env=env).end()
    assert (again["refused"], again["imported"]) == (None, True)


@pytest.mark.parametrize(("name", "counts"), [("OMP_NUM_THREADS", True), ("TQDM_ASCII", True), ("ANOTHER_ONE", False)])
def test_what_counts_for_workers_means_cold_workers(warm, tmp_path, name, counts):
    """A package's own variables begin with its name."""
    write(tmp_path / "tqdm.py", "")
    one = warm(workers=1, early="import tqdm")
    one.spares()
    if counts:
        assert one.cold_worker(env={name: "77"}) == f"{name} had another value when torch was imported."
    else:
        agent = one.start(env={name: "77"})
        assert (agent.end()["refused"], agent.worker()["early"]) == (None, True)


def test_a_variable_that_a_pth_file_reads_when_python_starts_means_cold_workers(warm, tmp_path):
    """As coverage's; Python has executed it before the spare could know."""
    write(tmp_path / "tracer.pth", "# 'A_COMMENT'\nimport os; exec(\"os.environ.get(\\'TRACER_STARTS\\')\")\n")
    one = warm(workers=1)
    one.spares()
    agent = one.start(env={"A_COMMENT": "1"})
    assert (agent.end()["refused"], agent.worker()["early"]) == (None, True)
    one.spares()
    assert one.cold_worker(env={"TRACER_STARTS": "1"}) == "TRACER_STARTS had another value when torch was imported."


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("1 / 0", "torch.distributed.run could not be imported: ZeroDivisionError: division by zero"),
        ("import os; os._exit(3)", "the spare process has ended"),
        ("import os; os.write(2, b'no such device\\n'); os._exit(3)", "no such device"),
    ],
)
def test_imports_that_fail_mean_a_cold_start(warm, code, reason):
    begun = warm(in_agent=f"if {IN_SPARE}: {code}\n").start().end()
    assert reason in begun["refused"]
    assert (begun["status"], begun["imported"]) == (0, False)


PRELOAD = """
import os, sys, tempfile
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "lib"))
os.environ["SET_BY_IMPORT"] = os.environ.setdefault("SET_BEFORE", "by import")
os.environ["OMP_NUM_THREADS"] = "7"
os.environ.pop("TAKEN_AWAY", None)
tempfile.gettempdir()
"""
SEES = """
import imported_early, beside, os, sys, tempfile, only_in_lib
names = ("SET_BY_IMPORT", "SET_BEFORE", "OMP_NUM_THREADS", "TAKEN_AWAY")
print([os.environ.get(name) for name in names], only_in_lib.__file__, beside.__file__, __file__)
print(tempfile.gettempdir(), sys.path)
"""


@pytest.mark.parametrize("env", [{}, {"TMPDIR": "{root}/other"}, {"SET_BEFORE": "by launch"}])
def test_what_imports_have_set_is_what_the_program_finds_cold(warm, tmp_path, env, monkeypatch):
    monkeypatch.setenv("TAKEN_AWAY", "here before")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    write(tmp_path / "lib" / "only_in_lib.py", "")
    write(tmp_path / "scripts" / "beside.py", "")
    script = str(write(tmp_path / "scripts" / "sees.py", SEES))
    os.makedirs(tmp_path / "other")
    one = warm(workers=1, early=PRELOAD)
    env = {name: value.format(root=tmp_path) for name, value in env.items()}
    seen = []
    for count in (1, 2):  # the second worker is a cold one
        one.spares()
        agent = one.start(workers=count, script=[f"{tmp_path}/lib/../scripts/sees.py"], env=env)
        assert agent.end()["status"] == 0, agent.written(0, "err")
        seen += [agent.written(rank, "out") for rank in range(count)]
    assert script.encode() not in seen[0]  # it is told as it was asked for
    assert len(set(seen)) == 1


def test_a_package_that_was_installed_since_means_a_cold_start(warm, tmp_path):
    packages = tmp_path / "site-packages"
    packages.mkdir()
    one = warm(workers=1)
    one.do("node.close()")
    one.env["PYTHONPATH"] += f":{packages}"
    one.prepare_anew()
    one.spares()
    write(packages / "installed.py", "")
    assert one.cold_worker() == f"{packages} has changed since it was imported."


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


def test_what_preloaded_modules_do_at_the_end_is_done_by_workers_alone(warm, tmp_path):
    write(tmp_path / "tracker.py", TRACKER)
    write(tmp_path / "fails.py", "import tracker\n1 / 0")
    one = warm(preload=["tracker"], workers=1)
    one.spares()
    agent = one.start(script=[str(tmp_path / "fails.py")])
    agent.end()
    assert sorted(Path(f"{agent.out}.0.out").read_text().split("\n")) == ["", "exit handler", "finalizer", "hook"]
    assert (tmp_path / "agent.stdout").read_text() == ""


@pytest.mark.parametrize(
    ("name", "is_cold"),
    [
        ("os.sched_getaffinity", True),
        ("os.pread", True),
        ("socket.send_fds", True),
        ("socket.recv_fds", True),
        ("os.pidfd_open", False),
    ],
)
def test_a_python_without_it_starts_agents_all_the_same(name, is_cold, warm, tmp_path):
    """In the supervisor, in the spares and in the agent: conda's Pythons lack some."""
    module, _, function = name.partition(".")
    remove = f"import {module}\nif hasattr({module}, {function!r}): del {name}\n"
    write(tmp_path / "sitecustomize.py", remove)
    one = warm(workers=1, before=remove)
    agent = one.start()
    begun = agent.end()
    assert (f"AttributeError: module '{module}'" in (begun["refused"] or ""), begun["status"]) == (is_cold, 0)
    assert agent.worker()["rank"] == "4"


def test_what_has_changed_since_the_spare_was_started_means_a_cold_start_and_the_next_is_warm(warm, tmp_path):
    one = warm()
    one.spares()
    with open(tmp_path / "torch" / "distributed" / "run.py", "a") as file:
        file.write("# changed\n")
    assert one.start().end()["refused"].endswith("run.py has changed since it was imported")
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    other = [0 if soft else min(4096, hard) if hard > 0 else hard, hard]
    one.do("resource.setrlimit(resource.RLIMIT_CORE, tuple(limits))", limits=other)
    begun = one.start().end()
    assert one.start().end()["refused"] is None
    assert begun["refused"] == "RLIMIT_CORE changed after the step had begun"


def test_who_was_killed_while_it_waited_is_replaced(warm):
    one = warm(workers=1)
    os.kill(max(one.spares()), signal.SIGKILL)  # the worker
    assert one.cold_worker().startswith("the spare process has ended")
    os.kill(min(one.spares()), signal.SIGKILL)  # the next agent
    agent = one.start()
    begun = agent.end()
    assert (begun["refused"] is None, begun["status"]) == (begun["imported"], 0)  # cold, if its death was not yet known
    assert agent.worker()["rank"] == "4"
    assert one.start().end()["refused"] is None


def test_a_spare_that_does_not_answer_is_given_up(warm):
    before = "from ours.features.warm import node as module\nmodule.ANSWER_S = 0.3\n"
    one = warm(in_agent=NEVER_IMPORTED, before=before)
    spare = one.pid
    seen = one.start(env=LONG).end()
    assert seen["refused"].startswith("within 60 s it did not answer; it imports torch.distributed.run")
    assert seen["status"] == 0
    eventually(lambda: not is_running(spare), "its end")


def test_what_can_neither_be_asked_for_nor_be_started_is_an_end(warm):
    one = warm(in_agent=NEVER_IMPORTED, before="from ours.features.warm import node as module\nmodule.ANSWER_S = 0.3\n")
    agent = one.start(env={"A": "zero\0byte"})
    end = agent.expect(End)
    assert end.error == "could not be started: embedded null byte"


def test_a_spare_that_is_killed_while_it_imports_means_a_cold_start(warm):
    one = warm(in_agent=NEVER_IMPORTED)
    dying = one.pid
    agent = one.start()
    os.kill(dying, signal.SIGKILL)
    end = agent.end()
    assert (end["status"], end["imported"], end["refused"]) == (0, False, "the spare process has ended")


def test_a_dead_spare_whose_socket_somebody_holds_is_noticed(warm, tmp_path):
    pids = tmp_path / "pids"
    early = "import os, time\nspare = os.getpid()\nif os.fork() == 0:\n"
    early += f"    open({str(pids)!r}, 'w').write(f'{{spare}} {{os.getpid()}}.')\n    time.sleep(100)\n    os._exit(0)"
    one = warm(workers=1, early=early)
    eventually(lambda: pids.exists() and pids.read_text().endswith("."), "the import")
    dead, forked = map(int, pids.read_text().strip(".").split())
    os.kill(dead, signal.SIGKILL)
    assert one.cold_worker().startswith("the spare process has ended")
    eventually(lambda: not is_running(forked), "the end of what the spare has started")


def test_spares_are_not_what_workers_have_left_running(warm):
    one = warm(workers=2, early="import time; time.sleep(5)")
    eventually(lambda: len(living_descendants(one.pid)) == 2, "spares that import")
    agent = one.start("early")  # it ends before it has started any
    assert agent.expect(End).left == []


def test_an_import_that_keeps_stdout_means_a_cold_start(warm):
    one = warm(workers=1, early="import os; file = os.fdopen(os.dup(1), 'w')")
    one.spares()
    assert one.cold_worker().startswith("an import keeps a copy of stdout")


def test_a_launch_that_is_stopped_while_torch_is_imported_does_not_wait_for_it(warm):
    agent = warm(in_agent=NEVER_IMPORTED).start("wait")
    agent.stop(0.1)
    assert agent.expect(End).error == "was stopped before it had started"
    assert not [event for event in agent.seen if isinstance(event, Refused)]  # nobody wants to know


def test_no_spare_stays_when_the_supervisor_is_killed_while_it_imports(tmp_path):
    one = Warm(tmp_path, in_agent=NEVER_IMPORTED, workers=1)
    spare = one.pid
    one.supervised.kill()
    eventually(lambda: not is_running(spare) and one.supervised.has_ended, "the end of all")
