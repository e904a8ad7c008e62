"""Room for the connections of a gang, and the limit of open files."""

import pytest

from metaflow_extensions.torchrun.plugins.torchrun.errors import GangError
from metaflow_extensions.torchrun.plugins.torchrun.machine import open_files
from metaflow_extensions.torchrun.plugins.torchrun.machine.open_files import room_for_connections


@pytest.fixture
def limits(monkeypatch):
    """Stand in for the kernel's limits: a list of the soft and the hard one."""
    found = [1024, 4096]
    monkeypatch.setattr(open_files.resource, "getrlimit", lambda _: tuple(found))
    monkeypatch.setattr(open_files.resource, "setrlimit", lambda _, new: found.__setitem__(slice(None), new))
    return found


def test_the_limit_is_raised_where_a_large_gang_needs_it_and_its_members_come_first(limits):
    assert 600 < room_for_connections(10, 2048) <= 2058
    assert limits == [1024, 4096]
    assert room_for_connections(900, 2048) == 2948
    assert 2948 < limits[0] < 4000
    assert 3500 <= room_for_connections(3500, 2048) < 4096
    assert limits == [4096, 4096]
    said = "needs 4096 connections, one for each other node, but its supervisor process may open 4096 files only"
    with pytest.raises(GangError, match=f"{said}.*ulimit -Hn"):
        room_for_connections(4096, 2048)
