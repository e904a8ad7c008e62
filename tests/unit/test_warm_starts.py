"""Agents and workers that were spares: a package of the tests stands for torch, and imports in no time."""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from limits import limit_s
from supervised import Supervised
from unit_helpers import HANG_S, eventually, is_running, write

from metaflow_extensions.torchrun.plugins.torchrun.machine.processes import living_descendants
from metaflow_extensions.torchrun.plugins.torchrun.supervisor import command as launch_command
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.agent import End, Refused, WorkerStarted

STAND_IN = Path(__file__).parents[1] / "stand_in" / "torch"
# What stands for torchrun: it tells what it sees, starts workers, and waits where it is to.
AGENT = """
import json, os, subprocess, sys, time
from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

def main():
    out, what, count, *script = sys.argv[1:]
    seen = {"imported": "spare.py" in open("/proc/self/cmdline").read(), "env": dict(os.environ)}
    with open(out + ".part", "w") as file:
        json.dump(seen, file)
    os.replace(out + ".part", out)
    if what == "early":
        sys.exit(3)
    workers = []
    for rank in range(int(count)):
        folder = f"{out}.{rank}"
        os.makedirs(folder)
        env = {**os.environ, "RANK": str(rank + 4), "LOCAL_RANK": str(rank)}
        env["TORCHELASTIC_ERROR_FILE"] = os.path.join(folder, "error.json")
        with open(f"{out}.{rank}.out", "w") as stdout, open(os.devnull, "w") as stderr:
            workers.append(SubprocessHandler([sys.executable, "-u", *script], env, stdout, stderr).proc)
    while what == "wait":
        time.sleep(60)
    sys.exit(5 if any([worker.wait() for worker in workers]) else 0)

if __name__ == "__main__":
    main()
"""
WORKER = """
import json, os, sys
seen = {"imported": "torch.distributed" in sys.modules, "early": "imported_early" in sys.modules}
print(json.dumps({**seen, "rank": os.environ.get("RANK")}), flush=True)
"""


class Warm:
    """The spares of one node, and the agents that are asked of them one after the other."""

    def __init__(self, root, early="", in_agent="", preload=("imported_early",), workers=0, before=""):
        self.root, self.count, self.workers = root, 0, workers
        write(root / "imported_early.py", early)
        shutil.copytree(STAND_IN, root / "torch")
        write(root / "torch" / "distributed" / "run.py", in_agent + AGENT)
        self.script = str(write(root / "scripts" / "worker.py", WORKER))
        self.env = {**os.environ, "PYTHONPATH": f"{launch_command.WORKER_HOOKS}:{root}"}
        os.mkfifo(root / "agent.workers")
        self.supervised = Supervised(before)
        code = "global node; node = WarmNode(preload, env, workers); node.prepare()"
        self.do(code, preload=preload, env=self.env, workers=workers)

    def do(self, what, **values):
        """Have code executed in the process that stands for the supervisor."""
        self.supervised.ask("do(what, **values)", what=what, values=values)

    @property
    def pid(self):
        """The pid of the spare that waits."""
        return self.supervised.ask("node._waiting.process.pid")

    def start(self, what="", env=None, workers=None, script=None, **options):
        """Ask for an agent; return what its events come to."""
        self.count += 1
        out = self.root / f"seen-{self.count}.json"
        logs = {stream: str(self.root / f"agent.{stream}") for stream in ("stdout", "stderr")}
        count = self.workers if workers is None else workers
        options = {**logs, "news": str(self.root / "agent.workers"), "grace_s": 2.0, **options}
        words = [str(out), what, str(count), *(script or [self.script, "löss", ""])]
        told = {
            "command": [sys.executable, launch_command.AGENT, str(self.root), str(launch_command.HALT_SIGNAL), *words],
            "env": {**self.env, **(env or {})},
            "options": options,
            "warm": count if self.workers else 0,
        }
        self.do(f"start({self.count}, command, env, options, warm)", **told)
        self.do("node.prepare()")  # it has asked the first one by now
        return Agent(self.supervised, self.count, out)

    def spares(self):
        """Return the pids of the spare agent that waits, and of its workers, once all of them have imported."""
        found = []

        def all_wait():
            found[:] = [self.pid, *living_descendants(self.pid)]
            return len(found) == 1 + self.workers and all(map(waits, found))

        eventually(all_wait, "all spares")
        return found

    def close(self):
        """End all; at the end of a step, all spares end at once."""
        tree = living_descendants(self.supervised.pid)
        self.supervised.ask("node.close()")
        self.supervised.close()
        eventually(lambda: not [pid for pid in tree if is_running(pid)], "the end of all")


def waits(pid):
    """Tell whether a spare waits for its request, in recvmsg(2)."""
    try:
        waits_in = Path(f"/proc/{pid}/wchan").read_text()
    except OSError:
        return False
    return any(each in waits_in for each in ("unix", "recv", "skb_wait"))


class Agent:
    """One agent and its events."""

    def __init__(self, supervised, number, out):
        self._supervised, self.number, self.out = supervised, number, out
        self._events, self.seen = supervised.events(number), []

    def stop(self, grace_s):
        self._supervised.ask("agents[number].stop(grace_s)", number=self.number, grace_s=grace_s)

    def expect(self, kind):
        while True:
            event = self._events.get(timeout=limit_s(HANG_S))
            self.seen.append(event)
            if isinstance(event, kind):
                return event

    def end(self):
        """Wait for its end; return what it has noted, with why it was started cold and its exit code."""
        end = self.expect(End)
        noted = json.loads(self.out.read_text())
        refused = [event.reason for event in self.seen if isinstance(event, Refused)]
        return {**noted, "status": end.status, "left": end.left, "refused": refused[0] if refused else None}

    def worker(self, local_rank=0):
        """Return what a worker has noted."""
        text = Path(f"{self.out}.{local_rank}.out").read_text()
        return json.loads(text.splitlines()[-1])


@pytest.fixture
def warm(tmp_path):
    made = []

    def start(**options):
        made.append(Warm(tmp_path, **options))
        return made[-1]

    yield start
    for one in made:
        one.close()


IN_SPARE = "'spare.py' in open('/proc/self/cmdline').read()"
NEVER_IMPORTED = f"import time\nif {IN_SPARE}: time.sleep(3600)\n"


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
        ("{root}/harmless/broken.py", "SyntaxError"),
        ("{root}/harmless/no such.py", "FileNotFoundError"),
        ("{root}/file/program.py", "imported_early.py has the name of a module that is imported already"),
        ("{root}/folder/link.py", "imported_early has the name of a module that is imported already"),
        ("-x.py", "it runs"),  # the interpreter takes it for an option
        ("{root}/harmless/program.py", None),
        ("{root}/harmless/link.py", "imported_early.py has the name"),  # Python follows it
    ],
)
def test_a_program_that_would_import_other_modules_or_is_none_starts_cold(warm, tmp_path, script, reason):
    for folder in ("file", "folder/imported_early", "harmless"):
        write(tmp_path / folder / "program.py", "")
    write(tmp_path / "file" / "imported_early.py", "")
    write(tmp_path / "folder" / "imported_early" / "__init__.py", "")
    write(tmp_path / "folder" / "link.py", "")
    write(tmp_path / "harmless" / "broken.py", "if True print(1)")
    for name in ("imported_early.txt", "new.py", "__main__.py", "sys.py"):
        write(tmp_path / "harmless" / name, "")
    os.symlink("../file/program.py", tmp_path / "harmless" / "link.py")
    one = warm(workers=1)
    one.spares()
    one.start(script=[script.format(root=tmp_path)]).end()
    told = (tmp_path / "agent.stderr").read_text()
    assert told.startswith("A worker starts cold: " if reason else "")
    assert reason in told if reason else "cold" not in told


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        ({"WAS_THERE": "before and now"}, "WAS_THERE had another value when torch was imported"),
        ({"TORCH_HOME": "new", "PYTHONHASHSEED": "3"}, "PYTHONHASHSEED, TORCH_HOME had another value when"),
        (dict.fromkeys("ABC", "x" * 100000), "OSError: [Errno 90] Message too long"),
        ({"TORCH_NCCL_BLOCKING_WAIT": "1"}, None),  # is read later
        ({"RANK": "3", "A_NEW_ONE": "1"}, None),
    ],
)
def test_a_variable_that_imports_may_have_read_means_a_cold_start_and_the_next_spare_has_it(warm, env, reason):
    one = warm()
    one.env["WAS_THERE"] = "before"
    one.start().end()
    one.spares()
    begun = one.start(env=env).end()
    assert (begun["refused"] or "").startswith(reason or "")
    assert begun["imported"] is (reason is None)
    assert begun["env"].items() >= env.items()
    again = one.start(env=env).end()
    assert (again["refused"], again["imported"]) == ((reason, False) if "A" in env else (None, True))


@pytest.mark.parametrize("preload", [("imported_early",), ()])
def test_any_variable_may_be_one_that_a_preloaded_module_has_read(warm, preload):
    one = warm(workers=1, preload=preload)
    one.spares()
    agent = one.start(env={"A_NEW_ONE": "1", "NCCL_DEBUG": "INFO"})
    assert agent.end()["refused"] is None
    told = (one.root / "agent.stderr").read_text()
    assert told == ("A worker starts cold: A_NEW_ONE had another value when torch was imported.\n" if preload else "")
    assert agent.worker()["imported"] is not bool(preload)


def test_another_folder_or_another_package_means_a_cold_start_and_the_next_is_warm(warm, tmp_path):
    for folder in ("other", "packages"):
        (tmp_path / folder).mkdir()
    one = warm()
    one.env["PYTHONPATH"] += f":lib:{tmp_path}/packages"
    one.start().end()
    one.spares()
    refused = [one.start(cwd=str(tmp_path / "other")).end()["refused"]]
    one.spares()
    write(tmp_path / "packages" / "installed.py", "")
    refused += [one.start(cwd=str(tmp_path / "other")).end()["refused"]]
    one.spares()
    for name in ("written by the step.csv", "__pycache__/installed.pyc"):
        write(tmp_path / "packages" / name, "")
    refused += [one.start(cwd=str(tmp_path / "other")).end()["refused"]]
    assert refused == [
        f"the working directory was {os.getcwd()} when torch was imported",
        f"{tmp_path}/packages/installed.py came or went since torch was imported",
        None,
    ]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import os; os._exit(3)", "the spare process has ended"),
    ],
)
def test_imports_that_fail_mean_a_cold_start(warm, code, reason):
    begun = warm(in_agent=f"if {IN_SPARE}: {code}\n").start().end()
    assert (begun["refused"], begun["status"], begun["imported"]) == (reason, 0, False)


def test_who_was_killed_while_it_waited_is_replaced(warm):
    one = warm(workers=1)
    os.kill(max(one.spares()), signal.SIGKILL)  # the worker
    agent = one.start()
    assert (agent.end()["refused"], agent.worker()["early"]) == (None, False)
    assert (one.root / "agent.stderr").read_text() == "A worker starts cold: the spare process has ended.\n"
    os.kill(min(one.spares()), signal.SIGKILL)  # the next agent
    agent = one.start()
    assert (agent.end()["refused"], agent.worker()["rank"]) == ("the spare process has ended", "4")
    assert one.start().end()["refused"] is None


def test_a_spare_that_does_not_answer_is_given_up(warm):
    before = "from ours.worker import spare_process as module\nmodule.ANSWER_S = 0.3\n"
    one = warm(in_agent=NEVER_IMPORTED, before=before)
    spare = one.pid
    seen = one.start().end()
    assert (seen["refused"], seen["status"]) == ("the spare did not answer within 0.3 s", 0)
    eventually(lambda: not is_running(spare), "its end")
    agent = one.start(env={"A": "zero\0byte"})  # a spare can't be asked for it, and nothing can be started with it
    assert agent.expect(End).error == "could not be started: embedded null byte"


def test_spares_are_not_what_workers_have_left_running(warm):
    one = warm(workers=2, early="import time; time.sleep(5)")
    eventually(lambda: len(living_descendants(one.pid)) == 2, "spares that import")
    agent = one.start("early")  # it ends before it has started any
    assert agent.expect(End).left == []


def test_a_launch_that_is_stopped_while_torch_is_imported_does_not_wait_for_it(warm):
    agent = warm(in_agent=NEVER_IMPORTED).start("wait")
    agent.stop(0.1)
    assert agent.expect(End).status == -signal.SIGKILL
    assert not [event for event in agent.seen if isinstance(event, Refused)]  # nobody wants to know
