"""What the cgroup tells, in the words of both its versions."""

import signal
from dataclasses import replace

import pytest
from unit_helpers import write

from metaflow_extensions.torchrun.plugins.torchrun.gang.cause import Cause
from metaflow_extensions.torchrun.plugins.torchrun.machine.cgroup import describe_oom, memory_limit_bytes, oom_kills
from metaflow_extensions.torchrun.plugins.torchrun.supervisor import workers
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.workers import MachineFaults

V1, V2 = "sys/fs/cgroup/memory", "sys/fs/cgroup"


def machine(root, files):
    for name, text in files.items():
        write(root / name, text)
    return str(root)


OWN = {"proc/self/cgroup": "4:memory:/a/b\n0::/a/b\n"}


@pytest.mark.parametrize(
    ("files", "kills"),
    [
        ({}, None),
        ({f"{V2}/memory.events": "low 0\nhigh 0\nmax 31\noom 4\noom_kill 3\noom_group_kill 1\n"}, 3),
        ({f"{V1}/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"}, 2),
        ({**OWN, f"{V1}/a/b/memory.oom_control": "oom_kill 2\n", f"{V1}/a/memory.oom_control": "oom_kill 7\n"}, 2),
        ({**OWN, f"{V2}/a/b/memory.events": "oom_kill 2\n", f"{V2}/a/memory.events": "oom_kill 7\n"}, 2),
        ({**OWN, f"{V2}/a/memory.events": "oom_kill 7\n"}, 7),  # the process's own does not count
    ],
)
def test_kills_are_counted_where_the_process_lies(tmp_path, files, kills):
    assert oom_kills(machine(tmp_path, files)) == kills


def of_tree(own, above):
    return {**OWN, f"{V2}/a/b/memory.max": f"{own}\n", f"{V2}/a/memory.max": f"{above}\n"}


MACHINES = {"proc/meminfo": "MemTotal:  4194304 kB\nMemFree: 1 kB\n"}


@pytest.mark.parametrize(
    ("files", "limit", "said"),
    [
        ({}, None, "memory is used up"),
        (MACHINES, 2**32, "memory is used up"),
        ({**MACHINES, f"{V2}/memory.max": "max\n"}, 2**32, "memory is used up"),
        ({f"{V1}/memory.limit_in_bytes": "268435456\n"}, 2**28, "memory limit of 256 MiB was reached"),
        ({f"{V1}/memory.limit_in_bytes": "9223372036854771712\n"}, None, "memory is used up"),
        ({**MACHINES, **of_tree(3 * 2**30, 3 * 2**29)}, 3 * 2**29, "memory limit of 1.5 GiB was reached"),
        (of_tree(2**30, "max"), 2**30, "memory limit of 1 GiB was reached"),
    ],
)
def test_the_smallest_limit_of_all_cgroups_around_the_process_counts(tmp_path, files, limit, said):
    here = machine(tmp_path, files)
    assert memory_limit_bytes(here) == limit
    assert said in describe_oom(here)
    assert "memory of @resources, @kubernetes or @batch" in describe_oom(here)


KILLED = Cause("signal", 0, "host", 1, 1, -signal.SIGKILL, None, "the last lines")


@pytest.mark.parametrize(
    ("before", "now", "exit_code", "is_oom"),
    [
        (1, 2, -signal.SIGKILL, True),
        (1, 1, -signal.SIGKILL, False),
        (1, 2, -signal.SIGSEGV, False),
        (None, 2, -signal.SIGKILL, False),
    ],
)
def test_a_worker_killed_for_lack_of_memory_is_called_so(before, now, exit_code, is_oom, monkeypatch):
    counts = iter([before, now, now])
    monkeypatch.setattr(workers, "oom_kills", lambda: next(counts))
    faults = MachineFaults()
    assert (faults.explained(replace(KILLED, exit_code=exit_code)).kind == "oom") is is_oom
    assert faults.how_ended(exit_code).startswith("ran out of memory") is is_oom
