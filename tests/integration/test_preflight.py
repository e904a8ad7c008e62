"""`@torchrun(preflight=True)`: what it measures, and whom it names."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from flow_runs import FlowRun
from hosts import Host, Switch, cannot

NODE = Path(__file__).parent / "networks" / "gang_of_three.py"
MASTER_PORT, CHANNEL_PORT = 29612, 29613
PINNED = f"{MASTER_PORT}-{CHANNEL_PORT}"
FIGURES = r"[\d.]+ ms, [\d.]+ GB/s"
REDUCED = FIGURES + r" \(bus [\d.]+ GB/s\)"


# --- on this machine ------------------------------------------------------------------------------


def test_it_measures_before_the_script_and_then_runs_it(run_flow: Callable[..., FlowRun]) -> None:
    run = run_flow(attrs={"preflight": True, "nproc_per_node": 2})
    for node, other, rank in ((0, 1, 0), (1, 0, 2)):
        line = rf"\[rank {rank}\] preflight: node {node} \(host \S+\): all-reduce over 4 ranks: {REDUCED}; "
        found = re.findall(line + rf"link to node {other}: {FIGURES}$", run.text, re.MULTILINE)
        assert len(found) == 1, run.text
    results = [task["results"] for task in run.note("end")["tasks"]]
    assert [[result["launch"] for result in each] for each in results] == [[1], [1]]
    assert sorted(rank for (result,) in results for rank in result["exit_codes"]) == sorted("0123", key=int)


# --- on hosts of their own ------------------------------------------------------------------------


def tc(host: Host, *words: str) -> None:
    """Shape what `host` sends."""
    if not shutil.which("tc"):
        cannot("slowing a network down needs tc (iproute2)")
    done = subprocess.run(
        ["ip", "netns", "exec", host.space, "tc", *words], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        cannot(f"this machine does not let us slow a network down: {done.stderr.strip()}")


class Trio:
    """Three nodes of one process each, on hosts that a switch connects, with a preflight."""

    def __init__(self, hosts: list[Host], out: Path) -> None:
        self.hosts = hosts
        self.out = out
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        (self.out / "hosts").write_text("127.0.0.1 localhost\n")
        (self.out / "finish").touch()  # the script may end at once
        ports = {"master_port": MASTER_PORT, "channel_port": CHANNEL_PORT}
        settings = {"preflight": True, "all_nodes_started_timeout": 60, "grace_s": 2, **ports}
        for node, host in enumerate(self.hosts):
            task = {"node": node, "out": str(self.out), "settings": settings, "entrypoint": "look.py"}
            command = host.command(
                self.out / "hosts", sys.executable, str(NODE), json.dumps({**task, "main_ip": "10.77.0.1"})
            )
            with open(self.out / f"log-{node}.txt", "wb") as log:
                self.processes.append(
                    subprocess.Popen(
                        command,
                        cwd=self.out,
                        # A test that kills its hosts leaves the launch's folder behind.
                        env={**os.environ, "PYTHONUNBUFFERED": "1", "TMPDIR": str(self.out)},
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )

    def log(self, node: int) -> str:
        return (self.out / f"log-{node}.txt").read_text()

    @property
    def logs(self) -> str:
        return "\n".join(f"node {node}:\n{self.log(node)}" for node in range(len(self.hosts)))

    def await_lines(self, text: str, count: int, timeout_s: float = 60) -> list[str]:
        """Return the lines with `text` once there are so many in all logs."""
        deadline = time.monotonic() + timeout_s
        while len(found := [line for line in self.logs.splitlines() if text in line]) < count:
            assert time.monotonic() < deadline, self.logs
            assert all(process.poll() is None for process in self.processes), self.logs
            time.sleep(0.02)
        return found

    def exit_codes(self, timeout_s: float = 60) -> list[int]:
        deadline = time.monotonic() + timeout_s
        return [process.wait(max(0.1, deadline - time.monotonic())) for process in self.processes]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait(10)


@pytest.fixture
def trio(make_host: Callable[[str], Host], tmp_path: Path) -> Iterator[Trio]:
    hosts = [make_host(f"host-{letter}") for letter in "abc"]
    Switch(make_host("switch"), hosts)
    made = Trio(hosts, tmp_path)
    yield made
    made.kill()


def test_a_node_on_a_slow_network_is_named(trio: Trio) -> None:
    tc(trio.hosts[2], "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", "100mbit", "burst", "32kb", "latency", "1s")
    trio.start()
    # On a busy machine another node may seem slow as well.
    (warning,) = trio.await_lines("node 2 (host host-c) is slow", 1)
    assert warning in trio.log(0)
    figures = r"its best link has [\d.]+ ms, ([\d.]+) GB/s, that of the median node [\d.]+ ms, ([\d.]+) GB/s"
    found = re.search(r"warning: preflight: node 2 \(host host-c\) is slow: " + figures, warning)
    assert found is not None, warning
    slow, median = map(float, found.groups())
    assert 0.0125 <= slow <= 0.03  # 100 Mbit/s in one direction, much more in the other
    assert slow < median / 3


def forbid_chosen_ports(hosts: list[Host]) -> None:
    """Leave the last host the two pinned ports only, in both directions; what else is sent fails at once."""
    last = "10.77.0.3"
    for host in hosts:
        to_last = [] if host is hosts[-1] else ["to", last]
        for preference, what in (("10", ["dport", PINNED]), ("11", ["sport", PINNED])):
            host.ip("rule", "add", "pref", preference, *to_last, "ipproto", "tcp", *what, "lookup", "main")
        host.ip("rule", "add", "pref", "20", *to_last, "ipproto", "tcp", "prohibit")


def test_a_node_that_its_neighbours_cannot_reach_is_named_on_every_node(trio: Trio) -> None:
    forbid_chosen_ports(trio.hosts)
    trio.start()
    assert trio.exit_codes() == [1, 1, 1], trio.logs
    for node in range(3):
        log = trio.log(node)
        assert "LaunchFailed: The preflight failed (@torchrun(preflight=True)); the script was not started" in log
        assert "PreflightError: node 2 (host host-c) can't be reached from a neighbour" in log
        assert "node 1 to node 2: [Errno 13]" in log
    assert not list(trio.out.glob("worker-*")), "the script was started"
