"""Pickled values on disk: they outlive their names, and are read from any thread, by parts."""

import gc
import os
import pickle
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

import pytest

from metaflow_extensions.torchrun.plugins.torchrun.launch.values import ValuesOnDisk

BIG = os.urandom(3 << 20)


@pytest.fixture
def values(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    values = ValuesOnDisk()
    path = tmp_path / "returned-1.pkl"
    path.write_bytes(pickle.dumps(BIG))
    values.take(1, str(path))
    path.unlink()
    values.take(2, str(path))  # it ended by sys.exit(), so there is none
    values.add([7, 3], pickle.dumps({"loss": 0.5}))
    values.add([5], pickle.dumps(BIG[::-1]))
    assert not os.listdir(tmp_path)
    return values


def test_values_are_in_the_order_of_ranks_and_pickled_as_a_dict_of_bytes(values):
    assert list(values) == [1, 3, 5, 7], "rank 2 has none"
    assert [pickle.loads(value) for value in values.values()] == [BIG, {"loss": 0.5}, BIG[::-1], {"loss": 0.5}]
    loaded = pickle.loads(pickle.dumps(values))
    assert type(loaded) is dict
    assert loaded == dict(values)


def test_threads_read_beside_each_other(values):
    def read(rank):
        with values.open(rank) as file:
            return pickle.load(file)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(read, [1, 5, 3] * 10)) == [BIG, BIG[::-1], {"loss": 0.5}] * 10


def test_no_file_is_left_open(values, tmp_path):
    def files():
        links = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
        return [link for link in links if link.startswith(str(tmp_path))]

    before = len(files())
    other = ValuesOnDisk()
    other.add([1], b"x")
    assert len(files()) == before + 1
    del other
    gc.collect()
    assert len(files()) == before


MEASURE = """
import sys
from metaflow_extensions.torchrun.plugins.torchrun.result import TorchrunResult
from metaflow_extensions.torchrun.plugins.torchrun.launch.values import ValuesOnDisk

def peak():  # of this program alone; ru_maxrss knows what the process was before
    with open("/proc/self/status") as file:
        return int(file.read().split("VmHWM:")[1].split()[0]) / 1024

before, values, size_mb = peak(), ValuesOnDisk(), int(sys.argv[2])
values.take(0, sys.argv[1])
result = TorchrunResult(0, 1, 0, 1, 1, "", [], 0.0, {0: 0}, values)
print((peak() - before) / size_mb)
value = result.rank(0)
assert len(value) == size_mb << 20
print((peak() - before) / size_mb)
"""


def test_a_value_is_in_memory_once_and_only_when_it_is_looked_at(tmp_path):
    path = tmp_path / "returned-0.pkl"
    path.write_bytes(pickle.dumps(bytes(64 << 20)))
    command = [sys.executable, "-c", MEASURE, str(path), "64"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    held, looked_at = map(float, done.stdout.split())
    assert held < 0.1
    assert looked_at < 1.1
