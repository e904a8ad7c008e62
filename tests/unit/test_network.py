"""Addresses, ports and interface names of this host."""

import ipaddress
import socket

import pytest

from metaflow_extensions.torchrun.plugins.torchrun.machine import network
from metaflow_extensions.torchrun.plugins.torchrun.machine.network import (
    addresses_for_others,
    interface_of,
    pick_port,
    plain_address,
)


def listen(host, port=0):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family)


def _ipv6_works():
    try:
        listen("::1").close()
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not _ipv6_works(), reason="this machine has no IPv6 loopback address")


@pytest.mark.parametrize(
    ("host", "has_ipv6"),
    [
        ("", True),
        ("127.0.0.1", True),
        ("127.0.0.1", False),
        *(pytest.param(host, True, marks=needs_ipv6) for host in ("::", "::1")),
    ],
)
def test_a_port_with_a_listener_of_either_family_is_not_picked(host, has_ipv6, monkeypatch):
    if not has_ipv6:
        monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with listen(host, pick_port()) as server:
        port = server.getsockname()[1]
        assert pick_port(port) is None
    assert pick_port(port) == port


@pytest.mark.parametrize(
    ("address", "interface"), [("127.0.0.1", "lo"), ("127.0.0.2", "lo"), ("192.0.2.1", None), ("2001:db8::1", None)]
)
def test_an_address_belongs_to_an_interface_of_this_host_or_to_none(address, interface):
    assert interface_of(address) == interface


@pytest.mark.parametrize(
    ("seen", "plain"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("::ffff:10.0.0.7", "10.0.0.7"),
        ("fd00::7", "fd00::7"),
        ("fe80::7%eth0", "fe80::7%eth0"),
    ],
)
def test_an_ipv4_address_that_an_ipv6_socket_shows_is_ipv4_again(seen, plain):
    assert plain_address(seen) == plain


LOOPBACK, LINK = ["127.0.0.1", "::1"], "fe80::1"
OWN, FIXED = "10.0.0.7", "fd00::7"


@pytest.mark.parametrize(
    ("known", "own", "addresses"),
    [
        *((known, [OWN, FIXED], [OWN, FIXED]) for known in ("127.0.0.1", "127.0.1.1", "::1")),
        ("127.0.1.1", [], ["127.0.1.1"]),  # it has no other
        ("192.0.2.1", [FIXED], ["192.0.2.1", FIXED]),
        ("a.name", [FIXED], ["a.name", FIXED]),
        (OWN, [OWN, FIXED], [OWN, FIXED]),
    ],
)
def test_others_are_not_sent_to_themselves_and_what_is_known_comes_first(known, own, addresses, monkeypatch):
    found = {ipaddress.ip_address(ip): "eth0" for ip in [*LOOPBACK, *own, LINK]}
    monkeypatch.setattr(network, "_interfaces", lambda: found)
    assert addresses_for_others(known) == addresses
