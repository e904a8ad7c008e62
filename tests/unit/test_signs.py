"""What tells that a task must end is seen once, when it comes."""

import os
import signal
import subprocess
import time
from types import SimpleNamespace

import pytest
from loops import InLoop, Loop
from unit_helpers import eventually

from metaflow_extensions.torchrun.plugins.torchrun.machine import processes
from metaflow_extensions.torchrun.plugins.torchrun.machine.pods import told_to_stop
from metaflow_extensions.torchrun.plugins.torchrun.supervisor import signs as module
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.signs import Signs
from metaflow_extensions.torchrun.plugins.torchrun.task.signs import (
    POD_SCRIPT,
    heed_sigterm_in_pod,
    signs,
)

SPOT = "a spot notice says that its machine will be taken away (2026-11-21T10:00:00Z)"
# As Metaflow's pods start (`Kubernetes._command` in kubernetes.py, 2.19), with commands that tell what became of them.
POD = """${INIT:+eval "${INIT}"} && echo "pid $$ shell ${TORCHRUN_POD_SHELL:-none}" && cat && \
(grep SigBlk /proc/self/status; exit 5); c=$?; exit $c"""


@pytest.fixture
def pod():
    """Return a function that starts a shell as a pod does, and its environment."""
    shells = []

    def start(script, **environ):
        env = {"PATH": os.environ["PATH"], "INIT": script, **environ}
        shells.append(
            subprocess.Popen(["bash", "-c", POD], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
        return shells[-1]

    yield start
    for shell in shells:
        shell.kill()
        shell.communicate()


def test_a_notice_is_passed_on_once(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_LOOK_S", 0.01)
    path, looks, told, loop = tmp_path / "notice", [], [], Loop()
    monkeypatch.setattr(module, "told_to_stop", lambda shell: looks.append(shell))
    here = processes.Process(os.getpid(), processes.began(os.getpid()))
    about = {**signs({}, 1.0, None, 1), "looks": True, "notice_file": str(path), "shell": 77}
    side = SimpleNamespace(tell_task=lambda what, why: told.append(why))
    looking = InLoop(loop, lambda: Signs(here, about, side))
    assert eventually(lambda: len(looks) > 2)
    (tmp_path / "whole").write_text("2026-11-21T10:00:00Z\n")
    (tmp_path / "whole").rename(path)
    assert eventually(lambda: told == [SPOT])
    before = len(looks)
    time.sleep(0.1)
    assert (len(looks), set(looks), told) == (before, {77}, [SPOT])
    looking.close()
    loop.stop()


def test_sigterm_to_a_pods_shell_is_seen_by_its_other_processes(pod):
    script = POD_SCRIPT + "echo own script"
    assert not {"$$", "$("} & {script[at : at + 2] for at in range(len(script))}  # Kubernetes would read them first
    shell = pod(script)
    assert shell.stdout.readline() == "own script\n"
    assert shell.stdout.readline() == f"pid {shell.pid} shell {shell.pid}\n"  # the same process, as kubelet knows it
    environs = [{"TORCHRUN_POD_SHELL": str(shell.pid)}, {}, {"TORCHRUN_POD_SHELL": "none"}]
    assert [signs(each, 1.0, None, None)["shell"] for each in environs] == [shell.pid, 0, 0]
    assert told_to_stop(shell.pid) is told_to_stop(0) is None
    shell.terminate()
    assert eventually(lambda: told_to_stop(shell.pid))
    assert "its pod got SIGTERM" in told_to_stop(shell.pid)
    out, _ = shell.communicate("")  # its commands go on to their end
    assert shell.returncode == 5
    assert int(out.split()[-1], 16) >> (signal.SIGTERM - 1) & 1  # what is started there has to undo it


def test_a_task_heeds_sigterm_again():
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        heed_sigterm_in_pod({})
        assert signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, [])
        heed_sigterm_in_pod({"TORCHRUN_POD_SHELL": "1"})
        assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
