"""What this machine says of CPU, memory and network: faked files of the kernel, and real processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from unit_helpers import eventually, write

from metaflow_extensions.torchrun.plugins.torchrun.features.usage.consumption import of_container, of_processes, traffic
from metaflow_extensions.torchrun.plugins.torchrun.machine.cgroup import container_folder

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


def test_of_a_process_that_is_gone_nothing_is_known():
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert of_processes(gone.pid) == (None, None)


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
