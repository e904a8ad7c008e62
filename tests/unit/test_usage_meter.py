"""What one node tells of its own use while a generation runs: of real processes, and of the kernel's files."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from unit_helpers import eventually, write

from metaflow_extensions.torchrun.plugins.torchrun.machine.accelerators import Machine
from metaflow_extensions.torchrun.plugins.torchrun.machine.cgroup import container_folder
from metaflow_extensions.torchrun.plugins.torchrun.show.reported import USAGE_COLUMNS
from metaflow_extensions.torchrun.plugins.torchrun.supervisor import usage_observer as watch
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.call import Call
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.usage_observer import (
    STEP_S,
    UsageObserver,
    of_container,
    of_processes,
    sum_of_gpus,
)

# --- what the kernel says ---------------------------------------------------------------------------

GROUPS = "sys/fs/cgroup"
# What a container sees.
FILES = {
    "proc/self/cgroup": "0::/\n",
    f"{GROUPS}/cpu.stat": "usage_usec 2500000\nuser_usec 1\n",
    f"{GROUPS}/memory.current": "5000\n",
    f"{GROUPS}/memory.stat": "anon 1\ninactive_file 2000\ntotal_inactive_file 9\n",
}


def machine(root, files):
    for name, text in files.items():
        write(root / name, text)
    return str(root)


@pytest.mark.parametrize(
    ("changed", "used"),
    [
        ({}, (2.5, 3000)),
        ({f"{GROUPS}/memory.stat": ""}, (2.5, 5000)),
        ({f"{GROUPS}/memory.stat": "inactive_file 6000\n"}, (2.5, 0)),
    ],
)
def test_a_container_says_what_all_in_it_uses(tmp_path, changed, used):
    assert of_container(f"{machine(tmp_path, FILES | changed)}/{GROUPS}") == used


@pytest.mark.parametrize(
    ("changed", "is_one"),
    [
        ({}, True),
        ({"proc/self/cgroup": "0::/../..\n"}, True),
        ({"proc/self/cgroup": "0::/user.slice\n"}, True),  # the host's path, which can't be seen from here
        ({"proc/self/cgroup": "0::/user.slice\n", f"{GROUPS}/user.slice/cgroup.procs": "1\n"}, False),
        ({f"{GROUPS}/memory.current": None}, False),  # the machine's own root
    ],
)
def test_where_other_programs_are_in_the_cgroup_there_is_no_container(tmp_path, changed, is_one):
    files = {name: text for name, text in (FILES | changed).items() if text is not None}
    root = machine(tmp_path, files)
    assert container_folder(root) == (f"{root}/{GROUPS}" if is_one else None)


# A parent that sleeps and its child that computes, with a name that a careless split of stat would damage.
FAMILY = """
import os, time
open("/proc/self/comm", "w").write("a) b (c")
if not os.fork():
    while True: pass
os.wait()
"""


def test_a_process_and_what_it_has_started_are_added_up():
    parent = subprocess.Popen([sys.executable, "-S", "-c", FAMILY], start_new_session=True)
    try:
        before, _ = of_processes(parent.pid)
        eventually(lambda: of_processes(parent.pid)[0] > before + 0.1)
        alone = int(Path(f"/proc/{parent.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        assert 0.1 * alone < of_processes(parent.pid)[1] < 2 * alone, "what both share counts for neither"
    finally:
        os.killpg(parent.pid, signal.SIGKILL)
        parent.wait()


# --- what a node tells: a program of the test's own stands for nvidia-smi -----------------------------


class Node:
    """A node with GPUs, on a machine with another node; its agent is this process, and the test holds its clock."""

    def __init__(self, *gpus, env=None):
        spec = {"nproc": 2, "num_nodes": 2, "node_index": 0, "python": "python3", "env": env or {}}
        self.call = Call("/flow/train.py", (), False, machine=Machine(4, gpus, 2, 0), **spec)
        self.now, self.agent = 100.0, SimpleNamespace(pid=os.getpid())
        self.observer = UsageObserver(self, lambda: self.now)
        assert self.observer.poll() is None, "the first look tells nothing yet"

    def after(self, seconds):
        self.now += seconds
        return self.observer.poll()


TWO = "40, 100, 200\n60, 300, 400\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (TWO, {"gpu_percent": 50.0, "gpu_memory_mib": 400.0, "gpu_total_mib": 600.0, "gpu_count": 2}),
        ("[N/A], 10, 20\n", {"gpu_memory_mib": 10.0, "gpu_total_mib": 20.0, "gpu_count": 1}),
        ("nan, inf, -3\n3, 4, 5\n", {}),
        ("No devices were found\n", {}),
    ],
)
def test_what_nvidia_smi_says_is_added_up(text, expected):
    assert sum_of_gpus(text) == expected


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """Return a function that makes ``nvidia-smi`` of a shell script, and then returns what it was started with."""
    asked = tmp_path / "asked"

    def make(script):
        write(tmp_path / "nvidia-smi", f'#!/bin/sh\necho "$@" >> {asked}\n{script}\n').chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        return lambda: asked.read_text().splitlines() if asked.exists() else []

    yield make
    make("")
    node = Node("0", "1")
    eventually(lambda: node.after(STEP_S) and not psutil.Process().children() and not watch.HELPERS)


def when_it_has_ended(node):
    """Return what a node tells next, when the program has ended: only the test's clock is so fast."""
    eventually(lambda: all(child.status() == psutil.STATUS_ZOMBIE for child in psutil.Process().children()))
    return node.after(STEP_S)


def test_a_node_tells_what_its_processes_use_and_now_and_then_what_its_gpus_do(smi):
    asked = smi(f"cat <<'EOF'\n{TWO}EOF")
    node = Node("0", "1", "2", env={"CUDA_VISIBLE_DEVICES": "1,GPU-a"})
    assert node.after(0.9) is None
    first = node.after(0.1)
    assert (first["of"], first["limits"]["cpus"], first["values"].keys()) == ("processes", 4, {"cpus", "memory_mib"})
    assert first["values"]["memory_mib"] > 1
    told = [when_it_has_ended(node) for _ in range(9)]
    used = told[0]
    assert used["values"].keys() <= USAGE_COLUMNS.keys()
    assert (used["values"]["gpu_percent"], used["values"]["gpu_memory_mib"]) == (50.0, 400.0)
    assert (used["limits"]["gpus"], used["limits"]["gpu_memory_mib"]) == (2, 600.0)
    assert ["gpu_percent" in each["values"] for each in told] == [True, *[False, False, False, True] * 2]
    assert all(each["limits"]["gpus"] == 2 for each in told)
    query = "--id=1,GPU-a --query-gpu=utilization.gpu,memory.used,memory.total --format=csv,noheader,nounits"
    assert asked() == [query] * 3


@pytest.mark.parametrize(
    "script",
    ["trap '' TERM; exec sleep 1000", "sleep 1000; true", "setsid sleep 2 & kill -9 $$", "head -c 40 /dev/urandom"],
)
def test_a_program_that_hangs_or_fails_is_ended_and_asked_again(smi, script):
    asked, node = smi(script), Node("0", "1")
    eventually(lambda: "gpu_percent" not in node.after(STEP_S)["values"] and len(asked()) > 1)
