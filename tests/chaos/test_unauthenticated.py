"""Unauthenticated connections to the channel: the gang must not notice."""

from __future__ import annotations

import contextlib
import math
import resource
import secrets
import socket
import struct
import time
from collections.abc import Iterator

import psutil
import pytest
from gangs import Gang
from hosts import cannot
from limits import limit_s

HEARTBEAT_S = math.ceil(limit_s(2))
MANY = 1000
GREETING_BYTES, NONCE_BYTES, MAC_BYTES = 48, 32, 32  # see supervisor/connection.py


@pytest.fixture
def enough_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2 * MANY:
        cannot(f"this process may open {hard} files only, and a thousand connections need more")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * MANY), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def channel_port(gang: Gang) -> int:
    """Return the one port that the control node's supervisor listens on."""
    supervisor = psutil.Process(gang.supervisor(0))

    def listening() -> list[int]:
        connections = supervisor.net_connections("tcp")
        return [each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN]

    gang.await_that(listening, "the channel")
    (port,) = listening()
    return port


def connect_to(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=limit_s(60))


def is_hung_up_on(port: int, *words: bytes) -> bool:
    """Connect, wait for the greeting, say something; tell whether the control node then closes it without a word."""
    with connect_to(port) as connection:
        try:
            connection.recv(GREETING_BYTES)
            for word in words:
                connection.sendall(word)
            return connection.recv(1) == b""
        except ConnectionError:
            return True
        except TimeoutError:
            return False


LIES = {
    "garbage bytes": [secrets.token_bytes(100_000)],
    "huge lengths": [b"\xff" * (NONCE_BYTES + MAC_BYTES), struct.pack(">I", 2**32 - 1)],
    "no token": [struct.pack(">I", 40) + b'{"type": "join", "node": 1, "host": "x"}' + b" " * 20],
    "a wrong token": [secrets.token_bytes(NONCE_BYTES + MAC_BYTES)],
}


def test_unauthenticated_connections(gang, recorder, enough_files):
    """All kinds at once, for longer than a heartbeat may be missing, before and while the gang works."""
    gang.start(settings={"heartbeat_timeout_s": HEARTBEAT_S}, late={1: 0.5})
    port = channel_port(gang)
    with contextlib.ExitStack() as stack:
        assert all(is_hung_up_on(port, *lie) for lie in LIES.values())
        gang.await_workers()
        assert all(is_hung_up_on(port, *lie) for lie in LIES.values())
        begun_at = time.monotonic()
        for _ in range(MANY):
            stack.enter_context(connect_to(port))
        gang.await_age(begun_at, HEARTBEAT_S + 0.5)
        outcome = gang.end_well()
    recorder.lasted("connections with garbage, huge lengths, no token, a wrong one, and 1000 silent ones", outcome)
    for node in range(2):
        assert gang.launch(node)["restarts"] == []
