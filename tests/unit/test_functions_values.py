"""Pickled values on disk: no descriptors, read from any fork, and gone with their result or its process."""

import gc
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from unit_helpers import OURS

from metaflow_extensions.torchrun.plugins.torchrun.errors import TorchrunError
from metaflow_extensions.torchrun.plugins.torchrun.task.function_values import ValuesOnDisk

BIG = os.urandom(3 << 20)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return the folder for temporary files."""
    folder = tmp_path / "größe of * 🙂"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def values(folder):
    values = ValuesOnDisk()
    own = Path(values.folder)
    (own / "returned-1.pkl").write_bytes(pickle.dumps(BIG))
    values.add(str(own / "returned-1.pkl"), 1)
    values.add(str(own / "returned-2.pkl"), 2)  # it ended by sys.exit(), so there is none
    values.add(values.write(pickle.dumps({"loss": 0.5})), 7, 3)
    values.add(values.write(pickle.dumps(BIG[::-1])), 5)
    return values


def read(values, rank):
    with values.open(rank) as file:
        return pickle.load(file)


def test_values_are_in_the_order_of_ranks_and_pickled_as_a_dict_of_bytes(values):
    assert list(values) == [1, 3, 5, 7], "rank 2 has none"
    assert [pickle.loads(value) for value in values.values()] == [BIG, {"loss": 0.5}, BIG[::-1], {"loss": 0.5}]
    loaded = pickle.loads(pickle.dumps(values))
    assert type(loaded) is dict
    assert loaded == dict(values)


def test_no_file_stays_open_and_none_outlives_its_values(folder):
    values = ValuesOnDisk()
    values.add(values.write(pickle.dumps("x")), 1)
    assert read(values, 1) == "x"
    assert not [fd for fd in Path("/proc/self/fd").iterdir() if str(folder) in os.path.realpath(fd)]
    assert len(list(folder.glob("*/*"))) == 1
    del values
    gc.collect()
    assert not list(folder.iterdir())


def test_a_value_whose_file_was_removed_is_said(values, folder):
    for path in folder.glob("*/*"):
        path.unlink()
    with pytest.raises(TorchrunError, match=r"value of rank 3 is gone: .* was removed while the step ran.*TMPDIR"):
        values[3]


KEEP = f"""{OURS}
import os, resource, signal
from pathlib import Path
from ours.task.arguments import Position
from ours.task.run_settings import resolve
from ours.settings import parse_settings
from ours.task.function_call import FunctionCall
from ours.supervisor.call import Call
from ours.result import TorchrunResult
from ours.worker.function_worker import path_of, store

resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
kept, SPEC = [], Call("x", (), False, nproc=4, num_nodes=1, node_index=0, python="")
for launch in range(int(sys.argv[1])):
    run = {{"entrypoint": print, "entrypoint_args": [launch]}}
    call = FunctionCall(resolve(run, parse_settings({{}}, "train"), Position(1, 0, "")), None)
    call.begin(SPEC)
    for rank in range(4):
        store([launch, rank], rank, path_of(call.folder, "returned-{{}}.pkl", rank))
    kept.append(TorchrunResult(launch, 1, 0, 4, 4, "", [], 0.0, {{}}, **call.result({{}}, print)))
    call.close()
assert [list(result) for result in kept] == [[[launch, rank] for rank in range(4)] for launch in range(len(kept))]
assert not list(Path(os.environ["TMPDIR"]).glob("*/call.pkl"))
"""


FORK = """
if not os.fork():
    assert kept.pop(0).rank(3) == [0, 3]
    sys.exit()  # with all that Python does at its exit
assert os.wait()[1] == 0
assert [kept[0].rank(3), kept[299].rank(3)] == [[0, 3], [299, 3]]
"""


def keep(folder, count, end):
    """Keep so many results of 4 ranks in a process; return its exit code, the folders that it has left, and its stderr."""
    env = {**os.environ, "TMPDIR": str(folder), "METAFLOW_USER": "tester"}
    done = subprocess.run([sys.executable, "-c", KEEP + end, str(count)], env=env, stderr=subprocess.PIPE, text=True)
    return done.returncode, [path.name for path in folder.iterdir()], done.stderr


def test_many_results_can_be_kept_a_fork_reads_them_and_nothing_is_left_at_the_end(folder):
    assert keep(folder, 300, FORK) == (0, [], "")
