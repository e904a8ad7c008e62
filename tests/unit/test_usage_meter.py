"""What one node tells of its own use while a generation runs: of real processes, and of the kernel's files."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from unit_helpers import eventually, write

from metaflow_extensions.torchrun.plugins.torchrun.launch.spec import LaunchSpec
from metaflow_extensions.torchrun.plugins.torchrun.machine.accelerators import Machine
from metaflow_extensions.torchrun.plugins.torchrun.machine.cgroup import container_folder
from metaflow_extensions.torchrun.plugins.torchrun.node import usage_observer as watch
from metaflow_extensions.torchrun.plugins.torchrun.node.consumption import of_container, of_processes, traffic
from metaflow_extensions.torchrun.plugins.torchrun.node.request import Request
from metaflow_extensions.torchrun.plugins.torchrun.node.usage_observer import STEP_S, UsageObserver
from metaflow_extensions.torchrun.plugins.torchrun.show.reported import USAGE_COLUMNS

# --- what the kernel says ---------------------------------------------------------------------------

GROUPS = "sys/fs/cgroup"
# What a container sees.
FILES = {
    "proc/self/cgroup": "0::/\n",
    f"{GROUPS}/cgroup.events": "populated 1\n",
    f"{GROUPS}/cpu.stat": "usage_usec 2500000\nuser_usec 1\n",
    f"{GROUPS}/memory.current": "5000\n",
    f"{GROUPS}/memory.stat": "anon 1\ninactive_file 2000\ntotal_inactive_file 9\n",
}
HEADS = "Inter-|   Receive    |  Transmit\n face |bytes packets |bytes packets\n"


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
        ({f"{GROUPS}/cpu.stat": "nonsense", f"{GROUPS}/memory.current": "max"}, (None, None)),
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
        ({f"{GROUPS}/cgroup.events": None}, False),  # the machine's own root
    ],
)
def test_where_other_programs_are_in_the_cgroup_there_is_no_container(tmp_path, changed, is_one):
    files = {name: text for name, text in (FILES | changed).items() if text is not None}
    root = machine(tmp_path, files)
    assert container_folder(root) == (f"{root}/{GROUPS}/" if is_one else None)


# A parent that sleeps and its child that computes, with a name that a careless split of stat would damage.
FAMILY = """
import os, time
open("/proc/self/comm", "w").write("a) b (c")
if not os.fork():
    while time.process_time() < {seconds}: pass
    os._exit(0)
print(flush=True)
os.wait()
print(flush=True)
time.sleep(1000)
"""


@pytest.fixture
def family():
    started = []

    def start(seconds):
        argv = [sys.executable, "-S", "-c", FAMILY.format(seconds=seconds)]
        started.append(subprocess.Popen(argv, stdout=subprocess.PIPE, start_new_session=True))
        started[-1].stdout.readline()
        return started[-1]

    yield start
    for parent in started:
        os.killpg(parent.pid, 9)
        parent.wait()
        parent.stdout.close()


def test_a_process_and_what_it_has_started_are_added_up(family):
    parent = family(1000)
    before, _ = of_processes(parent.pid)
    eventually(lambda: of_processes(parent.pid)[0] > before + 0.05)
    alone = int(Path(f"/proc/{parent.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    assert 0.1 * alone < of_processes(parent.pid)[1] < 2 * alone, "what both share counts for neither"


def test_the_time_of_a_process_that_has_ended_is_not_lost(family):
    parent = family(0.2)
    parent.stdout.readline()
    assert 0.15 < of_processes(parent.pid)[0] < 2


@pytest.mark.parametrize(
    ("lines", "real", "expected"),
    [
        ("    lo: 9 1 0 0 0 0 0 0 9 1\n  eth0: 100 1 0 0 0 0 0 0 20 1\n", (), (100, 20)),
        ("eth0:100 1 0 0 0 0 0 0 20 1\n  br0: 100 1 0 0 0 0 0 0 20 1\n", ("eth0",), (100, 20)),
        ("  eth0: 100 1 0 0 0 0 0 0 20 1\n  eth1:   1 1 0 0 0 0 0 0 2 1\n", ("eth0", "eth1"), (101, 22)),
        ("    lo: 9 1 0 0 0 0 0 0 9 1\n", (), None),
        ("", (), None),
    ],
)
def test_what_goes_by_real_interfaces_is_counted_once(tmp_path, lines, real, expected):
    write(tmp_path / "proc/net/dev", HEADS + lines)
    for name in real:
        write(tmp_path / "sys/class/net" / name / "device" / "vendor", "1")
    assert traffic(str(tmp_path)) == expected


# --- what a node tells ------------------------------------------------------------------------------

SHARED = Machine(4, (), 2, 0)  # with another node


class Node:
    """A node whose clock the test holds; without a pid, its agent is this process."""

    def __init__(self, folder, machine=SHARED, pid=None, num_nodes=2, **spec):
        spec = {"nproc": 2, "num_nodes": num_nodes, "node_index": 0, "python": "python3", **spec}
        plan = Request(LaunchSpec("/flow/train.py", (), False, **spec), "127.0.0.1", machine)
        self.now = 100.0
        self.pid = pid or os.getpid()
        self.written = 0
        here = SimpleNamespace(request=plan, folder=str(folder), pid=lambda: self.pid, written=lambda: self.written)
        self.watcher = UsageObserver(here, lambda: self.now)
        assert self.watcher.poll() is None, "the first look tells nothing yet"

    def after(self, seconds):
        self.now += seconds
        return self.watcher.poll()


def test_a_node_tells_what_its_processes_use_and_write(tmp_path, family):
    busy = family(1000)
    node = Node(tmp_path, pid=busy.pid)
    node.written = 1000
    assert node.after(0.9) is None
    first = node.after(0.1)
    assert (first["of"], first["limits"]["cpus"]) == ("processes", 4)
    assert first["limits"]["memory_mib"] > 100
    assert first["values"]["output_bytes_s"] == 1000
    assert first["values"]["memory_mib"] > 0.1
    assert set(first["values"]) <= USAGE_COLUMNS.keys()
    assert "received_kib_s" not in first["values"], "nodes of one machine share its network"
    before = of_processes(busy.pid)[0]
    eventually(lambda: of_processes(busy.pid)[0] > before)
    assert node.after(STEP_S - 0.1) is None
    second = node.after(0.2)["values"]
    assert second["cpus"] > 0
    assert second["output_bytes_s"] == 0


@pytest.mark.parametrize(("machine", "of"), [(Machine(4), "container"), (SHARED, "processes")])
def test_a_container_counts_for_the_node_unless_nodes_share_it(tmp_path, monkeypatch, machine, of):
    monkeypatch.setattr(watch, "container_folder", lambda: "/a container")
    monkeypatch.setattr(watch, "of_container", lambda folder: (node.now * 3, 5 * 2**20))
    node = SimpleNamespace(now=100.0)
    node = Node(tmp_path, machine)
    used = node.after(2.0)
    assert used["of"] == of
    assert ((used["values"]["cpus"], used["values"]["memory_mib"]) == (3.0, 5.0)) is (of == "container")


@pytest.mark.parametrize(("num_nodes", "step_s"), [(2, 5.0), (1000, 100.0)])
def test_a_late_look_makes_up_for_none(tmp_path, num_nodes, step_s):
    node = Node(tmp_path, num_nodes=num_nodes)
    assert node.after(12 * step_s) is not None
    assert node.after(0.0) is not None  # the fixed times go on from here
    assert node.after(0.0) is None
    assert node.after(step_s - 0.1) is None
    assert node.after(0.2) is not None


@pytest.mark.parametrize(
    ("env", "percent", "memory_mib", "limits"),
    [((), 50.0, 400.0, (2, 600.0)), ((("CUDA_VISIBLE_DEVICES", "1"),), 60.0, 300.0, (1, 400.0))],
)
def test_a_node_with_a_machine_of_its_own_tells_the_network_and_its_gpus(
    tmp_path, monkeypatch, env, percent, memory_mib, limits
):
    smi = write(tmp_path / "nvidia-smi", "#!/bin/sh\necho '0, GPU-a, 40, 100, 200'\necho '1, GPU-b, 60, 300, 400'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(watch, "traffic", lambda: (int(node.now * 2048), int(node.now * 1024)))
    node = SimpleNamespace(now=100.0)
    node = Node(tmp_path, Machine(4, ("0", "1")), env=env)
    used = eventually(lambda: (used := node.after(STEP_S)) and "gpu_percent" in used["values"] and used)
    assert (used["values"]["received_kib_s"], used["values"]["sent_kib_s"]) == (2.0, 1.0)
    assert (used["values"]["gpu_percent"], used["values"]["gpu_memory_mib"]) == (percent, memory_mib)
    assert (used["limits"]["gpus"], used["limits"]["gpu_memory_mib"]) == limits
    node.watcher.close()
