"""What is asked of ``nvidia-smi``: a program of the test's own, which is slow, fails, or says anything."""

import os

import psutil
import pytest
from unit_helpers import eventually, is_running, write

from metaflow_extensions.torchrun.plugins.torchrun.machine import processes
from metaflow_extensions.torchrun.plugins.torchrun.node import nvidia
from metaflow_extensions.torchrun.plugins.torchrun.node.nvidia import Gpus, NvidiaSmi, parse

TWO = "0, GPU-aaaa-1, 90, 1000, 81559\n1, GPU-bbbb-2, 70, 3000, 81559\n"
ALL = Gpus(2, 80.0, 4000.0, 163118.0)


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """Return a function that makes ``nvidia-smi`` of a shell script, and a reader of it."""
    made = []

    def make(script, wanted=("0", "1")):
        program = write(tmp_path / "nvidia-smi", f"#!/bin/sh\necho $$ >> {tmp_path}/pids\n{script}\n")
        program.chmod(0o755)
        (tmp_path / "pids").touch()
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        made.append(NvidiaSmi(wanted))
        return made[-1]

    make.pids = lambda: [int(line) for line in (tmp_path / "pids").read_text().split()]
    yield make
    for reader in made:
        reader.close()
    eventually(all_reaped)


def all_reaped():
    """Reap orphans, as the supervisor does; tell whether that was all."""
    list(processes.reap(processes.HELPERS))
    return psutil.Process().children() == []


def says(text):
    return f"cat <<'EOF'\n{text}EOF"


@pytest.mark.parametrize(
    ("text", "wanted", "expected"),
    [
        (TWO, ("0", "1"), ALL),
        (TWO, ("1",), Gpus(1, 70.0, 3000.0, 81559.0)),
        (TWO, ("GPU-aaaa",), Gpus(1, 90.0, 1000.0, 81559.0)),
        (TWO, ("2",), None),
        (TWO, ("MIG-GPU-aaaa/1/0",), None),  # a slice
        ("0, GPU-a, [N/A], 10, 20\n", ("0",), Gpus(1, None, 10.0, 20.0)),
        ("0, GPU-a, nan, inf, -3\n1, GPU-b, 3, 4, 5\n", ("0", "1"), Gpus(2, None, None, None)),
        ("No devices were found\n", ("0",), None),
        ("0, GPU-a, 3\n", ("0",), None),
        ("\x00\ufffd,,,,\n" * 1000, ("0",), None),
    ],
)
def test_of_what_it_says_the_gpus_of_this_node_count(text, wanted, expected):
    assert parse(text, wanted) == expected


def test_one_look_asks_and_a_later_one_knows(smi, tmp_path):
    asked = tmp_path / "asked"  # the second time it gives no answer
    reader = smi(f'[ -e {asked} ] && exec sleep 1000\necho "$@" > {asked}\n{says(TWO)}')
    assert reader.look(100.0) is None
    eventually(lambda: reader.look(101.0) == ALL)
    query = "--query-gpu=index,uuid,utilization.gpu,memory.used,memory.total"
    assert asked.read_text() == f"{query} --format=csv,noheader,nounits\n"
    assert reader.look(99.0 + nvidia._EVERY_S) == ALL
    assert len(smi.pids()) == 1
    assert reader.look(100.0 + nvidia._EVERY_S) == ALL
    eventually(lambda: len(smi.pids()) == 2)
    assert reader.look(100.0 + nvidia._FRESH_S) == ALL
    assert reader.look(101.0 + nvidia._FRESH_S) is None


HANGS = "trap '' TERM; exec sleep 1000"
FAILS = [f"{says(TWO)}\nexit 9", "kill -9 $$", says("garbage\n"), "head -c 40 /dev/urandom"]


@pytest.mark.parametrize("script", [HANGS, "exec yes", *FAILS])
def test_one_that_hangs_or_talks_without_end_or_fails_is_ended_and_asked_once_a_minute(smi, script):
    reader = smi(script)
    assert reader.look(0.0) is None
    (pid,) = eventually(smi.pids)
    if script in FAILS:
        eventually(lambda: not is_running(pid))
    assert reader.look(nvidia._LIMIT_S - 1) is None
    eventually(lambda: reader.look(nvidia._LIMIT_S + 1) is None and not psutil.pid_exists(pid))  # not even as a zombie
    assert reader.look(59.0) is None
    assert smi.pids() == [pid]
    reader.look(61.0)
    eventually(lambda: len(smi.pids()) == 2)


def test_the_end_ends_it(smi):
    reader = smi("exec sleep 1000")
    reader.look(0.0)
    (pid,) = eventually(smi.pids)
    for _ in range(2):
        reader.close()
    eventually(lambda: all_reaped() and not psutil.pid_exists(pid))


def test_a_step_that_reaps_all_children_does_no_harm(smi):
    reader = smi(says(TWO))
    reader.look(0.0)
    os.wait()
    assert reader.look(1.0) == ALL


def test_where_there_is_none_or_it_can_not_be_started_nothing_is_known(smi, tmp_path, monkeypatch):
    reader = smi("")
    write(tmp_path / "nvidia-smi", "#!/no/such/interpreter\n").chmod(0o755)
    assert [reader.look(now) for now in (0.0, 1.0)] == [None, None]
    assert smi("", wanted=()).look(0.0) is None
    monkeypatch.setenv("PATH", "/none")
    assert NvidiaSmi(("0",)).look(0.0) is None
