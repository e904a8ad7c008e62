"""Addresses, ports and interface names of this host."""

import socket

import pytest

from metaflow_extensions.torchrun.plugins.torchrun.machine import network
from metaflow_extensions.torchrun.plugins.torchrun.machine.network import pick_port, room_for_connections


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


def test_the_limit_of_open_files_is_raised_where_a_large_gang_needs_it(monkeypatch):
    limits = [1024, 8192]
    monkeypatch.setattr(network.resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(network.resource, "setrlimit", lambda _, new: limits.__setitem__(slice(None), new))
    assert room_for_connections(10, 200) == 210
    assert limits == [1024, 8192]
    assert room_for_connections(4000, 2048) == 6048
    assert 6048 < limits[0] < 8192 == limits[1]
    assert 7900 < room_for_connections(7000, 2048) < 8192
    assert limits == [8192, 8192]
