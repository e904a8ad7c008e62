"""The signs that a node is taken away are seen once, when they come."""

import os
import shutil
import signal
import subprocess
import threading

import pytest
from unit_helpers import eventually

from metaflow_extensions.torchrun.plugins.torchrun.task import spot_notice as module
from metaflow_extensions.torchrun.plugins.torchrun.task.spot_notice import POD_SCRIPT, pod_is_told_to_stop, watch

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


def nobody_looks():
    return "torchrun-preemption" not in {thread.name for thread in threading.enumerate()}


def test_a_notice_is_passed_on_once(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_LOOK_S", 0.01)
    path, looks, seen = tmp_path / "notice", [], []
    monkeypatch.setattr(module, "pod_is_told_to_stop", lambda: looks.append(seen[:]))
    watch(str(path), seen.append)
    assert eventually(lambda: len(looks) > 2)
    (tmp_path / "whole").write_text("2026-11-21T10:00:00Z\n")
    (tmp_path / "whole").rename(path)
    assert eventually(nobody_looks)
    assert seen == [SPOT]
    assert looks == [[]] * len(looks)


def test_nobody_looks_after_the_end(monkeypatch):
    monkeypatch.setattr(module, "_LOOK_S", 0.01)
    monkeypatch.setattr(module, "pod_is_told_to_stop", lambda: pytest.fail("looked"))
    watch(None, pytest.fail).set()
    assert eventually(nobody_looks)


def test_sigterm_to_a_pods_shell_is_seen_by_its_other_processes(pod):
    script = POD_SCRIPT + "echo own script"
    assert not {"$$", "$("} & {script[at : at + 2] for at in range(len(script))}  # Kubernetes would read them first
    shell = pod(script)
    assert shell.stdout.readline() == "own script\n"
    assert shell.stdout.readline() == f"pid {shell.pid} shell {shell.pid}\n"  # the same process, as kubelet knows it
    environ = {"TORCHRUN_POD_SHELL": str(shell.pid)}
    assert pod_is_told_to_stop(environ) is pod_is_told_to_stop({}) is None
    shell.terminate()
    assert eventually(lambda: pod_is_told_to_stop(environ))
    assert "its pod got SIGTERM" in pod_is_told_to_stop(environ)
    out, _ = shell.communicate("")  # its commands go on to their end
    assert shell.returncode == 5
    assert int(out.split()[-1], 16) >> (signal.SIGTERM - 1) & 1  # what is started there has to undo it


def test_a_pod_without_python_starts_as_it_did(pod, tmp_path):
    for name in ("cat", "grep", "bash"):
        (tmp_path / name).symlink_to(shutil.which(name))
    shell = pod(POD_SCRIPT + "true", PATH=str(tmp_path))
    assert shell.stdout.readline() == f"pid {shell.pid} shell none\n"
    shell.communicate("")
    assert shell.returncode == 5


def test_a_task_heeds_sigterm_again():
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        module.heed_sigterm_in_pod({})
        assert signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, [])
        module.heed_sigterm_in_pod({"TORCHRUN_POD_SHELL": "1"})
        assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
