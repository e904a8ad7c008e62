"""What this machine says of CPU, memory and network: faked files of the kernel, and real processes."""

import os
import subprocess
import sys
import time

import pytest
from unit_helpers import eventually, write

from metaflow_extensions.torchrun.plugins.torchrun.features.usage.consumption import (
    Container,
    ProcessTree,
    Used,
)
from metaflow_extensions.torchrun.plugins.torchrun.features.usage.traffic import Traffic, traffic

GROUPS = "sys/fs/cgroup"
# What a container sees, in version 2 and in version 1 of cgroups.
V2 = {
    "proc/self/cgroup": "0::/\n",
    f"{GROUPS}/cgroup.events": "populated 1\n",
    f"{GROUPS}/cpu.stat": "usage_usec 2500000\nuser_usec 1\n",
    f"{GROUPS}/memory.current": "5000\n",
    f"{GROUPS}/memory.stat": "anon 1\ninactive_file 2000\ntotal_inactive_file 9\n",
}
V1 = {
    "proc/self/cgroup": "4:memory:/pod/1\n3:cpu,cpuacct:/pod/1\n",
    f"{GROUPS}/cpuacct/cpuacct.usage": "1500000000\n",
    f"{GROUPS}/memory/memory.usage_in_bytes": "5000\n",
    f"{GROUPS}/memory/memory.stat": "inactive_file 9\ntotal_inactive_file 1000\n",
}
HEADS = "Inter-|   Receive    |  Transmit\n face |bytes packets |bytes packets\n"


def machine(root, files):
    for name, text in files.items():
        write(root / name, text)
    return str(root)


# --- a container ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "used"),
    [
        (V2, Used(2.5, 3000)),
        (V1, Used(1.5, 4000)),
        ({**V2, f"{GROUPS}/memory.stat": ""}, Used(2.5, 5000)),
        ({**V2, f"{GROUPS}/cpu.stat": "nonsense", f"{GROUPS}/memory.current": "max"}, Used(None, None)),
        ({**V2, "proc/self/cgroup": "0::/../..\n"}, Used(2.5, 3000)),
    ],
)
def test_a_container_says_what_all_in_it_uses(tmp_path, files, used):
    assert Container.find(machine(tmp_path, files)).look() == used


@pytest.mark.parametrize(
    "files",
    [
        {},
        {**V2, "proc/self/cgroup": "0::/user.slice\n", f"{GROUPS}/user.slice/cgroup.procs": "1\n"},
        {key: text for key, text in V2.items() if "cgroup.events" not in key},  # the machine's own root
        {**V1, f"{GROUPS}/memory/release_agent": ""},
        {**V1, f"{GROUPS}/cpuacct/pod/1/cpuacct.usage": "1\n"},
        {key: text for key, text in V1.items() if "cpuacct" not in key},
    ],
)
def test_where_other_programs_are_in_the_cgroup_there_is_no_container(tmp_path, files):
    assert Container.find(machine(tmp_path, files)) is None


# --- processes --------------------------------------------------------------------------------------


def a_process(root, pid, parent, ticks=(0, 0, 0, 0), pages=(0, 0)):
    fields = ["S", str(parent), *["0"] * 9, *map(str, ticks), *["0"] * 30]
    write(root / str(pid) / "stat", f"{pid} (a) b) {' '.join(fields)}\n")
    write(root / str(pid) / "statm", f"999 {pages[0]} {pages[1]} 0 0 0 0\n")


def gone(root, pid):
    for name in ("stat", "statm"):
        (root / str(pid) / name).unlink()
    (root / str(pid)).rmdir()


def test_the_processes_below_one_are_added_up_and_no_others(tmp_path):
    hz, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    a_process(tmp_path, 5, 90, (hz, 0, 0, 0), (30, 10))  # a number lower than its parent's
    a_process(tmp_path, 90, 10, (0, hz, 0, 0), (7, 2))
    a_process(tmp_path, 10, 1, (0, 0, 0, 0), (1, 0))
    a_process(tmp_path, 1, 0, (500, 500, 500, 500), (9999, 0))
    a_process(tmp_path, 77, 1, (500, 0, 0, 0), (9999, 0))
    tree = ProcessTree(10, str(tmp_path))
    assert tree.look() == Used(2.0, 26 * page)
    gone(tmp_path, 5)
    a_process(tmp_path, 90, 10, (0, hz, hz, 0), (7, 2))  # it has reaped its child, and has its time
    a_process(tmp_path, 91, 77, (500, 0, 0, 0))
    a_process(tmp_path, 6, 90, (0, 0, 0, 3 * hz), (1, 0))
    assert tree.look() == Used(5.0, 7 * page)
    write(tmp_path / "77" / "stat", "")  # what is another's is not read again
    assert tree.look() == Used(5.0, 7 * page)


def test_a_process_that_vanishes_or_says_nonsense_counts_as_nothing(tmp_path):
    a_process(tmp_path, 10, 1)
    (tmp_path / "11").mkdir()
    write(tmp_path / "self", "")
    assert ProcessTree(10, str(tmp_path)).look() == Used(0.0, 0)
    assert ProcessTree(12, str(tmp_path)).look() == Used(0.0, 0)


def test_real_processes_are_seen_to_work():
    script = "import os\nif not os.fork():\n    while True: pass\nprint(flush=True)\nos.wait()"
    parent = subprocess.Popen([sys.executable, "-S", "-c", script], stdout=subprocess.PIPE, start_new_session=True)
    try:
        parent.stdout.readline()
        tree = ProcessTree(parent.pid)
        before = tree.look()
        assert before.memory_bytes > 1_000_000
        eventually(lambda: tree.look().cpu_s > before.cpu_s)
    finally:
        os.killpg(parent.pid, 9)
        parent.wait()
        parent.stdout.close()


def test_a_look_costs_less_than_a_thousandth_of_a_second_where_others_have_many_processes(tmp_path):
    for pid in range(10, 400):
        a_process(tmp_path, pid, 1 if pid > 18 else 10)
    tree = ProcessTree(10, str(tmp_path))
    tree.look()
    costs = []
    for _ in range(20):
        begin = time.thread_time()
        tree.look()
        costs.append(time.thread_time() - begin)
    assert min(costs) < 0.001


# --- the network ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "real", "expected"),
    [
        ("    lo: 9 1 0 0 0 0 0 0 9 1\n  eth0: 100 1 0 0 0 0 0 0 20 1\n", (), Traffic(100, 20)),
        ("eth0:100 1 0 0 0 0 0 0 20 1\n  br0: 100 1 0 0 0 0 0 0 20 1\n", ("eth0",), Traffic(100, 20)),
        ("  eth0: 100 1 0 0 0 0 0 0 20 1\n  eth1:   1 1 0 0 0 0 0 0 2 1\n", ("eth0", "eth1"), Traffic(101, 22)),
        ("    lo: 9 1 0 0 0 0 0 0 9 1\n", (), None),
        ("  eth0: 100\n", (), None),
        ("", (), None),
    ],
)
def test_what_goes_by_real_interfaces_is_counted_once(tmp_path, lines, real, expected):
    write(tmp_path / "proc/net/dev", HEADS + lines)
    for name in real:
        write(tmp_path / "sys/class/net" / name / "device" / "vendor", "1")
    assert traffic(str(tmp_path)) == expected
