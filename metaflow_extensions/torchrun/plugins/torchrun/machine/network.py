"""Finds addresses, free ports and interface names of this host."""

from __future__ import annotations

import fcntl
import ipaddress
import resource
import socket
import struct
from collections.abc import Iterable
from contextlib import suppress

from .processes import open_files, read

_OWN_FILES = 256  # what a supervisor may open besides connections
_SIOCGIFADDR = 0x8915  # Linux, <linux/sockios.h>: the IPv4 address of a named interface
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def listening_socket(port: int, host: str = "", backlog: int | None = None) -> socket.socket:
    """Return a socket that listens on `port` of `host`; ``""`` is every interface, IPv4 and, where there is, IPv6.

    torch's TCPStore binds in the same way (2.13). Port 0 lets the kernel choose one.
    """
    if not host and socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=backlog)


def room_for_connections(needed: int, more: int) -> int:
    """Return how many connections there is room for: those needed and some more, as far as files may be open.

    The soft limit of open files is raised if it is too low for them, at most to the hard one.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(soft, min(hard, needed + more + _OWN_FILES))
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return min(most - _OWN_FILES, needed + more)


def pick_port(pinned: int | None = None) -> int | None:
    """Return the pinned port if it is free on all interfaces, IPv4 and IPv6, else None; without one, a free port.

    Another process can take the port before it is used; so callers must be ready to ask again.
    """
    with suppress(OSError), listening_socket(pinned or 0) as probe:
        return int(probe.getsockname()[1])
    return None


def interface_of(address: str) -> str | None:
    """Return the name of the interface that owns the local `address`, or None if unknown."""
    ip = ipaddress.ip_address(address.split("%")[0])
    if ip.version == 4 and ip.is_loopback:  # 127.0.0.2, too
        return "lo"
    return _interfaces().get(ip)


def addresses_for_others(known: str) -> list[str]:
    """Return where other hosts may reach this one, in the order to try; never empty.

    `known` is its address or name as somebody found it. Metaflow's ``@batch`` (2.19) takes what the host's own
    name resolves to. On Debian that is 127.0.1.1, by which the others would reach themselves.
    """
    own = [str(ip) for ip in _interfaces() if not (ip.is_loopback or ip.is_link_local)]
    with suppress(ValueError):  # it is a name, and may mean something else to others
        if own and ipaddress.ip_address(known).is_loopback:
            return own
    return list(dict.fromkeys([known, *own]))


def _interfaces() -> dict[_Address, str]:
    """Return the interface of each address of this host, IPv4 first."""
    found: dict[_Address, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no IPv4 address
                reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
                found[ipaddress.IPv4Address(reply[20:24])] = name
    for line in read("/proc/net/if_inet6").splitlines():
        digits, _, _, _, _, name = line.split()
        found[ipaddress.IPv6Address(bytes.fromhex(digits))] = name
    return found


def is_connected_to(port: int, pids: Iterable[int]) -> bool:
    """Return whether one of these processes holds a TCP connection to this port of any address."""
    rows = [line.split() for table in ("tcp", "tcp6") for line in read(f"/proc/net/{table}").splitlines()[1:]]
    # Columns: 2 is the remote address, 3 the state, of which 01 is ESTABLISHED (<net/tcp_states.h>), and 9 the inode.
    found = {f"socket:[{row[9]}]" for row in rows if row[3] == "01" and row[2].endswith(f":{port:04X}")}
    return bool(found) and any(target in found for pid in pids for _, target in open_files(pid))
