"""Hosts that are network namespaces of this machine: fixtures for tests/integration and tests/chaos.

Each host has its own interfaces, addresses, name and ``/etc/hosts``; nothing of it is left on the
machine, since names and hosts files live in namespaces of the processes themselves.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

LISTEN = "0A"  # the state's number in /proc/net/tcp
# `ip netns exec` gives the process mounts of its own, so that this /etc/hosts is seen by nobody else.
AS_HOST = 'mount --bind "$1" /etc/hosts && echo "$2" > /proc/sys/kernel/hostname && shift 2 && exec "$@"'
_numbers = itertools.count()
# Where networks are required the tests run and fail instead, as with `cannot`.
needs_ipv6 = pytest.mark.skipif(
    not os.path.exists("/proc/net/if_inet6") and not os.environ.get("NETWORKS_REQUIRED"),
    reason="this kernel has no IPv6",
)


def cannot(reason: str) -> None:
    """Skip the test, unless whoever runs it says that this machine can."""
    if os.environ.get("NETWORKS_REQUIRED"):
        pytest.fail(reason)
    pytest.skip(reason)


def ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
    return done.stdout


@dataclass
class Host:
    """A network namespace in the part of a host."""

    name: str
    space: str

    def ip(self, *words: str) -> None:
        ip("-n", self.space, *words)

    def add_address(self, address: str, interface: str) -> None:
        # Without duplicate address detection, an IPv6 address can be used at once.
        self.ip("addr", "add", address, "dev", interface, *(["nodad"] if ":" in address else []))

    def listening(self) -> list[int]:
        """Return the TCP ports, IPv4 and IPv6, that anything on this host listens on."""
        words = ["ip", "netns", "exec", self.space, "cat", "/proc/net/tcp", "/proc/net/tcp6"]
        table = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        rows = [line.split() for line in table.splitlines() if ":" in line]
        return sorted(int(row[1].rsplit(":", 1)[1], 16) for row in rows if row[3] == LISTEN)

    def command(self, etc_hosts: Path, *words: str) -> list[str]:
        """Return `words` as a command that runs on this host, with `etc_hosts` as its ``/etc/hosts``; the pid stays."""
        wrapper = ["sh", "-c", AS_HOST, "sh", str(etc_hosts), self.name]
        return ["ip", "netns", "exec", self.space, "unshare", "--uts", *wrapper, *words]


def connect(one: Host, other: Host, interface: str, *addresses: tuple[str, str]) -> None:
    """Put a cable between two hosts; each pair of `addresses` is one for each end."""
    ip("link", "add", interface, "netns", one.space, "type", "veth", "peer", "name", interface, "netns", other.space)
    for host, own in zip((one, other), zip(*addresses, strict=True), strict=True):
        host.ip("link", "set", interface, "up")
        for address in own:
            host.add_address(address, interface)


class Switch:
    """A bridge, on a host of its own, that connects hosts; a cable can be cut and mended."""

    def __init__(self, host: Host, hosts: list[Host]) -> None:
        """Give each of `hosts` an interface eth0 with the address 10.77.0.(1 + its index)."""
        self._host = host
        host.ip("link", "add", "bridge", "type", "bridge")
        host.ip("link", "set", "bridge", "up")
        for index, other in enumerate(hosts):
            port = ("type", "veth", "peer", "name", "eth0", "netns", other.space)
            ip("link", "add", f"port{index}", "netns", host.space, *port)
            host.ip("link", "set", f"port{index}", "master", "bridge", "up")
            other.ip("link", "set", "eth0", "up")
            other.add_address(f"10.77.0.{1 + index}/24", "eth0")

    def cut(self, index: int) -> None:
        """Let everything that the host of this index sends, or that is sent to it, vanish without a word."""
        self._host.ip("link", "set", f"port{index}", "nomaster")

    def mend(self, index: int) -> None:
        """Undo a cut."""
        self._host.ip("link", "set", f"port{index}", "master", "bridge")


@pytest.fixture
def make_host() -> Iterator[Callable[[str], Host]]:
    """Return a function that makes a host; afterwards they are gone, with all that runs on them."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        cannot("making network namespaces needs root, ip (iproute2) and unshare (util-linux)")
    made: list[Host] = []

    def make(name: str) -> Host:
        host = Host(name, f"torchrun-test-{os.getpid()}-{next(_numbers)}")
        allowed = subprocess.run(["ip", "netns", "add", host.space], capture_output=True, text=True, check=False)
        if allowed.returncode != 0:
            cannot(f"this machine does not let us make network namespaces: {allowed.stderr.strip()}")
        made.append(host)
        host.ip("link", "set", "lo", "up")
        return host

    try:
        yield make
    finally:
        for host in made:
            for pid in ip("netns", "pids", host.space).split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        for host in made:
            subprocess.run(["ip", "netns", "del", host.space], check=False)
    left = [host.space for host in made if host.space in ip("netns", "list")]
    assert not left, f"left network namespaces: {left}"
