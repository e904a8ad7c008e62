"""Gangs over networks that are not kind; what a host is here is in tests/hosts.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hosts import Host, connect, needs_ipv6

NODES = Path(__file__).parent / "networks"
MASTER_PORT, CHANNEL_PORT = 29612, 29613


@pytest.fixture
def two_hosts(make_host: Callable[[str], Host]) -> tuple[Host, Host]:
    """Return the control node's host and the member's, not yet connected."""
    return make_host("host-a"), make_host("host-b")


class Gang:
    """Two nodes, each on its host."""

    def __init__(self, hosts: tuple[Host, Host], out: Path) -> None:
        self.hosts = hosts
        self.out = out
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(
        self,
        main_ip: str | None,
        entrypoint: str | None,
        settings: dict[str, Any] | None = None,
        etc_hosts: str = "127.0.0.1 localhost\n::1 localhost\n",
        in_turn: bool = False,
    ) -> None:
        """Start both nodes.

        `main_ip` is the control node's address as Metaflow says it; None is what its own name resolves to there.
        Without an `entrypoint` the nodes join and leave. `etc_hosts` is for both hosts.
        With `in_turn` the member starts when the control node has published where it is.
        """
        (self.out / "hosts").write_text(etc_hosts)
        full = {"all_nodes_started_timeout": 60, "grace_s": 2, **(settings or {})}
        for node, host in enumerate(self.hosts):
            if node > 0 and in_turn:
                self.await_files("book.json", 1)
            task = {"node": node, "out": str(self.out), "settings": full, "entrypoint": entrypoint, "main_ip": main_ip}
            command = [sys.executable, str(NODES / "node.py"), json.dumps(task)]
            with open(self.out / f"log-{node}.txt", "wb") as log:
                self.processes.append(
                    subprocess.Popen(
                        host.command(self.out / "hosts", *command),
                        cwd=self.out,
                        env={**os.environ, "PYTHONUNBUFFERED": "1"},
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )

    @property
    def log(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text()}" for path in sorted(self.out.glob("log-*.txt")))

    def finish(self, timeout_s: float = 45) -> list[dict[str, Any]]:
        """Wait for both nodes, which must end well, and return what each noted."""
        deadline = time.monotonic() + timeout_s
        for process in self.processes:
            try:
                code = process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"not done within {timeout_s} s\n{self.log}") from None
            assert code == 0, self.log
        return self.notes("node")

    def notes(self, kind: str) -> list[dict[str, Any]]:
        return [json.loads((self.out / f"{kind}-{node}.json").read_text()) for node in range(2)]

    def await_files(self, pattern: str, count: int, timeout_s: float = 45) -> None:
        """Wait until the nodes or their workers have written so many files."""
        deadline = time.monotonic() + timeout_s
        while len(list(self.out.glob(pattern))) < count:
            assert time.monotonic() < deadline, self.log
            assert all(process.poll() is None for process in self.processes), self.log
            time.sleep(0.02)

    def let_go(self) -> None:
        """Let workers that wait end."""
        (self.out / "finish").touch()

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait(10)


@pytest.fixture
def gang(two_hosts: tuple[Host, Host], tmp_path: Path) -> Iterator[Gang]:
    made = Gang(two_hosts, tmp_path)
    yield made
    made.kill()


def assert_summed(gang: Gang) -> None:
    """Both workers have added up both ranks."""
    assert [seen["sum"] for seen in gang.notes("worker")] == [3.0, 3.0]


def assert_interface(gang: Gang, interface: str) -> None:
    """The workers of both nodes are told to talk over the interface that connects the hosts."""
    for seen in gang.notes("worker"):
        assert seen["GLOO_SOCKET_IFNAME"] == seen["NCCL_SOCKET_IFNAME"] == interface


# --- IPv6 ----------------------------------------------------------------------------------------


@needs_ipv6
def test_hosts_without_any_ipv4_address_train(gang, two_hosts):
    connect(*two_hosts, "eth0", ("fd00:77::1/64", "fd00:77::2/64"))
    for host in two_hosts:
        host.ip("addr", "del", "127.0.0.1/8", "dev", "lo")
    gang.start("fd00:77::1", "all_reduce.py")
    control, member = gang.finish()
    assert control["main_addr"] == member["main_addr"] == "fd00:77::1"
    assert "--rdzv-endpoint=[fd00:77::1]:" in member["command"]
    assert_summed(gang)
    assert_interface(gang, "eth0")


@needs_ipv6
def test_hosts_with_both_families_train(gang, two_hosts):
    connect(*two_hosts, "eth0", ("10.77.0.1/24", "10.77.0.2/24"), ("fd00:77::1/64", "fd00:77::2/64"))
    gang.start("10.77.0.1", "all_reduce.py")
    control, member = gang.finish()
    assert control["main_addr"] == member["main_addr"] == "10.77.0.1"
    assert_summed(gang)
    assert_interface(gang, "eth0")


@needs_ipv6
def test_ipv6_is_taken_where_only_it_connects_hosts_of_both_families(gang, two_hosts):
    connect(*two_hosts, "eth0", ("10.77.0.1/32", "10.78.0.2/32"), ("fd00:77::1/64", "fd00:77::2/64"))
    gang.let_go()
    gang.start("10.77.0.1", "look.py")  # gloo would take the interface's IPv4 address
    _, member = gang.finish()
    assert member["main_addr"] == "fd00:77::1"
    assert [seen["MASTER_ADDR"] for seen in gang.notes("worker")] == ["10.77.0.1", "fd00:77::1"]
    assert_interface(gang, "eth0")


# --- a host that does not know its own address -----------------------------------------------------


def test_a_control_node_whose_name_resolves_to_127_0_1_1_is_reached(gang, two_hosts):
    connect(*two_hosts, "eth0", ("10.77.0.1/24", "10.77.0.2/24"))
    gang.start(None, "all_reduce.py", etc_hosts="127.0.0.1 localhost\n127.0.1.1 host-a\n127.0.1.1 host-b\n")
    control, member = gang.finish()
    assert control["main_addr"] == member["main_addr"] == "10.77.0.1"
    assert_summed(gang)
    assert_interface(gang, "eth0")


def test_a_control_node_whose_name_resolves_to_localhost_listens_to_others(gang, two_hosts):
    connect(*two_hosts, "eth0", ("10.77.0.1/24", "10.77.0.2/24"))
    gang.start(None, None, etc_hosts="127.0.0.1 localhost host-a host-b\n")
    control, member = gang.finish()
    assert control["main_addr"] == member["main_addr"] == "10.77.0.1"


# --- several interfaces ----------------------------------------------------------------------------


def no_route(member: Host, network: str) -> None:
    """Leave the member without any route there: connecting fails at once."""


def prohibited(member: Host, network: str) -> None:
    member.ip("route", "add", "prohibit", network)


def silent(member: Host, network: str) -> None:
    """Let everything to `network` leave and vanish: the frames bear a hardware address that nobody has."""
    member.ip("route", "add", network, "dev", "eth5")
    member.ip("neigh", "add", network.replace(".0/24", ".1"), "lladdr", "02:00:00:00:00:99", "dev", "eth5")


def add_dead_ends(hosts: tuple[Host, Host], lose: Callable[[Host, str], None]) -> None:
    """Give the control node two interfaces that come before the one that reaches the member."""
    control, member = hosts
    connect(*hosts, "eth5", ("10.77.0.1/24", "10.77.0.2/24"))
    for number in (1, 2):
        control.ip("link", "add", f"eth{number}", "type", "veth", "peer", "name", f"other{number}")
        control.ip("link", "set", f"eth{number}", "up")
        control.add_address(f"10.88.{number}.1/24", f"eth{number}")
        lose(member, f"10.88.{number}.0/24")


@pytest.mark.parametrize("lose", [no_route, prohibited, silent])
def test_addresses_that_lead_nowhere_cost_little_time(lose, gang, two_hosts):
    add_dead_ends(two_hosts, lose)
    gang.start("10.88.1.1", None, in_turn=True)
    _, member = gang.finish()
    tried = json.loads((gang.out / "book.json").read_text())["addresses"]
    assert tried[0] == "10.88.1.1"
    assert len(tried) >= 3
    assert member["main_addr"] == "10.77.0.1"
    assert member["join_s"] < 4.0, tried  # a quarter of a second for each dead end, instead of five


def test_training_uses_the_interface_that_reaches_the_others(gang, two_hosts):
    add_dead_ends(two_hosts, silent)
    gang.let_go()
    gang.start("10.88.1.1", "look.py")
    gang.finish()
    assert_interface(gang, "eth5")


# --- ports ---------------------------------------------------------------------------------------


def test_with_both_ports_pinned_only_these_two_are_listened_on(gang, two_hosts):
    connect(*two_hosts, "eth0", ("10.77.0.1/24", "10.77.0.2/24"))
    gang.start("10.77.0.1", "look.py", {"master_port": MASTER_PORT, "channel_port": CHANNEL_PORT})
    gang.await_files("worker-*.json", 2)
    assert [host.listening() for host in two_hosts] == [[MASTER_PORT, CHANNEL_PORT], []]
    gang.let_go()
    gang.finish()
    assert [host.listening() for host in two_hosts] == [[], []]


def test_without_pins_the_kernel_chooses_both_ports(gang, two_hosts):
    connect(*two_hosts, "eth0", ("10.77.0.1/24", "10.77.0.2/24"))
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    gang.start("10.77.0.1", "look.py")
    gang.await_files("worker-*.json", 2)
    ports, none = (host.listening() for host in two_hosts)
    channel_port = json.loads((gang.out / "book.json").read_text())["port"]
    assert none == []
    assert len(ports) == 2
    assert channel_port in ports
    assert all(low <= port <= high for port in ports)
    gang.let_go()
    gang.finish()
