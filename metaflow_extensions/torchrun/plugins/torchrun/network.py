"""Addresses, ports and interface names of this host."""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import os
import socket
import struct
from contextlib import suppress

# What bind says of a port that this process can't have, as opposed to a family that the host lacks.
PORT_TAKEN = (errno.EADDRINUSE, errno.EACCES)
_SIOCGIFADDR = 0x8915  # Linux, <linux/sockios.h>: the IPv4 address of a named interface


def place() -> str:
    """Return what tells this container, or this machine, from others; a pod that replaces another has its host name."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return socket.gethostname()


def free_port(host: str = "") -> int:
    """Return a TCP port that was free on `host` (default: all interfaces, IPv4 and IPv6) a moment ago.

    The kernel chooses from its ephemeral range. Another process can take the port before it is
    used; whoever uses it must be ready to ask again.
    """
    with _bound(host, 0) as probe:
        port: int = probe.getsockname()[1]
        return port


def port_is_free(port: int) -> bool:
    """Tell whether a listening socket can be bound to `port` on every interface, IPv4 and IPv6."""
    try:
        with _bound("", port):
            return True
    except OSError as error:
        if error.errno in PORT_TAKEN:
            return False
        raise


def _bound(host: str, port: int) -> socket.socket:
    """Return a socket bound as torch's TCPStore binds (2.13): on every interface, to IPv6 and IPv4 at once."""
    if host or not socket.has_dualstack_ipv6():
        return _bound_to(socket.AF_INET6 if ":" in host else socket.AF_INET, host, port)
    try:
        return _bound_to(socket.AF_INET6, "", port)
    except OSError as error:
        if error.errno in PORT_TAKEN:
            raise
        return _bound_to(socket.AF_INET, "", port)  # IPv6 can be compiled in and switched off


def _bound_to(family: socket.AddressFamily, host: str, port: int) -> socket.socket:
    probe = socket.socket(family, socket.SOCK_STREAM)
    try:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and not host:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        probe.bind((host, port))
    except BaseException:
        probe.close()
        raise
    return probe


def plain_address(address: str) -> str:
    """Return an address as the other side writes it: an IPv4 address that an IPv6 socket shows is IPv4 again."""
    ip = ipaddress.ip_address(address.split("%")[0])
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return address if mapped is None else str(mapped)


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


def addresses_for_others(known: str) -> list[str]:
    """Return where other hosts may reach this one, in the order to try; never empty.

    Parameters
    ----------
    known : str
        This host's address or name as somebody found it. Metaflow's ``@batch`` (2.19) takes what the
        host's own name resolves to, which on Debian is 127.0.1.1: to the others, that means themselves.
    """
    own = own_addresses()
    return own if own and _is_loopback(known) else list(dict.fromkeys([known, *own]))


def _is_loopback(host: str) -> bool:
    with suppress(ValueError):  # it is a name, and may mean something else to others
        return ipaddress.ip_address(host).is_loopback
    return False


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
