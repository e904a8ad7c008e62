"""Addresses, ports and interface names of this host."""

import ipaddress
import socket

import pytest

from metaflow_extensions.torchrun.plugins.torchrun.network import (
    free_port,
    interface_of,
    interface_towards,
    own_addresses,
    port_is_free,
    source_address,
)


@pytest.mark.parametrize("host", ["", "127.0.0.1"])
def test_a_free_port_can_be_listened_on(host):
    port = free_port(host)
    assert 1024 <= port <= 65535
    with socket.create_server((host, port)):
        pass


def test_free_ports_differ():
    assert len({free_port() for _ in range(20)}) > 1


@pytest.mark.parametrize("host", ["", "127.0.0.1"])
def test_a_port_with_a_listener_is_not_free(host):
    with socket.create_server((host, 0)) as server:
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


@pytest.mark.parametrize("host", ["no.such.host.invalid", ""])
def test_an_unknown_host_has_no_way(host):
    assert source_address("no.such.host.invalid") is None
    assert interface_towards("no.such.host.invalid") is None


def test_own_addresses_are_real_and_reachable_from_elsewhere():
    for address in own_addresses():
        ip = ipaddress.ip_address(address)
        assert not ip.is_loopback
        assert not ip.is_link_local
        assert interface_of(address) is not None


def test_every_interface_with_an_own_ipv4_address_is_found():
    names = {name for _, name in socket.if_nameindex()}
    assert {interface_of(address) for address in own_addresses()} <= names
