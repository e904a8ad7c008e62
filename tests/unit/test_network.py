"""Addresses, ports and interface names of this host."""

import ipaddress
import socket

import pytest

from metaflow_extensions.torchrun.plugins.torchrun.machine import network
from metaflow_extensions.torchrun.plugins.torchrun.machine.network import addresses_for_others, interface_of, pick_port


@pytest.mark.parametrize(("host", "has_ipv6"), [("", True), ("127.0.0.1", True), ("127.0.0.1", False), ("::1", True)])
def test_a_port_with_a_listener_of_either_family_is_not_picked(host, has_ipv6, monkeypatch):
    if not has_ipv6:
        monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        server = socket.create_server((host, pick_port()), family=family)
    except OSError:
        pytest.skip("this machine has no IPv6 loopback address")
    with server:
        port = server.getsockname()[1]
        assert pick_port(port) is None
    assert pick_port(port) == port


@pytest.mark.parametrize(
    ("address", "interface"), [("127.0.0.1", "lo"), ("127.0.0.2", "lo"), ("192.0.2.1", None), ("2001:db8::1", None)]
)
def test_an_address_belongs_to_an_interface_of_this_host_or_to_none(address, interface):
    assert interface_of(address) == interface


OWN, FIXED = "10.0.0.7", "fd00::7"


@pytest.mark.parametrize(
    ("known", "own", "addresses"),
    [
        *((known, [OWN, FIXED], [OWN, FIXED]) for known in ("127.0.0.1", "127.0.1.1", "::1")),
        ("127.0.1.1", [], ["127.0.1.1"]),  # it has no other
        ("a.name", [FIXED], ["a.name", FIXED]),
        (OWN, [OWN, FIXED], [OWN, FIXED]),
    ],
)
def test_others_are_not_sent_to_themselves_and_what_is_known_comes_first(known, own, addresses, monkeypatch):
    found = {ipaddress.ip_address(ip): "eth0" for ip in ["127.0.0.1", "::1", *own, "fe80::1"]}
    monkeypatch.setattr(network, "_interfaces", lambda: found)
    assert addresses_for_others(known) == addresses
