"""Connections beyond the limit of open files, without anybody's noticing."""

import contextlib
import resource
import socket
import subprocess
import sys

import pytest

from metaflow_extensions.torchrun.plugins.torchrun.errors import GangError
from metaflow_extensions.torchrun.plugins.torchrun.machine import open_files
from metaflow_extensions.torchrun.plugins.torchrun.machine.open_files import OpenFiles


@pytest.fixture
def limit():
    """Lower the soft limit for the test; return how."""
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)

    def lower(soft):
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, usual[1]))

    yield lower
    resource.setrlimit(resource.RLIMIT_NOFILE, usual)


def test_connections_get_numbers_above_the_limit_and_nobody_sees_another(limit):
    limit(256)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=64))
        server.setblocking(False)
        files = OpenFiles(500, 100)
        assert files.places == 600
        accepted = []
        for _ in range(10):
            for _ in range(10):
                client = stack.enter_context(socket.create_connection(server.getsockname()))
            accepted += [stack.enter_context(sock) for sock in files.accept(server, 10)]
            assert files.accept(server, 10) == []
        assert len(accepted) == 100
        assert min(sock.fileno() for sock in accepted) >= 256
        assert not any(sock.get_inheritable() for sock in accepted)
        accepted[-1].sendall(b"hello")
        assert client.recv(5) == b"hello"
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 256
        show = "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
        assert subprocess.check_output([sys.executable, "-c", show], text=True) == "256\n"


@pytest.fixture
def limits(monkeypatch):
    """Return a function that says what the limits are."""
    return lambda soft, hard: monkeypatch.setattr(open_files.resource, "getrlimit", lambda _: (soft, hard))


def test_a_hard_limit_that_is_too_low_is_told_at_once(limits):
    limits(512, 600)
    with pytest.raises(GangError) as error:
        OpenFiles(600, 5000)
    assert "needs 600 connections, one for each other node, but its task may open 600 files only" in str(error.value)
    assert "ulimit -Hn" in str(error.value)


def test_the_members_come_first_when_there_is_no_room_for_all_others(limits):
    limits(512, 600)
    assert 300 <= OpenFiles(300, 5000).places < 600
    limits(512, resource.RLIM_INFINITY)
    assert OpenFiles(10, 10**9).places == 10**9 + 10
