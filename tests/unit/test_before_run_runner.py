"""What runs the commands of ``before_run``: a process of its own, with real commands."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress

import psutil
import pytest
from unit_helpers import eventually, is_running

from metaflow_extensions.torchrun.plugins.torchrun.features.before_run.program import SCRIPT

SH = ["sh", "-ec"]


class Run:
    """A runner of commands."""

    def __init__(self, folder, *commands, cwd=None, env=None):
        self.folder = folder
        folder.mkdir()
        (folder / "cwd").mkdir()
        self.cwd = cwd or folder / "cwd"
        described = [{"argv": argv, "shown": " ".join(argv)} for argv in commands]
        (folder / "commands.json").write_text(json.dumps(described))
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", SCRIPT, str(folder)],
            cwd=self.cwd,
            env={**os.environ, **(env or {})},
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def wait(self):
        self.process.communicate(b"for nobody", timeout=20)
        return self.process.returncode

    @property
    def ended(self):
        path = self.folder / "ended.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [tuple(json.loads(line)[name] for name in ("number", "status", "error")) for line in lines]

    def output(self, number):
        return (self.folder / "before_run" / "attempt_0" / str(number) / "stdout.log").read_bytes()


@pytest.fixture
def run(tmp_path):
    """Return a function that starts a runner."""
    started = []

    def start(*commands, **options):
        started.append(Run(tmp_path / f"run-{len(started)}", *commands, **options))
        return started[-1]

    yield start
    for each in started:
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(each.process.pid).children(recursive=True):
                child.kill()
        each.process.kill()
        each.process.communicate()


def test_commands_run_one_after_the_other_with_both_streams_in_order(run):
    runner = run(
        [*SH, "echo one; echo two >&2; printf 'three'; cat; touch made; sleep 0.2"],
        [sys.executable, "-c", "import os; os.write(1, b'\\xff\\x00' + str(os.listdir()).encode())"],
    )
    assert runner.wait() == 0
    assert runner.ended == [(0, 0, None), (1, 0, None)]
    seconds = [json.loads(line)["seconds"] for line in (runner.folder / "ended.jsonl").read_text().splitlines()]
    assert 0.2 <= seconds[0] < 20
    begin, *lines, end, rest = runner.output(0).split(b"\n")
    assert (begin[:2], lines, rest) == (b"$ ", [b"one", b"two", b"three"], b"")  # `cat` has read the end of its stdin
    assert end.startswith(b"ended well after ")
    assert b"\n\xff\x00['made']\nended well" in runner.output(1)


@pytest.mark.parametrize(
    ("argv", "status", "error"),
    [
        ([*SH, "exit 3"], 3, None),
        ([*SH, "false; echo not here"], 1, None),  # -e
        ([*SH, "kill -9 $$"], -9, None),
        (["no such program"], None, "could not be started: [Errno 2] No such file or directory: 'no such program'"),
        (["/etc/passwd"], None, "could not be started: [Errno 13] Permission denied: '/etc/passwd'"),
    ],
)
def test_the_first_that_fails_is_the_last(argv, status, error, run):
    runner = run(["true"], argv, [*SH, "touch never"])
    assert runner.wait() == 1
    assert runner.ended == [(0, 0, None), (1, status, error)]
    assert b"\nnot here" not in runner.output(1)
    assert b"ended well" not in runner.output(1)
    assert os.listdir(runner.cwd) == []


def test_at_sigterm_the_command_ends_with_its_group(run):
    """The kernel sends it if the guardian is killed."""
    runner = run([*SH, "sleep 300 & echo $! > child; wait"], ["touch", "never"])
    child = int(eventually(lambda: (runner.cwd / "child").exists() and (runner.cwd / "child").read_text()))
    runner.process.send_signal(signal.SIGTERM)
    assert runner.wait() == 128 + signal.SIGTERM
    assert runner.ended == []  # it did not fail by itself
    eventually(lambda: not is_running(child))
    assert os.listdir(runner.cwd) == ["child"]


def test_those_of_one_folder_run_one_after_the_other(run):
    """Two installations into one place at once would hurt each other."""
    first = run([*SH, "touch begun; while [ ! -e go ]; do sleep 0.02; done; rm begun"])
    eventually((first.cwd / "begun").exists)
    second = run([*SH, "! [ -e begun ]"], cwd=first.cwd)
    third = run(["true"])
    assert third.wait() == 0  # in another folder
    stderr = second.process.stderr
    os.set_blocking(stderr.fileno(), False)
    said = eventually(stderr.read)
    assert said.decode() == f"waiting: before_run of another node runs in the same folder, {first.cwd}\n"
    assert not second.ended
    (first.cwd / "go").touch()
    assert (first.wait(), second.wait()) == (0, 0)


def test_who_waits_for_the_folder_ends_at_sigterm(run):
    first = run(["sleep", "300"])
    eventually(lambda: (first.folder / "before_run").exists())
    second = run(["touch", "never"], cwd=first.cwd)
    eventually(lambda: os.read(second.process.stderr.fileno(), 1000))
    second.process.send_signal(signal.SIGTERM)
    assert second.wait() == 128 + signal.SIGTERM
    assert second.ended == []


def test_a_command_that_starts_a_gang_of_its_own_there_does_not_wait_for_itself(run, tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "commands.json").write_text('[{"argv": ["true"], "shown": "true"}]')
    assert run([sys.executable, "-I", SCRIPT, str(tmp_path / "inner")]).wait() == 0
    assert (tmp_path / "inner" / "ended.jsonl").exists()
