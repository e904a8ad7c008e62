"""What hanging workers were doing is found out: real processes, asked by py-spy and by the signal."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from limits import limit_s
from unit_helpers import eventually, is_running, worker_environment, write

from metaflow_extensions.torchrun.plugins.torchrun.features.hangs.stacks import collect as collected
from metaflow_extensions.torchrun.plugins.torchrun.machine import stacks

HOOK = stacks.HOOK
PY_SPY = shutil.which("py-spy", path=os.path.dirname(sys.executable))
BY_SIGNAL = None  # what is found where py-spy is not installed
OURSELVES = {0: os.getpid()}  # a process without our hook

# Where kernel.yama.ptrace_scope is 1, py-spy may look at what it has not started only if that allows it.
TRACEABLE = "import ctypes; ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1));"
HANG = TRACEABLE + "print('ready', flush=True); import time; time.sleep(1000)"


def hooked(folder, env=()):
    """Return the environment of a worker with our hook."""
    hook = {**stacks.hook_environment(str(folder)), "TORCHRUN_HOOKS": HOOK}
    return worker_environment({**os.environ, **dict(env), **hook}, folder.parent)


@contextmanager
def workers(argvs, folder, env=()):
    """Start workers as the agent would, and yield their pids by rank when they hang."""
    started = []
    try:
        for argv in argvs:
            pipe = subprocess.PIPE
            started.append(subprocess.Popen(argv, env=hooked(folder, env), start_new_session=True, stdout=pipe))
            assert started[-1].stdout.readline() == b"ready\n"
            until(started[-1].pid, "S")
        yield {rank: worker.pid for rank, worker in enumerate(started)}
    finally:
        for worker in started:
            os.killpg(worker.pid, signal.SIGKILL)  # with its children; it is not reaped yet
            worker.wait()
            worker.stdout.close()


def until(pid, state):
    eventually(lambda: stacks._state(pid)[:1] == state, f"state {state}")


def collect(workers, folder, py_spy=BY_SIGNAL, keep_in=None, within_s=60.0, name="launch0"):
    keep_in = str(keep_in if keep_in is not None else folder.parent / "kept")
    return collected(workers, str(folder), keep_in, name, within_s, py_spy)


def folder_in(path):
    (path / "gang's folder ü").mkdir()
    return path / "gang's folder ü"


@pytest.fixture
def folder(tmp_path):
    return folder_in(tmp_path)


def fake_py_spy(folder, text):
    path = write(folder / "bin" / "py-spy", text)
    path.chmod(0o755)
    return str(path)


# --- where workers hang -----------------------------------------------------------------------

ANOTHER_THREAD = "threading.Thread(target=time.sleep, args=(1000,), daemon=True)"
NO_PYTHON = ["sh", "-c", "echo ready; sleep 1000; :"]
NO_HANDLER = (
    "no Python stack: it has no handler of ours (no Python, started with -I, -E or -S, or it has reset the signal)"
)
# Without our file it is somebody else's; calling it could do anything.
OWN_HANDLER = f"import signal, sys; signal.signal({stacks._SIGNAL}, lambda *_: sys.exit(1)); "


def script(body, before=""):
    """Return a script that says that it is ready and hangs in its function `train`."""
    text = f"{TRACEABLE} import os, queue, sys, threading, time\n{before}\ndef train():\n    {body}\n"
    return f"{text}print('ready', flush=True)\ntrain()\n"


# What a worker runs, a script or an argv, and what py-spy and the signal tell of it.
HERE = "train.py:4 in train"
IN_TORCH = "trainer.py:3 in loop (in all_reduce)"
WORKERS = {
    "sleeps": (script("time.sleep(1000)"), HERE, HERE),
    "has another thread": (script("time.sleep(1000)", f"{ANOTHER_THREAD}.start()"), HERE, HERE),
    "waits for its fork": (script("os.fork() or time.sleep(1000); os.wait()"), HERE, HERE),
    # py-spy guesses the class.
    "is in the standard library": (script("queue.Queue().get()"), f"{HERE} (in Condition.wait)", f"{HERE} (in wait)"),
    # The shape that a hang in all_reduce has, made of files in a place like torch's.
    "is in torch": (f"{TRACEABLE} import trainer\nprint('ready', flush=True)\ntrainer.loop()\n", IN_TORCH, IN_TORCH),
    # The handler tells of 100 threads, the youngest first.
    "has too many threads": (
        script("time.sleep(1000)", f"for _ in range(120): {ANOTHER_THREAD}.start()"),
        HERE,
        "of 100 threads none is the main one; install py-spy to see all",
    ),
    "is no Python": (NO_PYTHON, NO_HANDLER, NO_HANDLER),
    # Our hook ran, but of the program that it ran in, nothing is left.
    "became no Python": ([sys.executable, "-c", f"import os; os.execvp('sh', {NO_PYTHON})"], NO_HANDLER, NO_HANDLER),
    "became another Python": (
        [
            sys.executable,
            "-c",
            f"import os, sys; os.execv(sys.executable, ['python', '-I', '-c', {OWN_HANDLER + HANG!r}])",
        ],
        "<string>:1 in <module>",
        NO_HANDLER,
    ),
    "has its own handler": ([sys.executable, "-I", "-c", OWN_HANDLER + HANG], "<string>:1 in <module>", NO_HANDLER),
}


RANKS = {name: rank for rank, name in enumerate(WORKERS)}


@pytest.fixture(scope="module")
def hanging(tmp_path_factory):
    """Return the workers of the table, and what py-spy and then the signal have told of them."""
    assert PY_SPY, "the test extra has py-spy"
    root = tmp_path_factory.mktemp("hanging")
    folder = folder_in(root)
    site = root / "lib" / "python3.11" / "site-packages"
    write(site / "torch" / "__init__.py", "")
    write(site / "torch" / "distributed.py", "import time\ndef all_reduce():\n    time.sleep(1000)\n")
    write(site / "trainer.py", "import torch.distributed\ndef loop():\n    torch.distributed.all_reduce()\n")
    argvs = [
        [sys.executable, str(write(root / f"{rank}" / "train.py", runs))] if isinstance(runs, str) else runs
        for rank, (runs, _, _) in enumerate(WORKERS.values())
    ]
    with workers(argvs, folder, {"PYTHONPATH": str(site)}) as pids:
        by_py_spy = collect(pids, folder, PY_SPY)
        signalled = {path.name for path in folder.glob("stacks-*.txt") if path.stat().st_size}
        by_signal = collect(pids, folder, BY_SIGNAL)
        yield SimpleNamespace(folder=folder, pids=pids, found=(by_py_spy, by_signal), signalled=signalled)


def test_hanging_workers_tell_where_and_live_on(hanging):
    by_py_spy, by_signal = (dict(zip(WORKERS, found.where.values(), strict=True)) for found in hanging.found)
    by_py_spy = {name: told.partition("; py-spy failed: Error: ")[0] for name, told in by_py_spy.items()}
    assert by_py_spy == {name: told for name, (_, told, _) in WORKERS.items()}
    assert by_signal == {name: told for name, (_, _, told) in WORKERS.items()}
    assert all(map(is_running, hanging.pids.values()))
    for found in hanging.found:  # all stacks stand under their ranks
        headings = [line for line in found.text.splitlines() if line.startswith("---")]
        assert headings == [f"--- rank {rank}, pid {pid}: {found.where[rank]}" for rank, pid in hanging.pids.items()]
        assert found.text.count("train.py") > len(headings), "the stacks themselves"


def test_whom_py_spy_has_seen_is_not_signalled(hanging):
    by_py_spy, _ = hanging.found
    assert f"Thread {hanging.pids[0]} (idle)" in by_py_spy.text
    assert hanging.signalled == set()
    assert [f"{NO_HANDLER}; py-spy failed: Error: " in told for told in by_py_spy.where.values()].count(True) == 2


def test_asked_twice_a_worker_tells_its_new_stack_only(hanging):
    first, second = (collect({0: hanging.pids[0]}, hanging.folder) for _ in range(2))
    assert first.text == second.text
    assert Path(first.file).read_text(encoding="utf-8").strip() == first.text.strip()


def test_py_spy_is_looked_for_beside_python_then_on_the_path(tmp_path, monkeypatch):
    paths = [fake_py_spy(tmp_path / place, "#!/bin/sh\n") for place in ("env", "path")]
    monkeypatch.setattr(sys, "executable", str(tmp_path / "env" / "bin" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "path" / "bin"))
    for path in paths:
        assert stacks.find_py_spy() == path
        os.remove(path)
    assert stacks.find_py_spy() is None


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("printf 'Error:\nDenied\n' >&2; exit 1", "py-spy failed: Error: Denied"),
        ("exit 3", "py-spy failed: exit code 3"),
        ("echo 'Process 1: python'", "py-spy failed: exit code 0"),
        ("exec sleep 1000", "py-spy gave no answer within {:g} s"),
        (None, "py-spy could not be started ("),
    ],
)
def test_when_py_spy_fails_the_signal_helps(does, said, hanging, tmp_path):
    fake = "/none/py-spy" if does is None else fake_py_spy(tmp_path, f"#!/bin/sh\n{does}\n")
    asked = {rank: hanging.pids[rank] for rank in (0, 1, RANKS["is no Python"])}
    within_s = math.ceil(limit_s(2.0))
    began = time.monotonic()
    where = collect(asked, hanging.folder, fake, within_s=within_s).where
    assert time.monotonic() - began < 3 * 0.6 * within_s, "that is what one after the other would take"
    assert where[0] == where[1] == HERE
    assert where[RANKS["is no Python"]].startswith(f"{NO_HANDLER}; {said.format(0.6 * within_s)}")


# --- workers that can't answer ----------------------------------------------------------------


def test_a_worker_that_does_not_answer_is_said_so_in_time(folder):
    blocks = f"import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [{stacks._SIGNAL}]);"
    with workers([[sys.executable, "-c", code] for code in (blocks + HANG, HANG, HANG)], folder) as pids:
        os.kill(pids[1], signal.SIGSTOP)
        until(pids[1], "T")
        began = time.monotonic()
        found = collect(pids, folder, within_s=limit_s(1.0))
        assert time.monotonic() - began >= limit_s(1.0)
    why = "no Python stack: it"
    assert found.where == {
        0: f"{why} did not answer in time; it is in state S (sleeping)",
        1: f"{why} is stopped (state T (stopped)), as by SIGSTOP or a debugger",
        2: "<string>:1 in <module>",
    }


def test_workers_that_have_ended_are_said_so_and_none_is_no_error(folder):
    zombie = subprocess.Popen(["true"])
    until(zombie.pid, "Z")
    for _ in range(2):
        assert collect({0: zombie.pid}, folder, PY_SPY).where == {0: "no Python stack: the process has ended"}
        zombie.wait()
    found = collect({}, folder)
    assert (found.where, found.text) == ({}, "")


# --- the hook in the worker -------------------------------------------------------------------

SHOW = """
import json, os, signal, sys
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
opened = os.open("/dev/null", os.O_RDONLY)
print(json.dumps({
    "opened": opened, "path": sys.path, "argv": sys.argv, "name": __name__, "main": vars(sys.modules["__main__"])["__file__"],
    "modules": sorted(sys.modules), "custom": str(sys.modules.get("sitecustomize")), "mark": os.environ.get("MARK"),
    "handlers": int(status["SigCgt"], 16),
}))
"""
OUR_HANDLER = 0b11 << (stacks._SIGNAL - 2)


def run(argv, env):
    return subprocess.run([sys.executable, *argv], env=env, capture_output=True, text=True)


@pytest.mark.parametrize("env", [{}, {"PYTHONPATH": ":{own}::"}, {"PYTHONPATH": ""}])
def test_a_script_finds_everything_as_it_would_without_us(env, folder, tmp_path):
    own = tmp_path / "own"
    write(own / "sitecustomize.py", "import os; os.environ['MARK'] = 'own'\n")
    env = {name: value.format(own=own) for name, value in env.items()}
    argv = [str(write(tmp_path / "show.py", SHOW)), "--an", "argument"]
    plain, with_us = run(argv, {**os.environ, **env}), run(argv, hooked(folder, env))
    assert with_us.stderr == plain.stderr == ""
    before, after = json.loads(plain.stdout), json.loads(with_us.stdout)
    assert after.pop("handlers") == before.pop("handlers") | OUR_HANDLER
    assert set(after.pop("modules")) - set(before.pop("modules")) <= {"faulthandler", "atexit"}
    assert after == before
    assert (after["mark"] == "own") is ("own" in env.get("PYTHONPATH", ""))


@pytest.mark.parametrize("body", ["raise ValueError('mine')", "raise SystemExit(3)", "x = ("])
def test_errors_of_the_users_own_sitecustomize_are_as_they_would_be(body, folder, tmp_path):
    write(tmp_path / "own" / "sitecustomize.py", body)
    env = {"PYTHONPATH": str(tmp_path / "own")}
    done = [run(["-c", "print('ran')"], each) for each in ({**os.environ, **env}, hooked(folder, env))]
    plain, with_us = ((each.returncode, each.stdout, each.stderr.splitlines()[-1:]) for each in done)
    assert plain == with_us
    assert len(list(folder.glob("stacks-*"))) == 1, "ours ran, too"


@pytest.mark.parametrize(("place", "number"), [("none", "58"), ("", "no number"), ("", "9")])
def test_a_worker_starts_whatever_becomes_of_the_hook(place, number, folder):
    spoilt = {"TORCHRUN_STACKS_FOLDER": str(folder / place), "TORCHRUN_STACKS_SIGNAL": number}
    done = run(["-c", "print('ran')"], {**hooked(folder), **spoilt})
    assert (done.returncode, done.stdout, done.stderr) == (0, "ran\n", "")


# --- keeping ----------------------------------------------------------------------------------


def test_everything_is_in_a_fresh_folder_of_that_name(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    place = tmp_path / "a" / "b"
    files = [Path(collect(OURSELVES, folder, keep_in=place, name="node1").file) for _ in range(2)]
    assert set(files) == set(place.glob("torchrun-hang-node1-*/stacks.txt"))
    assert files[0] != files[1]
    found = collected(OURSELVES, str(folder), None, "launch0", 10.0, BY_SIGNAL)
    assert Path(found.file).parent.parent == tmp_path
    assert "rank 0" in Path(found.file).read_text()


@pytest.mark.parametrize("place", ["a file", "/proc/none"])
def test_a_place_that_can_not_be_written_to_does_not_lose_the_text(place, folder, tmp_path):
    write(tmp_path / "a file", "")
    found = collect(OURSELVES, folder, keep_in=tmp_path / place)
    assert (found.file, found.where) == (None, {0: NO_HANDLER})
    assert NO_HANDLER in found.text


def test_long_stacks_are_whole_in_the_file_and_bounded_in_the_log(folder, tmp_path):
    frames = '"    frame%d (/x.py:%d)\\n" % (i, i) for i in range(20000)'
    prints = f"import sys\nprint('Thread ' + sys.argv[-1] + ' (idle)')\nprint(''.join({frames}))\n"
    fake = fake_py_spy(tmp_path, f"#!{sys.executable}\n{prints}")
    found = collect(dict.fromkeys(range(3), os.getpid()), folder, fake)
    assert len(found.text) < 210_000
    for said in (f"pid {os.getpid()}: x.py:0 in frame0\n", "frame1 (", "frame19999 (", "characters left out"):
        assert found.text.count(said) == 3
    assert Path(found.file).read_text().count("\n    frame") == 60_000
