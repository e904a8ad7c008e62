"""Addresses, ports and interface names of this host."""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import socket
import struct
from contextlib import suppress

_SIOCGIFADDR = 0x8915  # Linux, <linux/sockios.h>: the IPv4 address of a named interface


def free_port(host: str = "") -> int:
    """Return a TCP port that was free on `host` (default: all IPv4 interfaces) a moment ago.

    The kernel chooses from its ephemeral range. Another process can take the port before it is
    used; whoever uses it must be ready to ask again.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def port_is_free(port: int) -> bool:
    """Tell whether a listening socket can be bound to `port` on every IPv4 interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise
        return True


def source_address(towards: str) -> str | None:
    """Return the local address that packets to the host `towards` leave from, or None.

    Nothing is sent: connecting a datagram socket only asks the kernel for a route.
    """
    with suppress(OSError):
        for family, kind, proto, _, target in socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind, proto) as probe:
                probe.connect(target)
                return str(probe.getsockname()[0])
    return None


def interface_of(address: str) -> str | None:
    """Return the name of the interface that owns the local `address`, or None if unknown."""
    ip = ipaddress.ip_address(address.split("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        return _ipv6_interfaces().get(ip)
    if ip.is_loopback:
        return _loopback_name()
    for _, name in socket.if_nameindex():
        if _ipv4_address(name) == address:
            return name
    return None


def interface_towards(host: str) -> str | None:
    """Return the name of the interface that routes to `host`, or None if that can't be told."""
    address = source_address(host)
    return interface_of(address) if address else None


def own_addresses() -> list[str]:
    """Return this host's own addresses, IPv4 before IPv6, without loopback and link-local ones."""
    found = [a for _, name in socket.if_nameindex() if (a := _ipv4_address(name))]
    found += [str(a) for a in _ipv6_interfaces()]
    return [a for a in found if not (ipaddress.ip_address(a).is_loopback or ipaddress.ip_address(a).is_link_local)]


def _loopback_name() -> str | None:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), None)


def _ipv4_address(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface[:15].encode()))
        except OSError:  # the interface has no IPv4 address, or this is not Linux
            return None
    return socket.inet_ntoa(reply[20:24])


def _ipv6_interfaces() -> dict[ipaddress.IPv6Address, str]:
    found: dict[ipaddress.IPv6Address, str] = {}
    with suppress(OSError), open("/proc/net/if_inet6", encoding="ascii") as table:
        for line in table:
            digits, _, _, _, _, name = line.split()
            found[ipaddress.IPv6Address(bytes.fromhex(digits))] = name
    return found
