"""Gangs over networks that are not kind; what a host is here is in tests/hosts.py."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from gangs import Gang
from hosts import Host, connect, needs_ipv6
from limits import limit_s

from metaflow_extensions.torchrun.plugins.torchrun.worker.agent import SILENCE_S

MASTER_PORT, CHANNEL_PORT = 29612, 29613
PORTS = {"master_port": MASTER_PORT, "channel_port": CHANNEL_PORT}


@pytest.fixture
def two_hosts(make_host: Callable[[str], Host]) -> tuple[Host, Host]:
    """Return the control node's host and the member's, not yet connected."""
    return make_host("host-a"), make_host("host-b")


@pytest.fixture
def gang(make_gang: Callable[..., Gang], two_hosts: tuple[Host, Host]) -> Gang:
    return make_gang(two_hosts)


def finish(gang: Gang, interface: str = "eth0", summed: bool = False) -> list[dict[str, Any]]:
    """Wait for both nodes, which must end well, and return what each noted.

    The workers of both are told to talk over the interface that connects the hosts.
    """
    gang.end_well()
    for seen in workers(gang):
        assert seen["GLOO_SOCKET_IFNAME"] == seen["NCCL_SOCKET_IFNAME"] == interface
        assert not summed or seen["sum"] == 3.0, "both ranks have added up both"
    return [gang.note(f"node-{node}.json") for node in range(2)]


def workers(gang: Gang) -> list[dict[str, Any]]:
    return [gang.await_note(f"worker-launch0-0-{rank}") for rank in range(2)]


# --- IPv6 ----------------------------------------------------------------------------------------


@needs_ipv6
def test_hosts_without_any_ipv4_address_train(gang, two_hosts):
    connect(*two_hosts, "eth0", ("fd00:77::1/64", "fd00:77::2/64"))
    for host in two_hosts:
        host.ip("addr", "del", "127.0.0.1/8", "dev", "lo")
    gang.start(main_ip="fd00:77::1", entrypoint="all_reduce.py")
    control, member = finish(gang, summed=True)
    assert control["main_addr"] == member["main_addr"] == "fd00:77::1"
    assert "--rdzv-endpoint=[fd00:77::1]:" in gang.launch(1)["command"]


# --- a host that does not know its own address -----------------------------------------------------


@pytest.mark.parametrize("address", ["127.0.1.1", "127.0.0.1"])
def test_a_control_node_whose_name_resolves_to_the_machine_itself_is_reached(address, gang, two_hosts):
    connect(*two_hosts, "eth0", ("10.77.0.1/24", "10.77.0.2/24"))
    etc_hosts = f"127.0.0.1 localhost\n{address} host-a\n{address} host-b\n"
    gang.start(main_ip="own name", entrypoint="all_reduce.py", etc_hosts=etc_hosts)
    control, member = finish(gang, summed=True)
    assert control["main_addr"] == member["main_addr"] == "10.77.0.1"


# --- several interfaces ----------------------------------------------------------------------------


def test_addresses_that_lead_nowhere_cost_little_time(gang, two_hosts):
    """The control node has two interfaces that come before the one that reaches the member."""
    control, member = two_hosts
    connect(*two_hosts, "eth5", ("10.77.0.1/24", "10.77.0.2/24"))
    for number in (1, 2):
        control.ip("link", "add", f"eth{number}", "type", "veth", "peer", "name", f"other{number}")
        control.ip("link", "set", f"eth{number}", "up")
        control.add_address(f"10.88.{number}.1/24", f"eth{number}")
        # What is sent there leaves and vanishes: the frames bear a hardware address that nobody has.
        member.ip("route", "add", f"10.88.{number}.0/24", "dev", "eth5")
        member.ip("neigh", "add", f"10.88.{number}.1", "lladdr", "02:00:00:00:00:99", "dev", "eth5")
    gang.start(main_ip="10.88.1.1", absent=[1])
    gang.await_note("node-0.json")
    gang.start_node(1)
    _, noted = finish(gang, "eth5")  # the one that reaches the others
    assert noted["main_addr"] == "10.77.0.1"
    assert noted["join_s"] < 2 * 5.0  # five seconds for each of two dead ends


# --- ports ---------------------------------------------------------------------------------------


def test_with_both_ports_pinned_only_these_two_are_listened_on(gang, two_hosts):
    connect(*two_hosts, "eth0", ("10.77.0.1/24", "10.77.0.2/24"))
    gang.start(settings=PORTS)
    gang.await_workers()
    assert [host.listening() for host in two_hosts] == [[MASTER_PORT, CHANNEL_PORT], []]
    finish(gang)
    assert [host.listening() for host in two_hosts] == [[], []]


def shut(hosts: tuple[Host, Host], port: int, how: str, family: str = "-4") -> None:
    """Close a port of the control node to the other host, as a firewall does; the control node itself reaches it."""
    control, member = hosts
    if how == "refused at once":
        member.ip(family, "rule", "add", "pref", "10", "ipproto", "tcp", "dport", str(port), "prohibit")
    else:  # no answer of it leaves the control node
        control.ip(family, "rule", "add", "pref", "10", "ipproto", "tcp", "sport", str(port), "blackhole")


@pytest.mark.parametrize(
    ("how", "why", "family", "warm"),
    [
        ("without an answer", "timed out", 4, "workers"),
        pytest.param("refused at once", "Permission denied", 6, "off", marks=needs_ipv6),
    ],
)
def test_a_closed_port_of_torchs_store_is_named_with_the_node_that_cannot_reach_it(
    how, why, family, warm, gang, two_hosts
):
    address = "10.77.0.1" if family == 4 else "fd00:77::1"
    pairs = [("10.77.0.1/24", "10.77.0.2/24")] if family == 4 else [("fd00:77::1/64", "fd00:77::2/64")]
    connect(*two_hosts, "eth0", *pairs)
    shut(two_hosts, MASTER_PORT, how, f"-{family}")
    gang.start(settings={**PORTS, "max_restarts": 2}, main_ip=address, warm=warm)
    gang.await_that(lambda: MASTER_PORT in two_hosts[0].listening(), "the store")
    outcome = gang.await_end(time.monotonic(), (0, 1))
    assert outcome.left == [], "torch itself waits for 900 s"
    assert outcome.same
    assert gang.launch(0)["seconds"] < SILENCE_S + limit_s(15)
    cause, text = outcome.error["cause"], outcome.error["text"]
    assert (cause["category"], cause["kind"], cause["node"], cause["host"]) == ("network", "unreachable", 1, "host-b")
    assert text.startswith(
        f"Node 1 (host host-b) can't reach torch's store on node 0 (host host-a): tried {address} on port {MASTER_PORT}: "
        f"{why}.\nOpen TCP port {MASTER_PORT} between the nodes"
    )
    assert "master_port=" in text
    assert "max_restarts" not in text
    assert "restart 1 of 2" not in gang.log(0), "it would not help"
    assert "torchrun starts cold" not in gang.log(1)
