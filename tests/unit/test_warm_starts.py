"""Agents and workers that were spares: a package of the tests stands for torch, and imports in no time."""

import os
import signal

import pytest
from unit_helpers import eventually, is_running, write
from warm_nodes import Warm

from metaflow_extensions.torchrun.plugins.torchrun.machine.processes import living_descendants
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.agent import End, Refused, WorkerStarted


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
