"""What hanging workers were doing is found out: real processes, asked by the signal."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
from limits import limit_s
from unit_helpers import eventually, is_running, worker_environment, write

from metaflow_extensions.torchrun.plugins.torchrun.machine import processes, stacks

HANG = "print('ready', flush=True); import time; time.sleep(1000)"


def hooked(folder, env=()):
    """Return the environment of a worker with our hook."""
    hook = {**stacks.hook_environment(), "TORCHRUN_STACKS_FOLDER": str(folder)}
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
    eventually(lambda: processes.status(pid)["State"][:1] == state, f"state {state}")


def collected(workers, within_s=60.0):
    return asyncio.run(stacks.ask(workers, within_s))


@pytest.fixture
def folder(tmp_path):
    (folder := tmp_path / "gang's folder ü").mkdir()
    return folder


# --- where workers hang -----------------------------------------------------------------------

ANOTHER_THREAD = "threading.Thread(target=time.sleep, args=(1000,), daemon=True)"
NO_PYTHON = ["sh", "-c", "echo ready; sleep 1000; :"]
NO_HANDLER = (
    "no Python stack: it has no handler of ours (no Python, started with -I, -E or -S, or it has reset the signal)"
)
# Without our file it is somebody else's; calling it could do anything.
OWN_HANDLER = f"import signal, sys; signal.signal({stacks._SIGNAL}, lambda *_: sys.exit(1)); "
BECOMES_ANOTHER = f"import os, sys; os.execv(sys.executable, ['python', '-I', '-c', {OWN_HANDLER + HANG!r}])"


def script(body, before=""):
    """Return a script that says that it is ready and hangs in its function `train`."""
    text = f"import os, queue, sys, threading, time\n{before}\ndef train():\n    {body}\n"
    return f"{text}print('ready', flush=True)\ntrain()\n"


OF_TRAINER = "import trainer\nprint('ready', flush=True)\ntrainer.{}()\n"
# What a worker runs, a script or an argv, and what is told of it.
HERE = "train.py:4 in train"
WORKERS = {
    "sleeps": (script("time.sleep(1000)"), HERE),
    "has many threads": (script("time.sleep(1000)", f"for _ in range(120): {ANOTHER_THREAD}.start()"), HERE),
    "waits for its fork": (script("os.fork() or time.sleep(1000); os.wait()"), HERE),
    "is in the standard library": (script("queue.Queue().get()"), f"{HERE} (in wait)"),
    # The shape that a hang in all_reduce has, made of files in a place like torch's.
    "is in torch": (OF_TRAINER.format("loop"), "trainer.py:3 in loop (in all_reduce)"),
    "is in torch's forward": (OF_TRAINER.format("forward"), "trainer.py:5 in forward"),
    "is no Python": (NO_PYTHON, NO_HANDLER),
    # Our hook ran, but of the program that it ran in, nothing is left.
    "became another Python": ([sys.executable, "-c", BECOMES_ANOTHER], NO_HANDLER),
    "has its own handler": ([sys.executable, "-I", "-c", OWN_HANDLER + HANG], NO_HANDLER),
}


def test_hanging_workers_tell_where_and_live_on(folder, tmp_path):
    site = tmp_path / "lib" / "python3.11" / "site-packages"
    write(site / "torch" / "__init__.py", "")
    library = "import time\ndef all_reduce():\n    time.sleep(1000)\ndef forward():\n    time.sleep(1000)\n"
    write(site / "torch" / "distributed.py", library)
    trainer = "import torch.distributed\ndef loop():\n    torch.distributed.all_reduce()\n"
    write(site / "trainer.py", f"{trainer}def forward():\n    torch.distributed.forward()\n")
    argvs = [
        [sys.executable, str(write(tmp_path / f"{rank}" / "train.py", runs))] if isinstance(runs, str) else runs
        for rank, (runs, _) in enumerate(WORKERS.values())
    ]
    with workers(argvs, folder, {"PYTHONPATH": str(site)}) as pids:
        where = [each.where for each in collected(pids).values()]
        assert all(map(is_running, pids.values()))
    assert dict(zip(WORKERS, where, strict=True)) == {name: told for name, (_, told) in WORKERS.items()}
    assert not list(folder.iterdir()), "no file is left, whatever becomes of the workers"


# --- workers that can't answer ----------------------------------------------------------------


def test_a_worker_that_does_not_answer_is_said_so_in_time(folder):
    blocks = f"import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [{stacks._SIGNAL}]);"
    with workers([[sys.executable, "-c", code] for code in (blocks + HANG, HANG, HANG)], folder) as pids:
        os.kill(pids[1], signal.SIGSTOP)
        until(pids[1], "T")
        began = time.monotonic()
        found = collected(pids, within_s=limit_s(1.0))
        assert time.monotonic() - began >= limit_s(1.0)
    late = "no Python stack: it did not answer in time; it is in state"
    told = [found[rank].where for rank in range(3)]
    assert told == [f"{late} S (sleeping)", f"{late} T (stopped)", "<string>:1 in <module>"]
