"""Addresses, ports and interface names of this host."""

import socket

import pytest

from metaflow_extensions.torchrun.plugins.torchrun.machine.network import pick_port


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
