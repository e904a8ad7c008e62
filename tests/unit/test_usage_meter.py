"""What one node tells of its own use while a generation runs."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from fake_node import FakeNode
from unit_helpers import eventually, write

from metaflow_extensions.torchrun.plugins.torchrun.features.usage import meter as usage_meter
from metaflow_extensions.torchrun.plugins.torchrun.features.usage.consumption import Container, ProcessTree
from metaflow_extensions.torchrun.plugins.torchrun.features.usage.feature import Usage
from metaflow_extensions.torchrun.plugins.torchrun.features.usage.meter import UsageMeter, gpus_of
from metaflow_extensions.torchrun.plugins.torchrun.features.usage.series import KINDS, LIMITS, STEP_S, step_s
from metaflow_extensions.torchrun.plugins.torchrun.features.usage.traffic import Traffic
from metaflow_extensions.torchrun.plugins.torchrun.gang.keepers import Keepers
from metaflow_extensions.torchrun.plugins.torchrun.gang.protocol import Ended, Told
from metaflow_extensions.torchrun.plugins.torchrun.launch.spec import LaunchSpec
from metaflow_extensions.torchrun.plugins.torchrun.machine.accelerators import Machine
from metaflow_extensions.torchrun.plugins.torchrun.node.plan import Plan


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def a_plan(machine=None, env=(), shown=None, num_nodes=2, **more):
    spec = LaunchSpec(
        "/flow/train.py",
        (),
        False,
        nproc=2,
        num_nodes=num_nodes,
        node_index=0,
        python="python3",
        env=env,
        shown_local_ranks=shown,
    )
    return Plan(spec, "127.0.0.1", machine or Machine(4, (), 2, 0), lambda *_: True, **more)


@pytest.fixture
def busy():
    """Return a process that computes."""
    code = "print(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE) as process:
        process.stdout.readline()  # before that it may not even have memory of its own
        yield process
        process.kill()


def test_a_node_tells_what_its_processes_use_and_write(tmp_path, busy):
    follower, clock = SimpleNamespace(shown_lines=0), Clock()
    meter = UsageMeter(a_plan(), str(tmp_path), follower, busy.pid, clock)
    assert meter.look() is None
    write(tmp_path / "x" / "attempt_0" / "0" / "stdout.log", "a" * 600)
    write(tmp_path / "x" / "attempt_0" / "1" / "stderr.log", "b" * 400)
    follower.shown_lines = 2
    clock.now += 1.0
    first = meter.look()
    assert first.of == "processes"
    assert first.limits["cpus"] == 4
    assert first.limits["memory_mib"] > 100
    assert first.values["output_bytes_s"] == 1000
    assert first.values["output_lines_s"] == 2
    assert first.values["memory_mib"] > 0.1
    assert set(first.values) <= set(KINDS)
    assert set(first.limits) <= set(LIMITS)
    assert "received_kib_s" not in first.values, "nodes of one machine share its network"
    clock.now += STEP_S - 0.1
    assert meter.look() is None
    clock.now += 0.2
    before = ProcessTree(busy.pid).look().cpu_s
    eventually(lambda: ProcessTree(busy.pid).look().cpu_s > before)
    second = meter.look()
    assert second.values["cpus"] > 0
    assert second.values["output_bytes_s"] == 0


@pytest.mark.parametrize(("nodes_here", "of"), [(1, "container"), (2, "processes")])
def test_a_container_counts_for_the_node_unless_nodes_share_it(tmp_path, monkeypatch, nodes_here, of):
    monkeypatch.setattr(Container, "find", lambda: Container(lambda: clock.now * 3, lambda: 5 * 2**20))
    clock = Clock()
    plan = a_plan(Machine(4, (), nodes_here, 0))
    meter = UsageMeter(plan, str(tmp_path), SimpleNamespace(shown_lines=0), os.getpid(), clock)
    clock.now += 2.0
    used = meter.look()
    assert used.of == of
    assert ((used.values["cpus"], used.values["memory_mib"]) == (3.0, 5.0)) is (of == "container")


def test_a_late_look_makes_up_for_none(tmp_path):
    clock = Clock()
    meter = UsageMeter(a_plan(), str(tmp_path), SimpleNamespace(shown_lines=0), os.getpid(), clock)
    clock.now += 60.0
    assert meter.look() is not None
    assert meter.look() is not None  # the fixed times go on from here
    assert meter.look() is None


def test_lines_are_not_counted_where_not_all_are_shown(tmp_path):
    clock = Clock()
    meter = UsageMeter(a_plan(shown=(0,)), str(tmp_path), SimpleNamespace(shown_lines=0), os.getpid(), clock)
    clock.now += 1.0
    assert "output_lines_s" not in meter.look().values


def test_a_node_of_a_large_gang_measures_less_often(tmp_path):
    clock = Clock()
    plan = a_plan(num_nodes=1000)
    meter = UsageMeter(plan, str(tmp_path), SimpleNamespace(shown_lines=0), os.getpid(), clock)
    clock.now += 1.0
    assert meter.look() is not None
    clock.now += step_s(1000) - 0.1
    assert meter.look() is None
    clock.now += 0.2
    assert meter.look() is not None


def test_a_node_with_a_machine_of_its_own_tells_the_network_and_its_gpus(tmp_path, monkeypatch):
    smi = write(tmp_path / "nvidia-smi", "#!/bin/sh\necho '0, GPU-a, 40, 100, 200'\necho '1, GPU-b, 60, 300, 400'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(usage_meter, "traffic", lambda: Traffic(int(clock.now * 2048), int(clock.now * 1024)))
    clock = Clock()
    plan = a_plan(Machine(4, ("0", "1")))
    meter = UsageMeter(plan, str(tmp_path), SimpleNamespace(shown_lines=0), os.getpid(), clock)

    def next_look():
        clock.now += STEP_S
        return meter.look()

    used = eventually(lambda: (used := next_look()) and "gpu_percent" in used.values and used)
    assert used.values["received_kib_s"] == 2.0
    assert used.values["sent_kib_s"] == 1.0
    assert (used.values["gpu_percent"], used.values["gpu_memory_mib"]) == (50.0, 400.0)
    assert (used.limits["gpus"], used.limits["gpu_memory_mib"]) == (2, 600.0)
    meter.close()


@pytest.mark.parametrize(
    ("machine", "env", "gpus"),
    [
        (Machine(4, ("0", "1")), (), ("0", "1")),
        (Machine(4, ("0", "1"), 2, 1), (), ("1",)),
        (Machine(4, ("0",), 2, 1), (), ()),
        (Machine(4, ("0", "1")), (("CUDA_VISIBLE_DEVICES", "1"),), ("1",)),
        (Machine(4, ("0", "1")), (("CUDA_VISIBLE_DEVICES", ""),), ()),
    ],
)
def test_only_the_gpus_that_the_workers_see_are_asked_for(machine, env, gpus):
    assert gpus_of(a_plan(machine, env)) == gpus


# --- in a launch ------------------------------------------------------------------------------------


def test_a_launch_tells_it_to_the_gang_which_keeps_it(tmp_path, monkeypatch):
    monkeypatch.setattr(usage_meter, "_FIRST_S", 0.0)
    node = FakeNode(tmp_path, features=(Usage(),))
    node.guardian = os.getpid()
    node.launch()
    agent = node.go()
    told = node.expect(Told)
    assert (told.launch, told.generation, told.feature) == (0, 0, "usage")
    assert told.data["values"]["memory_mib"] > 1
    for num_nodes, of_all in ((2, True), (2, False)):
        kept = Keepers({"usage": Usage().keeper(num_nodes, of_all)})
        kept.handle(1, told, 7.0)
        (series,) = kept.record()["usage"]["nodes"].values()
        assert series["of"] == told.data["of"]
        assert len(series["memory_mib"]) == 2
    node.ends_well(agent)


def test_what_can_not_be_measured_does_not_end_the_launch(tmp_path, monkeypatch):
    monkeypatch.setattr(UsageMeter, "look", lambda self: 1 / 0)
    node = FakeNode(tmp_path, features=(Usage(),))
    node.guardian = os.getpid()
    agent = node.running()
    eventually(lambda: node.texts("note"))
    (line,) = node.texts("note")
    assert "its usage: ZeroDivisionError" in line
    ended, _ = node.ends_well(agent)
    assert isinstance(ended, Ended)


@pytest.mark.parametrize("data", [{}, {"of": 3}, {"of": "container", "values": {"cpus": "1"}}])
def test_what_does_not_fit_ends_no_gang(data):
    kept = Keepers({"usage": Usage().keeper(2, of_all=True)})
    kept.handle(1, Told(0, 0, "usage", data), 7.0)
    ((line,),) = [remarks.lines for remarks in kept.pop_remarks()]
    assert "node 1's usage: ValueError: usage" in line
