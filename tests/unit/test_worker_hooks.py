"""What ended a worker is told by its own interpreter: real ones, in hostile neighbourhoods."""

import os
import subprocess
import sys
import textwrap
import time

import pytest
from unit_helpers import worker_environment, write

from metaflow_extensions.torchrun.plugins.torchrun.supervisor.workers import read_record

RAISES = "raise ValueError('the end')"


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "it's größe" / "attempt_0" / "0"
    path.mkdir(parents=True)
    return path


@pytest.fixture
def work(folder, tmp_path):
    """Run a script as a worker of this process; return its end and its record."""

    def run(body, argv=(sys.executable,), name="train.py", **env):
        script = write(tmp_path / name, textwrap.dedent(body))
        done = subprocess.run(
            [*argv, str(script)],
            env=worker_environment({**os.environ, **env}, folder),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            errors="surrogateescape",
        )
        return done, read_record(str(folder))

    return run


@pytest.mark.parametrize("hides", [{}, {"TORCHRUN_HIDES": "1"}])
def test_of_ranks_that_fail_in_the_same_line_the_first_shows_where_and_all_record_it(hides, folder, tmp_path):
    body = (
        "import os\nif os.environ['RANK'] == '2':\n    raise ValueError\nraise ValueError('on ' + os.environ['RANK'])\n"
    )
    script, shown = write(tmp_path / "train.py", body), []
    for rank in range(3):
        own = folder.parent / str(rank)
        own.mkdir(exist_ok=True)
        env = {**worker_environment(dict(os.environ), own), "RANK": str(rank), **hides}
        shown.append(subprocess.run([sys.executable, str(script)], env=env, stderr=subprocess.PIPE, text=True).stderr)
        assert f'File "{script}"' in read_record(str(own)).traceback
    assert shown[1] == "ValueError: on 1 (rank 0 has the traceback)\n" or hides
    assert all(text.startswith("Traceback") for text in (shown[0], shown[2], *shown[1 : 2 * len(hides)]))


def test_a_traceback_is_written_at_once_though_stderr_has_no_buffer(folder, tmp_path):
    """So nobody who looks at the file meanwhile sees a part of it, and shows another rank's lines within."""
    script = write(tmp_path / "train.py", "def main(n):\n    main(n - 1) if n else 1 / 0\nmain(9)\n")
    reading, writing = os.pipe2(os.O_DIRECT)  # of such a pipe, each write is read by itself
    env = worker_environment({**os.environ, "PYTHONUNBUFFERED": "1"}, folder)
    assert subprocess.run([sys.executable, str(script)], env=env, stderr=writing).returncode == 1
    text = os.read(reading, 64 * 1024).decode()
    os.set_blocking(reading, False)
    os.close(writing)
    assert text.startswith("Traceback (most recent call last):\n")
    assert text.endswith("ZeroDivisionError: division by zero\n")
    assert os.read(reading, 10) == b""
    os.close(reading)


HANDLED = "try:\n    open('/none')\nexcept OSError as error:\n    {}\n"

NO_CAUSE = {
    "a good end": "",
    "a code": "import sys; sys.exit(3)",
    "a code within a handler": HANDLED.format("raise SystemExit(3)"),
    "a log entry": "import logging, sys\n" + HANDLED.format("logging.exception('lost')") + "sys.exit(3)",
    "a hook called by hand": "import sys\n" + HANDLED.format("sys.excepthook(*sys.exc_info())") + "sys.exit(3)",
    "an exception in __del__": "class A:\n    def __del__(self): raise OSError('ignored')\na = A()",
    "an exception in a thread": "import threading as t\nx = t.Thread(target=lambda: 1 / 0); x.start(); x.join()\nexit(3)",
    "a test runner's": "import sys\ndef run():\n    " + HANDLED.format("sys.last_value = error").replace("\n", "\n    ")
    + "    sys.last_traceback = sys.last_value.__traceback__\nrun(); sys.exit(3)",
    "a fork's": "import os\nif os.fork() == 0:\n    raise ValueError\nos.wait(); exit(3)",
    "a subprocess's": "import subprocess, sys\nsubprocess.run([sys.executable, '-c', '1 / 0']); exit(3)",
    "a quick exit": "import os, traceback\n" + HANDLED.format("traceback.print_exc()") + "os._exit(3)",
    "a signal": "import os; os.kill(os.getpid(), 9)",
    "an interrupt": "import os, signal; signal.signal(2, signal.default_int_handler); os.kill(os.getpid(), 2)",
}  # fmt: skip


@pytest.mark.parametrize("what", NO_CAUSE)
def test_what_does_not_end_the_main_thread_is_no_cause(what, work, folder):
    done, record = work(NO_CAUSE[what])
    assert record is None
    assert list(folder.iterdir()) == []
    assert done.returncode == {"a signal": -9, "an interrupt": -2}.get(what, done.returncode)


# Hooks as libraries have them: they call the one before, the first one, or none; they end the process themselves.
HOOKS = {
    "one that calls the one before": "old = sys.excepthook\nsys.excepthook = lambda *a: (print('mine'), old(*a))",
    "one that calls the first": "def hook(*a):\n    sys.__excepthook__(*a)\n    os._exit(7)\nsys.excepthook = hook",
    "one that calls none": "sys.excepthook = lambda *a: print('mine', file=sys.stderr)",
    "one that fails": "sys.excepthook = lambda *a: 1 / 0",
    "torch's": "import io\nold = sys.excepthook\ndef hook(*a):\n    err, sys.stderr = sys.stderr, io.StringIO()\n"
    "    try: old(*a)\n    finally: text, sys.stderr = sys.stderr.getvalue(), err\n"
    "    sys.stderr.write('[rank0]: ' + text)\nsys.excepthook = hook",
}


@pytest.mark.parametrize("hook", HOOKS)
def test_the_end_is_recorded_whatever_hook_the_user_has(hook, work):
    done, record = work(f"import os, sys\n{HOOKS[hook]}\n{RAISES}")
    assert record.exception == "ValueError: the end"
    assert RAISES in record.traceback
    assert done.returncode == (7 if "first" in hook else 1)
    assert "the end" in done.stderr or "mine" in done.stderr


ODD = {
    "def f(n): return f(n + 1)\nf(0)": "RecursionError: maximum recursion depth exceeded",
    "raise MemoryError": "MemoryError",
    "def f(": "SyntaxError: ",
    "if 1:\nx = 1": "IndentationError: expected an indented block",
    "class E(Exception):\n    def __str__(self): raise KeyError(1)\nraise E": "E: <exception str() failed>",
    "raise ValueError('größe 模型 🙂 \\x00 \\x1b[1m')": "ValueError: größe 模型 🙂 \x00 \x1b[1m",
    "raise ValueError('\\udcff \\ud800')": "ValueError: \\udcff \\ud800",
    "import os, shutil\nos.chdir('/')\nraise ValueError('elsewhere')": "ValueError: elsewhere",
    "import sys\nsys.stderr = None\nraise ValueError('mute')": "ValueError: mute",
    "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise ValueError('größe') from e": "ValueError: größe",
    "try: some = ExceptionGroup  # which came with Python 3.11\nexcept NameError: some = Exception\n"
    "raise some('some', [ValueError('a'), KeyError('b')])": "Exception",
}


@pytest.mark.parametrize("body", ODD)
def test_an_odd_exception_is_recorded_and_shown_as_without_us(body, work):
    before = time.monotonic()
    done, record = work(body)
    assert before < record.at < time.monotonic()
    assert record.exception.startswith(ODD[body])
    assert record.traceback == done.stderr.rstrip() or "mute" in body
    plain = subprocess.run(done.args, env={**os.environ, "PYTHONPATH": ""}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (plain.returncode, plain.stderr)


# Torch's handler of SIGCHLD raises when a worker of a DataLoader is killed, also while an error is recorded.
RAISED_MEANWHILE = """
import traceback
usual = traceback.format_exception
def interrupted(*arguments):
    traceback.format_exception = usual
    raise RuntimeError("DataLoader worker is killed")
traceback.format_exception = interrupted
raise ConnectionResetError("the first")
"""


def test_what_a_handler_raises_meanwhile_costs_no_traceback(work):
    _, record = work(RAISED_MEANWHILE)
    assert record.exception == "ConnectionResetError: the first"
    assert 'raise ConnectionResetError("the first")' in record.traceback


AGAIN = "import os, sys\nif len(sys.argv) == 1: os.execv(sys.executable, [sys.executable, *sys.argv, 'x'])\n"


@pytest.mark.parametrize(
    ("argv", "before"),
    [(["-m", "train", "--"], ""), ([], AGAIN), (["-I"], ""), (["-E"], ""), (["-S"], "")],
    ids=["a module", "becomes another", "-I", "-E", "-S"],
)
def test_a_worker_is_one_however_python_was_started_unless_our_hook_is_not_loaded(argv, before, work, tmp_path):
    done, record = work(before + RAISES, ["env", "A=1", sys.executable, *argv])
    assert done.stderr.endswith("ValueError: the end\n")
    assert "runpy" not in done.stderr or record is None
    if argv in (["-I"], ["-E"], ["-S"]):
        assert record is None
    else:
        assert record.traceback.splitlines()[1].startswith(f'  File "{tmp_path / "train.py"}", line ')


# --- whether it has trained by itself ---------------------------------------------------------------

# What the hook asks torch, with torch's answers: gradients are numbered, and of a process group the backend stays.
TORCH = {
    "__init__.py": "from . import autograd\n",
    "autograd.py": "operations = 0\ndef _get_sequence_nr(): return operations\n",
    "distributed/__init__.py": """
from . import distributed_c10d as c10d
is_there = False
def init_process_group(backend="undefined"):
    global is_there
    c10d._backend, c10d._default_pg_init_method, is_there = backend, "env://", True
def destroy_process_group():
    global is_there
    is_there = False
def is_initialized(): return is_there
def is_available(): return True
""",
    "distributed/distributed_c10d.py": "_backend = _default_pg_init_method = None\n",
}
TRAINS = "import torch; torch.autograd.operations += 3\n"
GROUP = "import torch.distributed as dist; dist.init_process_group()\n"
NAMED = GROUP.replace("()", "('gloo')")
DESTROYS = "dist.destroy_process_group()\n"
ACCELERATE = "import accelerate.state as state; state.PartialState._shared_state.update(num_processes={})\n"
IN_A_FORK = "import os\nif os.fork() == 0:\n    {}\n    raise SystemExit\nos.wait()\n"

# A program, and whether it has trained alone, of two ranks.
TRAINING = {
    "nothing": ("", False),
    "no gradients": ("import torch, torch.distributed", False),
    "gradients": (TRAINS, True),
    "gradients and a thread": (TRAINS + "import threading as t; t.Thread(target=print).start()", True),
    "a group that is there at the end": (TRAINS + GROUP, False),
    "a group that was destroyed": (GROUP + TRAINS + DESTROYS, False),
    "a group that Accelerate uses": (ACCELERATE.format(2) + GROUP + TRAINS, False),
    "a group that Accelerate does not use": (ACCELERATE.format(1) + GROUP + TRAINS + DESTROYS, True),
    "a group of the script's own beside Accelerate": (ACCELERATE.format(1) + NAMED + TRAINS, False),
    "MPI": (TRAINS + "import mpi4py", False),
    "a fork with a group": (TRAINS + IN_A_FORK.format(GROUP.strip()), True),
    "another torch": (TRAINS + "del torch.autograd._get_sequence_nr", False),
    "a torch without groups": (TRAINS + "import torch.distributed as d; d.is_available = lambda: False", True),
    **{
        f"a torch without {name}": (f"import torch.distributed as d; del d.{name}\n" + TRAINS, False)
        for name in ("c10d._backend", "c10d._default_pg_init_method")
    },
    "another Accelerate": (ACCELERATE.format(1) + GROUP + TRAINS + "del state.PartialState._shared_state", False),
}  # fmt: skip


@pytest.fixture
def torch(tmp_path):
    """A stand-in for torch, whose import would take more than all these tests."""
    for name, text in TORCH.items():
        write(tmp_path / "torch" / name, text)
    write(tmp_path / "accelerate" / "__init__.py", "")
    write(tmp_path / "accelerate" / "state.py", "class PartialState: _shared_state = {}\n")
    write(tmp_path / "mpi4py.py", "")


@pytest.mark.usefixtures("torch")
@pytest.mark.parametrize("program", TRAINING)
def test_a_worker_that_trains_and_never_has_a_process_group_leaves_word(program, work, folder):
    text, alone = TRAINING[program]
    work(text, WORLD_SIZE="1")
    assert not list(folder.iterdir()), "a single rank has nobody to train with"
    done, _ = work(text, WORLD_SIZE="2")
    assert (done.returncode, done.stderr) == (0, "")
    assert [path.name for path in folder.iterdir()] == (["trained-alone"] if alone else [])


def test_a_worker_says_what_to_change_after_an_exception_that_is_known(work):
    assert "Workers have no keyboard." in work("raise EOFError('EOF when reading a line')")[1].advice
