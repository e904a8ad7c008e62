"""What hanging workers were doing is found out: real processes, asked by py-spy and by the signal."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from setuptools import find_namespace_packages
from unit_helpers import eventually, is_running, worker_environment, write

from metaflow_extensions.torchrun.plugins.torchrun import evidence

PY_SPY = shutil.which("py-spy", path=os.path.dirname(sys.executable))
TORCH = "2.13.0+cpu"
BY_SIGNAL = None  # what is found where py-spy is not installed

# Where kernel.yama.ptrace_scope is 1, py-spy may look at what it has not started only if that allows it.
TRACEABLE = "import ctypes; ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1));"

ANOTHER_THREAD = "threading.Thread(target=time.sleep, args=(1000,), daemon=True)"

HANGS = {
    "sleep": "time.sleep(1000)",
    "lock": "lock = threading.Lock(); lock.acquire(); lock.acquire()",
    "native": "read, _ = os.pipe(); select.select([read], [], [])",
    "read": "read, _ = os.pipe(); os.read(read, 1)",
    "thread": "time.sleep(1000)  # while another thread does, too",
    "fork": "os.fork() or time.sleep(1000); os.wait()",
    "library": "queue.Queue().get()",
}


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "gang's folder ü"
    path.mkdir()
    return path


@pytest.fixture
def start(folder):
    """Start a worker as the agent would, and return its pid when it hangs."""
    started = []

    def begin(argv, env=None):
        inherited = {**os.environ, **(env or {})}
        inherited |= evidence.hook_environment(str(folder), inherited, TORCH)
        inherited = worker_environment(inherited, folder.parent)
        worker = subprocess.Popen(argv, env=inherited, start_new_session=True, stdout=subprocess.PIPE)
        started.append(worker)
        assert worker.stdout.readline() == b"ready\n"
        until(worker.pid, "S")
        return worker.pid

    yield begin
    for worker in started:
        os.killpg(worker.pid, signal.SIGKILL)  # with its children; it is not reaped yet
        worker.wait()
        worker.stdout.close()


def until(pid, state):
    eventually(lambda: evidence._state(pid)[:1] == state, f"state {state}")


@pytest.fixture
def script(tmp_path):
    """Write a script that says that it is ready and hangs in its function `train`."""

    def make(body, before="", name="train.py"):
        text = f"{TRACEABLE} import os, queue, select, sys, threading, time\n{before}\ndef train():\n    {body}\n"
        return str(write(tmp_path / "my scripts" / name, f"{text}print('ready', flush=True)\ntrain()\n"))

    return make


def collect(workers, folder, py_spy=BY_SIGNAL, keep_in=None, within_s=10.0, name="launch0"):
    keep_in = str(keep_in if keep_in is not None else folder.parent / "kept")
    return evidence._collect(workers, str(folder), keep_in, name, within_s, py_spy)


# --- where workers hang -----------------------------------------------------------------------


@pytest.mark.parametrize("py_spy", [PY_SPY, BY_SIGNAL], ids=["py-spy", "signal"])
@pytest.mark.parametrize("how", HANGS)
def test_a_hanging_worker_tells_where(how, py_spy, start, script, folder):
    assert PY_SPY, "the test extra has py-spy"
    before = f"{ANOTHER_THREAD}.start()" if how == "thread" else ""  # it starts before the worker is ready
    pid = start([sys.executable, script(HANGS[how], before)])
    found = collect({3: pid}, folder, py_spy)
    # py-spy guesses the class.
    inner = f" (in {'Condition.' if py_spy else ''}wait)" if how == "library" else ""
    assert found.where == {3: f"train.py:4 in train{inner}"}
    assert f"--- rank 3, pid {pid}: {found.where[3]}\n" in found.text
    assert "train.py" in found.text.split("\n", 1)[1], "the stack itself"
    assert Path(found.file).read_text(encoding="utf-8").strip() == found.text.strip()
    assert is_running(pid), "asking ends nothing"


def test_py_spy_is_used_where_it_is_installed_and_nothing_is_signalled(start, script, folder):
    pid = start([sys.executable, script("time.sleep(1000)")])
    found = collect({0: pid}, folder, PY_SPY)
    assert f"Thread {pid} (idle)" in found.text
    assert (folder / f"stacks-{pid}.txt").read_bytes() == b""


def test_py_spy_is_looked_for_beside_python_then_on_the_path(tmp_path):
    beside, on_path = tmp_path / "env", tmp_path / "path"
    for place in (beside, on_path):
        write(place / "py-spy", "#!/bin/sh\n").chmod(0o755)
    nowhere = tmp_path / "nowhere"
    assert evidence._find_py_spy(str(beside / "python"), str(on_path)) == str(beside / "py-spy")
    assert evidence._find_py_spy(str(nowhere / "python"), str(on_path)) == str(on_path / "py-spy")
    assert evidence._find_py_spy(str(nowhere / "python"), str(nowhere)) is None


def test_the_public_function_finds_all_by_itself(start, script, folder, tmp_path):
    pid = start([sys.executable, script("time.sleep(1000)")])
    found = evidence.collect({0: pid}, str(folder), str(tmp_path / "kept"), "launch0")
    assert found.where == {0: "train.py:4 in train"}


@pytest.mark.parametrize(
    ("does", "said"),
    [
        (
            "echo 'Error: Permission Denied' >&2; echo 'Stack backtrace: 0: x' >&2; exit 1",
            "(py-spy failed: Error: Permission Denied)",
        ),
        ("exit 3", "(py-spy failed: exit code 3)"),
        ("echo 'Process 1: python'", "(py-spy failed: exit code 0)"),
        ("exec sleep 1000", "(py-spy gave no answer within 0.9 s)"),
    ],
)
def test_when_py_spy_fails_the_signal_helps(does, said, start, script, folder, tmp_path):
    fake = write(tmp_path / "bin" / "py-spy", f"#!/bin/sh\n{does}\n")
    fake.chmod(0o755)
    pid = start([sys.executable, script("time.sleep(1000)")])
    found = collect({0: pid}, folder, str(fake), within_s=1.5)
    assert found.where == {0: "train.py:4 in train"}
    assert said in found.text
    assert "backtrace" not in found.text


def test_a_py_spy_that_can_not_be_started_is_no_obstacle(start, script, folder, tmp_path):
    pid = start([sys.executable, script("time.sleep(1000)")])
    found = collect({0: pid}, folder, str(tmp_path / "none" / "py-spy"))
    assert found.where == {0: "train.py:4 in train"}
    assert "(py-spy could not be started (" in found.text


def test_all_workers_are_asked_at_the_same_time(start, script, folder, tmp_path):
    fake = write(tmp_path / "bin" / "py-spy", "#!/bin/sh\nexec sleep 1000\n")
    fake.chmod(0o755)
    pids = [start([sys.executable, script("time.sleep(1000)", name=f"train{rank}.py")]) for rank in range(4)]
    began = time.monotonic()
    found = collect(dict(enumerate(pids)), folder, str(fake), within_s=2.0)
    assert time.monotonic() - began < 2 * 2.0, "one after the other would take 4 x 1.2 s for py-spy alone"
    assert found.where == {rank: f"train{rank}.py:4 in train" for rank in range(4)}
    assert [line[:10] for line in found.text.splitlines() if line.startswith("---")] == [
        f"--- rank {i}" for i in range(4)
    ]


def test_asked_twice_a_worker_tells_its_new_stack_only(start, script, folder):
    pid = start([sys.executable, script("time.sleep(1000)")])
    assert collect({0: pid}, folder).text == collect({0: pid}, folder).text


def test_frames_of_torch_do_not_hide_whose_call_it_was(start, folder, tmp_path):
    """The shape that a hang in all_reduce has, made of files in a place like torch's."""
    site = tmp_path / "lib" / "python3.11" / "site-packages"
    write(site / "torch" / "__init__.py", "")
    write(site / "torch" / "distributed.py", "import time\ndef all_reduce():\n    time.sleep(1000)\n")
    write(site / "trainer.py", "import torch.distributed\ndef loop():\n    torch.distributed.all_reduce()\n")
    path = write(tmp_path / "main.py", f"{TRACEABLE} import trainer\nprint('ready', flush=True)\ntrainer.loop()\n")
    pid = start([sys.executable, str(path)], {"PYTHONPATH": str(site)})
    for py_spy in (PY_SPY, BY_SIGNAL):
        assert collect({0: pid}, folder, py_spy).where == {0: "trainer.py:3 in loop (in all_reduce)"}


@pytest.mark.parametrize("py_spy", [PY_SPY, BY_SIGNAL], ids=["py-spy", "signal"])
def test_a_main_thread_among_too_many_is_found_or_said_to_be_missing(py_spy, start, script, folder):
    """The handler tells of 100 threads, the youngest first."""
    more = f"for _ in range(120): {ANOTHER_THREAD}.start()"
    pid = start([sys.executable, script("time.sleep(1000)", before=more)])
    missing = "of 100 threads none is the main one; install py-spy to see all"
    assert collect({0: pid}, folder, py_spy).where == {0: "train.py:4 in train" if py_spy else missing}


# --- workers that can't answer ----------------------------------------------------------------


NO_PYTHON = ["sh", "-c", "echo ready; sleep 1000; :"]
HANG = TRACEABLE + "print('ready', flush=True); import time; time.sleep(1000)"


@pytest.mark.parametrize("py_spy", [PY_SPY, BY_SIGNAL], ids=["py-spy", "signal"])
@pytest.mark.parametrize(
    "argv",
    [
        NO_PYTHON,
        # Our hook ran, but of the process that it ran in, the handler is gone.
        [sys.executable, "-c", f"import os; os.execvp('sh', {NO_PYTHON})"],
    ],
)
def test_what_is_not_python_is_left_alone(argv, py_spy, start, folder):
    pid = start(argv)
    found = collect({0: pid}, folder, py_spy)
    assert found.where == {
        0: "no Python stack: it has no handler of ours (no Python, or one started with -I, -E or -S)"
    }
    assert is_running(pid)
    assert ("(py-spy failed: Error: " in found.text) is (py_spy is not None)


@pytest.mark.parametrize("option", ["-I", "-E", "-S"])
def test_a_python_without_our_hook_is_never_signalled(option, start, folder):
    pid = start([sys.executable, option, "-c", HANG])
    assert collect({0: pid}, folder).where[0].startswith("no Python stack: it has no handler of ours")
    assert is_running(pid)
    assert collect({0: pid}, folder, PY_SPY).where == {0: "<string>:1 in <module>"}


def test_a_signal_handler_of_the_users_own_is_not_taken_for_ours(start, folder):
    """Without our file it is somebody else's; calling it could do anything."""
    own = f"import signal, sys; signal.signal({evidence._SIGNAL}, lambda *_: sys.exit(1)); "
    pid = start([sys.executable, "-I", "-c", own + HANG])
    assert collect({0: pid}, folder).where[0].startswith("no Python stack: it has no handler of ours")
    assert is_running(pid)


def test_a_stopped_worker_is_seen_by_py_spy_and_said_to_be_stopped_without(start, script, folder):
    pid = start([sys.executable, script("time.sleep(1000)")])
    os.kill(pid, signal.SIGSTOP)
    until(pid, "T")
    assert collect({0: pid}, folder, PY_SPY).where == {0: "train.py:4 in train"}
    began = time.monotonic()
    said = "no Python stack: it is in state T (stopped), so it runs no handler; install py-spy to see it anyway"
    assert collect({0: pid}, folder).where == {0: said}
    assert time.monotonic() - began < 5, "its answer was not awaited"


def test_a_worker_that_does_not_answer_is_said_so_in_time(start, script, folder):
    deaf = f"import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [{evidence._SIGNAL}])"
    workers = {
        0: start([sys.executable, script("time.sleep(1000)", before=deaf)]),
        1: start([sys.executable, "-c", HANG]),
    }
    began = time.monotonic()
    found = collect(workers, folder, within_s=1.0)
    assert 1.0 <= time.monotonic() - began < 4.0
    assert found.where[0] == "no Python stack: it did not answer in time; it is in state S (sleeping)"
    assert found.where[1] == "<string>:1 in <module>"


def test_workers_that_have_ended_are_said_so(folder):
    zombie = subprocess.Popen(["true"])
    until(zombie.pid, "Z")
    assert collect({0: zombie.pid}, folder, PY_SPY).where == {0: "no Python stack: the process has ended"}
    zombie.wait()
    assert collect({0: zombie.pid}, folder, PY_SPY).where == {0: "no Python stack: the process has ended"}


def test_no_worker_is_no_error(folder):
    found = collect({}, folder)
    assert found.where == {}
    assert found.text == ""


# --- the hook in the worker -------------------------------------------------------------------

SHOW = """
import json, os, signal, sys
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps({
    "path": sys.path, "argv": sys.argv, "name": __name__, "main": vars(sys.modules["__main__"])["__file__"],
    "modules": sorted(sys.modules), "custom": str(sys.modules.get("sitecustomize")), "mark": os.environ.get("MARK"),
    "handlers": int(status["SigCgt"], 16),
}))
"""
OUR_HANDLER = 1 << (evidence._SIGNAL - 1)


def run_hooked(argv, folder, env=None, hooked=True):
    inherited = {**os.environ, **(env or {})}
    if hooked:
        inherited = worker_environment(
            inherited | evidence.hook_environment(str(folder), inherited, TORCH), folder.parent
        )
    return subprocess.run([sys.executable, *argv], env=inherited, capture_output=True, text=True, timeout=30)


@pytest.mark.parametrize("env", [{}, {"PYTHONPATH": "{own}"}, {"PYTHONPATH": ":{own}::"}, {"PYTHONPATH": ""}])
def test_a_script_finds_everything_as_it_would_without_us(env, folder, tmp_path):
    own = tmp_path / "own"
    write(own / "sitecustomize.py", "import os; os.environ['MARK'] = 'own'\n")
    env = {name: value.format(own=own) for name, value in env.items()}
    argv = [str(write(tmp_path / "show.py", SHOW)), "--an", "argument"]
    plain, hooked = (run_hooked(argv, folder, env, hooked) for hooked in (False, True))
    assert hooked.stderr == plain.stderr == ""
    before, after = json.loads(plain.stdout), json.loads(hooked.stdout)
    assert after.pop("handlers") == before.pop("handlers") | OUR_HANDLER
    assert set(after.pop("modules")) - set(before.pop("modules")) <= {"faulthandler", "atexit"}
    assert after == before
    assert (after["mark"] == "own") is ("own" in env.get("PYTHONPATH", ""))


@pytest.mark.parametrize("body", ["raise ValueError('mine')", "import no_such_module", "raise SystemExit(3)", "x = ("])
def test_errors_of_the_users_own_sitecustomize_are_as_they_would_be(body, folder, tmp_path):
    write(tmp_path / "own" / "sitecustomize.py", body)
    env = {"PYTHONPATH": str(tmp_path / "own")}
    argv = ["-c", "print('ran')"]
    plain, hooked = (run_hooked(argv, folder, env, hooked) for hooked in (False, True))
    ends = [(each.returncode, each.stdout, each.stderr.splitlines()[-1:]) for each in (plain, hooked)]
    assert ends[0] == ends[1]
    assert len(list(folder.glob("stacks-*"))) == 1, "ours ran, too"


def test_a_user_of_both_is_asked_all_the_same(start, script, folder, tmp_path):
    write(tmp_path / "own" / "sitecustomize.py", "import os; os.environ['MARK'] = 'own'\n")
    path = script("assert os.environ['MARK'] == 'own'; time.sleep(1000)")
    pid = start([sys.executable, path], {"PYTHONPATH": str(tmp_path / "own")})
    assert collect({0: pid}, folder).where == {0: "train.py:4 in train"}


@pytest.mark.parametrize("agent", [None, "", "1"], ids=["nobody asked", "the agent", "not our parent"])
def test_the_hook_does_nothing_in_what_is_no_worker(agent, folder):
    env = worker_environment(evidence.hook_environment(str(folder), {}, TORCH), folder)
    env |= {"TORCHRUN_AGENT_PID": agent} if agent is not None else {"TORCHRUN_STACKS_FOLDER": ""}
    shown = run_hooked(["-c", "__file__ = ''" + SHOW], folder, env, hooked=False)
    assert not json.loads(shown.stdout)["handlers"] & OUR_HANDLER
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("folder_name", ["none", "file"])
@pytest.mark.parametrize("number", ["58", "no number", "9", "1000"])
def test_a_worker_starts_whatever_becomes_of_the_hook(folder_name, number, tmp_path, folder):
    (tmp_path / "file").touch()
    env = worker_environment(evidence.hook_environment(str(folder), {}, TORCH), folder)
    env |= {"TORCHRUN_STACKS_FOLDER": str(tmp_path / folder_name), "TORCHRUN_STACKS_SIGNAL": number}
    done = run_hooked(["-c", "print('ran')"], folder, env, hooked=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ran\n", "")


def test_the_hooks_folder_is_shipped_and_holds_nothing_else(tmp_path):
    hooks = Path(evidence.__file__).parent / "worker_hooks"
    assert [path.name for path in hooks.iterdir() if path.name != "__pycache__"] == ["sitecustomize.py"]
    in_wheel = find_namespace_packages(str(hooks.parents[4]), include=["metaflow_extensions.*"])
    assert "metaflow_extensions.torchrun.plugins.torchrun.worker_hooks" in in_wheel
    # Elsewhere than here, where Metaflow would take the list of files from a build's old egg-info.
    listing = (
        "import metaflow.extension_support as e; print(*(inside for _, inside in e.package_mfext_all()), sep='\\n')"
    )
    done = subprocess.run([sys.executable, "-c", listing], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    in_code_package = done.stdout.splitlines()
    assert "metaflow_extensions/torchrun/plugins/torchrun/worker_hooks/sitecustomize.py" in in_code_package


# --- the environment --------------------------------------------------------------------------


def test_the_recorder_is_switched_on_and_can_be_asked(folder):
    env = evidence.hook_environment(str(folder), {}, TORCH)
    stem = str(folder / "nccl_trace_rank_")
    assert {name: value for name, value in env.items() if name.startswith("TORCH_")} == {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_TEMP_FILE": stem,
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": stem,
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": stem,
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }
    assert list(folder.iterdir()) == [], "the probe is gone"


@pytest.mark.parametrize("version", ["2.4.1", "2.7.1+cu128", "2.8.0", "2.13.0+cpu", "unknown"])
def test_the_recorders_size_is_set_by_the_name_that_this_torch_wants(version, folder):
    """Of another it prints on every rank that it is deprecated, or it does not know it."""
    old = version.startswith(("2.4", "2.7"))
    wanted = {"TORCH_NCCL_TRACE_BUFFER_SIZE" if old else "TORCH_FR_BUFFER_SIZE"}
    env = evidence.hook_environment(str(folder), {}, version)
    assert {name for name in env if "BUFFER_SIZE" in name} == wanted
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        env = evidence.hook_environment(str(folder), {name: "7"}, version)
        assert not [name for name in env if "BUFFER_SIZE" in name], "the user's goes"


@pytest.mark.parametrize("name", ["TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"])
def test_a_dump_file_of_the_user_is_not_overruled_by_the_other_name(name, folder):
    env = evidence.hook_environment(str(folder), {name: "/mine"}, TORCH)
    assert "TORCH_FR_DUMP_TEMP_FILE" not in env
    assert "TORCH_NCCL_DEBUG_INFO_TEMP_FILE" not in env


@pytest.mark.parametrize(
    "name", ["TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "TORCH_FR_BUFFER_SIZE"]
)
def test_nothing_that_the_user_has_set_is_set(name, folder):
    assert name not in evidence.hook_environment(str(folder), {name: "0"}, TORCH)


def test_no_pipe_is_asked_for_where_none_can_be_made(folder):
    """NCCL would end the worker with an exception in a thread."""
    env = evidence.hook_environment(str(folder / "missing"), {}, TORCH)
    assert "TORCH_NCCL_DEBUG_INFO_PIPE_FILE" not in env
    assert "TORCH_FR_BUFFER_SIZE" in env


# --- flight recorder --------------------------------------------------------------------------

# Does what NCCL's monitor thread does: a pipe per rank, looked at now and then; then a dump beside the stem.
RECORDER = """
import os, sys, time
rank, says = sys.argv[1:]
pipe = f"{os.environ['TORCH_NCCL_DEBUG_INFO_PIPE_FILE']}{rank}.pipe"
os.mkfifo(pipe)
fd = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
print("ready", flush=True)
while True:
    try:
        if os.read(fd, 128):
            break
    except BlockingIOError:  # it has been opened, but not written to yet
        pass
    time.sleep(0.05)
if says:
    with open(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + rank, "w") as file:
        for part in says:
            file.write(part); file.flush(); time.sleep(0.05)
time.sleep(1000)
"""


@pytest.fixture
def record(start, tmp_path):
    path = str(write(tmp_path / "recorder.py", RECORDER))
    return lambda rank, says, env=None: start([sys.executable, path, str(rank), says], env)


def test_dumps_are_asked_for_and_kept_whole(record, folder):
    found = collect({2: record(2, "two!"), 5: record(5, "five")}, folder)
    kept = Path(found.file).parent
    assert (kept / "nccl_trace_rank_2").read_text() == "two!"
    assert (kept / "nccl_trace_rank_5").read_text() == "five"
    line = f"NCCL's flight recorder: nccl_trace_rank_2, nccl_trace_rank_5 in {kept}. "
    assert line in found.text
    assert line in Path(found.file).read_text(encoding="utf-8")
    assert {path.name for path in kept.iterdir()} == {"stacks.txt", "nccl_trace_rank_2", "nccl_trace_rank_5"}


@pytest.mark.parametrize("stem", ["{own}/mine_", "mine_"])
def test_a_dump_lands_where_the_user_wants_it_and_is_kept_too(stem, record, folder, tmp_path, monkeypatch):
    (tmp_path / "own").mkdir()
    monkeypatch.chdir(tmp_path / "own")
    write(tmp_path / "own" / "mine_0", "of another day")
    pid = record(0, "today", {"TORCH_FR_DUMP_TEMP_FILE": stem.format(own=tmp_path / "own")})
    monkeypatch.chdir(tmp_path)
    found = collect({0: pid}, folder)
    assert (Path(found.file).parent / "mine_0").read_text() == "today"


def test_an_old_dump_is_not_passed_off_as_the_answer(record, folder, tmp_path):
    write(tmp_path / "mine_0", "of another day")
    pid = record(0, "", {"TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "mine_")})
    found = collect({0: pid}, folder, within_s=1.0)
    assert "recorder.py" in found.where[0], "the stack came nevertheless"
    assert "NCCL" not in found.text


def test_dumps_made_before_are_kept_too_and_dead_pipes_do_no_harm(start, folder):
    write(folder / "nccl_trace_rank_7", "at a timeout of NCCL's own")
    write(folder / "nccl_trace_rank_x", "something else")
    os.mkfifo(folder / "nccl_trace_rank_0.pipe")
    write(folder / "nccl_trace_rank_1.pipe", "no pipe")
    workers = {rank: start([sys.executable, "-c", HANG]) for rank in (0, 1)}
    began = time.monotonic()
    found = collect(workers, folder)
    assert time.monotonic() - began < 5
    assert {path.name for path in Path(found.file).parent.iterdir()} == {"stacks.txt", "nccl_trace_rank_7"}
    assert (folder / "nccl_trace_rank_1.pipe").read_text() == "no pipe"


def test_a_dump_that_can_not_be_copied_is_not_promised(start, folder):
    (folder / "nccl_trace_rank_3").mkdir()
    found = collect({0: start([sys.executable, "-c", HANG])}, folder)
    assert "NCCL" not in found.text
    assert os.listdir(os.path.dirname(found.file)) == ["stacks.txt"]


# --- keeping ----------------------------------------------------------------------------------


def test_everything_is_in_a_fresh_folder_of_that_name(start, folder, tmp_path):
    workers = {0: start([sys.executable, "-c", HANG])}
    files = [Path(collect(workers, folder, keep_in=tmp_path / "a" / "b", name="../Flow/1 ü*").file) for _ in range(2)]
    assert files[0] != files[1]
    for file in files:
        assert file.name == "stacks.txt"
        assert file.parent.name.startswith("torchrun-hang-.._Flow_1_ü_-")
        assert file.parent.parent == tmp_path / "a" / "b"


def test_without_a_place_it_goes_to_the_temporary_folder(start, folder, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    workers = {0: start([sys.executable, "-c", HANG])}
    for place in (None, str(write(tmp_path / "a file", "")), "/proc/none"):
        found = evidence._collect(workers, str(folder), place, "launch0", 10.0, BY_SIGNAL)
        assert Path(found.file).parent.parent == tmp_path
        assert "rank 0" in Path(found.file).read_text()


def test_a_full_disk_does_not_lose_the_text(start, folder, tmp_path, monkeypatch):
    """No file may grow, which is how it is on a full disk."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temp"))
    (tmp_path / "temp").mkdir()
    workers = {0: start([sys.executable, "-c", HANG])}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        found = collect(workers, folder, keep_in=tmp_path / "kept")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert found.file is None
    assert found.where == {0: "<string>:1 in <module>"}
    assert 'File "<string>", line 1 in <module>' in found.text
    assert [*(tmp_path / "temp").iterdir(), *(tmp_path / "kept").iterdir()] == [], "nothing half is left"


def test_long_stacks_are_whole_in_the_file_and_bounded_in_the_log(folder, tmp_path):
    frames = '"    frame%d (/x.py:%d)\\n" % (i, i) for i in range(100000)'
    fake = write(
        tmp_path / "bin" / "py-spy",
        f"#!{sys.executable}\nimport sys\nprint('Thread ' + sys.argv[-1] + ' (idle)')\nprint(''.join({frames}))\n",
    )
    fake.chmod(0o755)
    workers = dict.fromkeys(range(3), os.getpid())
    found = collect(workers, folder, str(fake))
    assert len(found.text) < 210_000
    for rank in workers:
        assert f"--- rank {rank}, pid {os.getpid()}: x.py:0 in frame0\n" in found.text
    assert found.text.count("frame1 (") == found.text.count("frame99999 (") == 3
    assert found.text.count("characters left out") == 3
    assert Path(found.file).read_text().count("\n    frame") == 300_000
