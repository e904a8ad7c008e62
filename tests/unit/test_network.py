"""Addresses, ports and interface names of this host."""

import ipaddress
import socket

import pytest

from metaflow_extensions.torchrun.plugins.torchrun.machine import network
from metaflow_extensions.torchrun.plugins.torchrun.machine.network import (
    addresses_for_others,
    free_port,
    interface_of,
    interface_towards,
    own_addresses,
    plain_address,
    port_is_free,
)


def _ipv6_works():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not _ipv6_works(), reason="this machine has no IPv6 loopback address")


def listen(host, port=0):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family)


@pytest.mark.parametrize("host", ["", "127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
def test_a_free_port_can_be_listened_on(host):
    port = free_port(host)
    assert 1024 <= port <= 65535
    with listen(host, port):
        pass


@pytest.mark.parametrize("host", ["", "127.0.0.1", *(pytest.param(host, marks=needs_ipv6) for host in ("::", "::1"))])
def test_a_port_with_a_listener_of_either_family_is_not_free(host):
    with listen(host) as server:
        port = server.getsockname()[1]
        assert not port_is_free(port)
    assert port_is_free(port)


def test_ports_are_found_where_there_is_no_ipv6(monkeypatch):
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with listen("127.0.0.1", free_port()) as server:
        port = server.getsockname()[1]
        assert not port_is_free(port)
    assert port_is_free(port)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2", "127.255.255.254"])
def test_loopback_addresses_belong_to_lo(address):
    assert interface_of(address) == "lo"


def test_the_way_to_this_host_is_lo():
    assert interface_towards("127.0.0.1") == "lo"
    assert interface_towards("localhost") == "lo"


def test_nothing_is_known_of_a_foreign_address():
    assert interface_of("192.0.2.1") is None
    assert interface_of("2001:db8::1") is None


def test_an_unknown_host_has_no_way():
    assert interface_towards("no.such.host.invalid") is None


def test_own_addresses_are_real_and_reachable_from_elsewhere():
    for address in own_addresses():
        ip = ipaddress.ip_address(address)
        assert not ip.is_loopback
        assert not ip.is_link_local
        assert interface_of(address) in {name for _, name in socket.if_nameindex()}


@pytest.mark.parametrize(
    ("seen", "plain"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("::ffff:10.0.0.7", "10.0.0.7"),
        ("fd00::7", "fd00::7"),
        ("::1", "::1"),
        ("fe80::7%eth0", "fe80::7%eth0"),
    ],
)
def test_an_ipv4_address_that_an_ipv6_socket_shows_is_ipv4_again(seen, plain):
    assert plain_address(seen) == plain


@pytest.mark.parametrize("known", ["127.0.0.1", "127.0.1.1", "::1"])
def test_others_are_not_sent_to_themselves(known, monkeypatch):
    monkeypatch.setattr(network, "own_addresses", lambda: ["10.0.0.7", "fd00::7"])
    assert addresses_for_others(known) == ["10.0.0.7", "fd00::7"]


@pytest.mark.parametrize(("known", "own"), [("192.0.2.1", []), ("a.name", []), ("10.0.0.7", ["10.0.0.7"])])
def test_what_is_known_of_this_host_comes_first_and_once(known, own, monkeypatch):
    monkeypatch.setattr(network, "own_addresses", lambda: [*own, "fd00::7"])
    assert addresses_for_others(known) == [known, "fd00::7"]


def test_a_host_that_knows_only_its_loopback_address_says_so(monkeypatch):
    monkeypatch.setattr(network, "own_addresses", list)
    assert addresses_for_others("127.0.1.1") == ["127.0.1.1"]
