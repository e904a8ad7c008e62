"""Files that go to a datastore and come back, here and elsewhere."""

import io
import itertools
import json
import os
import pickle
import subprocess
import sys
import time
import zipfile

import pytest
from metaflow.datastore import FlowDataStore
from metaflow.plugins.datastores.local_storage import LocalStorage
from unit_helpers import write

from metaflow_extensions.torchrun.plugins.torchrun.compat.datastore import DatastoreValues
from metaflow_extensions.torchrun.plugins.torchrun.errors import TorchrunError
from metaflow_extensions.torchrun.plugins.torchrun.features.outputs import pieces as output_pieces
from metaflow_extensions.torchrun.plugins.torchrun.features.outputs.pieces import OutputPieces
from metaflow_extensions.torchrun.plugins.torchrun.launch.outputs import Outputs

KIB = 1024


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


@pytest.fixture
def store(tmp_path):
    """Return a real local datastore that counts what it is given."""
    store = DatastoreValues(FlowDataStore("SomeFlow", storage_impl=LocalStorage, ds_root=str(tmp_path / "store")))
    save, store.saved = store.save, []
    store.save = lambda data: store.saved.append(len(data)) or save(data)
    return store


@pytest.fixture
def small(monkeypatch):
    """Let 64 KiB be a piece, and more than 4 KiB large."""
    monkeypatch.setattr(output_pieces, "PIECE_BYTES", 64 * KIB)
    monkeypatch.setattr(output_pieces, "_SMALL_BYTES", 4 * KIB)


def pieces(root, store, *patterns, node=0, since=0.0, within_s=None):
    return OutputPieces(patterns, str(root), store, node, since, within_s)


def stored(root, store, *patterns, **more):
    """Store what patterns name; return the entry of the node in a result."""
    return entry_of(pieces(root, store, *patterns, **more))


def entry_of(upload, steps=None):
    for step in steps or upload.steps():
        step.do()
    told = upload.told()
    return told["key"], told["files"], told["size"]


def outputs(root, store, *patterns):
    return Outputs(store.address, {0: stored(root, store, *patterns)})


def content(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# --- there and back -------------------------------------------------------------------------------


def test_files_that_were_there_before_the_launch_are_marked(root, store):
    write(root / "old", "x")
    since = os.stat(root / "old").st_ctime + 0.001
    time.sleep(0.01)
    write(root / "new 🙂", "x")
    assert {file.name: file.older for file in Outputs(store.address, {0: stored(root, store, ".", since=since)})} == {
        "old": True,
        "new 🙂": False,
    }


def test_files_come_back_as_they_were(root, store, small, tmp_path):
    sizes = {"model/a": 0, "model/b": 1, "c": 4 * KIB, "d": 4 * KIB + 1, "e": 64 * KIB, "f": 3 * 64 * KIB + 5}
    for name, size in sizes.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(os.urandom(size))
    (root / "größe 🙂\n*").write_bytes(b"x")
    (root / os.fsdecode(b"\xff")).write_bytes(b"y")
    os.chmod(root / "c", 0o750)
    os.utime(root / "c", (1e9, 1e9))
    found = outputs(root, store, ".")
    assert (len(found), found.size) == (8, sum(sizes.values()) + 2)
    assert {file.name: file.size for file in found if file.name in sizes} == sizes
    assert "model/b" in found
    assert "model" not in found
    folder = found.download(tmp_path / "there" / "deep")
    assert content(folder) == content(root)
    status = os.stat(folder / "c")
    assert (status.st_mode & 0o777, status.st_mtime) == (0o750, 1e9)
    for name in sizes:
        assert found.open(name).read() == (root / name).read_bytes()
    # Small files share a piece: this one, two of "d", one of "e", four of "f", and the list.
    assert len(store.saved) == 1 + 1 + 1 + 4 + 1
    assert max(store.saved[:-1]) == 64 * KIB


def test_a_file_can_be_searched_and_read_in_parts(root, store, small):
    with zipfile.ZipFile(root / "z", "w") as made:
        for number in range(40):
            made.writestr(f"part {number}", os.urandom(20 * KIB))
    with outputs(root, store, "z").open("z") as file, zipfile.ZipFile(file) as zipped:
        assert (file.readable(), file.seekable(), file.writable()) == (True, True, False)
        assert zipped.testzip() is None
        with zipfile.ZipFile(root / "z") as made:
            assert zipped.read("part 17") == made.read("part 17")
        assert file.seek(-5, io.SEEK_END) == (root / "z").stat().st_size - 5
        assert len(file.read(100)) == 5
        assert file.read() == b""
        with pytest.raises(ValueError, match="negative"):
            file.seek(-1)


def test_what_is_there_already_is_not_stored_again(root, store, small):
    data = os.urandom(200 * KIB)
    (root / "a").write_bytes(data)
    (root / "b").write_bytes(data[: 128 * KIB] + b"another end")
    outputs(root, store, "a")
    before = sum(len(files) for _, _, files in os.walk(store.folder))
    outputs(root, store, "b")
    after = sum(len(files) for _, _, files in os.walk(store.folder))
    assert after - before == 2 * 2, "its last piece and the list, each with its metadata"


def test_one_of_a_gigabyte_needs_little_memory(tmp_path):
    """In a process of its own, whose memory nobody else uses; a sparse file takes no disk."""
    program = """
import os, resource, sys
from metaflow.datastore import FlowDataStore
from metaflow.plugins.datastores.local_storage import LocalStorage
from metaflow_extensions.torchrun.plugins.torchrun.compat.datastore import DatastoreValues
from metaflow_extensions.torchrun.plugins.torchrun.features.outputs.pieces import OutputPieces
from metaflow_extensions.torchrun.plugins.torchrun.launch.outputs import Outputs
root = sys.argv[1]
with open(os.path.join(root, "large"), "wb") as file:
    file.truncate(1 << 30)
    for _ in range(40):
        file.write(os.urandom(1 << 20))
store = DatastoreValues(FlowDataStore("SomeFlow", storage_impl=LocalStorage, ds_root=os.path.join(root, "store")))
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before, pieces = peak(), OutputPieces(("large",), root, store, 0, 0.0)
for step in pieces.steps():
    step.do()
after_storing = peak()
kept = pieces.told()
with Outputs(store.address, {0: (kept["key"], kept["files"], kept["size"])}).open("large") as file:
    size = sum(len(file.read(1 << 20)) for _ in range(100))
print(kept["size"], size, (after_storing - before) // 1024, (peak() - before) // 1024)
"""
    done = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    size, read, storing_mib, reading_mib = map(int, done.stdout.split())
    assert (size, read) == (1 << 30, 100 << 20)
    assert storing_mib < 100
    assert reading_mib < 100


# --- several nodes --------------------------------------------------------------------------------


@pytest.fixture
def of_two(root, tmp_path, store, small):
    """Return the outputs of two nodes: one file is the same, one is of one node alone, one differs."""
    other = tmp_path / "other"
    for node, folder in enumerate((root, other)):
        write(folder / "config.json", "{}")
        write(folder / f"shard {node}", str(node) * 10_000)
        write(folder / "log", f"of node {node}")
    return Outputs(store.address, {0: stored(root, store, "."), 1: stored(other, store, ".", node=1)})


def test_files_of_several_nodes_are_told_apart(of_two, tmp_path):
    assert of_two.nodes == [0, 1]
    assert [(file.name, file.node) for file in of_two] == [
        *itertools.product(["config.json", "log"], [0, 1]),
        ("shard 0", 0),
        ("shard 1", 1),
    ]
    assert of_two.open("config.json").read() == b"{}"
    assert of_two.open("shard 1").read() == b"1" * 10_000
    with pytest.raises(LookupError, match=r"Nodes 0, 1 have stored 'log', and they differ. Say which: .*node="):
        of_two.open("log")
    assert of_two.open("log", node=1).read() == b"of node 1"
    with pytest.raises(LookupError, match="'log'"):
        of_two.download(tmp_path / "both")
    assert not (tmp_path / "both").exists()
    assert sorted(content(of_two.download(tmp_path / "one", node=1))) == ["config.json", "log", "shard 1"]


def test_a_nodes_file_that_is_another_nodes_folder_is_told_before_anything_is_written(root, store, tmp_path):
    write(root / "a" / "model *" / "x", "1")
    write(root / "first", "1")
    write(tmp_path / "other" / "a" / "model *", "2")
    both = Outputs(
        store.address,
        {0: stored(root, store, "a", "first"), 1: stored(tmp_path / "other", store, ".", node=1)},
    )
    with pytest.raises(
        LookupError, match=r"names that are folders of other nodes: 'a/model \*'\. .*download\(folder, node="
    ):
        both.download(tmp_path / "both")
    assert not (tmp_path / "both").exists()
    assert list(content(both.download(tmp_path / "one", node=1))) == ["a/model *"]


def test_files_of_several_nodes_are_put_together_where_they_do_not_clash(of_two, root, tmp_path, store):
    os.unlink(root / "log")
    together = Outputs(store.address, {0: stored(root, store, "."), 1: of_two._nodes[1]})
    assert sorted(content(together.download(tmp_path / "both"))) == ["config.json", "log", "shard 0", "shard 1"]


def test_a_file_that_is_not_there_is_not_found(of_two):
    with pytest.raises(
        FileNotFoundError, match=r"There is no output 'shard 2'; there are 'config.json', 'log', 'shard 0'"
    ):
        of_two.open("shard 2")
    with pytest.raises(FileNotFoundError, match="There is no output of node 1 'shard 0'"):
        of_two.open("shard 0", node=1)


# --- what goes wrong ------------------------------------------------------------------------------


def test_what_can_not_be_read_is_left_out_and_said(root, store):
    for name in ("gone", "pipe", "left"):
        write(root / name, "x")
    upload = pieces(root, store, ".")
    steps = upload.steps()
    next(steps).do()
    os.unlink(root / "gone")
    os.unlink(root / "pipe")
    os.mkfifo(root / "pipe")  # whose opening would wait for a writer
    entry = entry_of(upload, steps)
    assert Outputs(store.address, {0: entry}).left_out == {
        "gone": "can't be read: No such file or directory",
        "pipe": "is no file any more",
    }
    assert entry[1] == 1
    line, _ = upload.lines(None, 0.0)
    assert "'gone' can't be read: No such file or directory; 'pipe' is no file any more" in line


def test_a_file_that_changes_while_it_is_read_is_said(root, store, small):
    grows, shrinks = write(root / "grows", "x" * 100 * KIB), write(root / "shrinks", "x" * 200 * KIB)
    save = store.save

    def save_while_they_change(data):
        with open(grows, "a") as file:
            file.write("more")
        os.truncate(shrinks, 70 * KIB)
        return save(data)

    store.save = save_while_they_change
    upload = pieces(root, store, "grows", "shrinks")
    found = {file.name: file.size for file in Outputs(store.address, {0: entry_of(upload)})}
    assert upload.lines(None, 0.0)[:-1] == [
        f"warning: the output '{name}' changed while it was read" for name in ("grows", "shrinks")
    ]
    assert found == {"grows": 100 * KIB, "shrinks": 70 * KIB}, "as it was when it was opened, or what was left"


def test_what_an_earlier_launch_has_left_is_stored_and_said(root, store):
    write(root / "old", "x")
    since = time.time() + 1
    upload = pieces(root, store, "old", since=since)
    entry_of(upload)
    assert upload.lines(None, 0.0)[0] == "1 output is older than this launch: 'old'"


def test_after_a_failure_the_newest_are_stored_first_and_the_rest_is_named(root, store, small):
    for number in range(3):
        os.utime(write(root / f"checkpoint {number}", str(number) * 100 * KIB), (number, number))
    write(root / "small", "x")
    upload = pieces(root, store, ".", within_s=1000.0)
    for number, step in enumerate(upload.steps()):
        if number == 4:  # after the search, the small one, and two pieces of the newest; one more is begun
            upload._deadline = 0.0
        step.do()
    found = Outputs(store.address, {0: tuple(upload.told().values())})
    assert [file.name for file in found] == ["checkpoint 2", "small"]
    assert found.left_out == dict.fromkeys(["checkpoint 0", "checkpoint 1"], "could not be stored in time")


def test_the_gang_hears_now_and_then_how_far_it_is(root, store, small, monkeypatch):
    (root / "large").write_bytes(os.urandom(5 * 64 * KIB))
    upload = pieces(root, store, "large")
    news = [step.is_news for step in upload.steps() if step.do() is None]
    assert news == [True, False, False, False, False, False, True]
    monkeypatch.setattr(output_pieces, "_TELL_EVERY_S", 0.0)
    told = [step.what for step in pieces(root, store, "large").steps() if step.do() is None]
    assert told[:3] == [
        "its outputs",
        *(f"its outputs ({done} of 327.7 kB so far, now 'large')" for done in ("0 bytes", "65.5 kB")),
    ]


def test_what_is_gone_from_the_datastore_is_said(root, store):
    write(root / "a", "x")
    found = outputs(root, store, "a")
    for path in (root.parent / "store").rglob("*"):
        if path.is_file():
            path.unlink()
    with pytest.raises(
        TorchrunError, match=r"could not be read from the local datastore .*store.*Are they still there"
    ):
        list(found)


def test_a_list_that_leads_out_of_the_folder_is_refused(store, tmp_path):
    row = {"name": "../x", "size": 0, "modified": 0.0, "mode": 0o644, "digest": "", "parts": []}
    key = store.save(json.dumps({"version": 1, "node": 0, "files": [row], "left_out": {}}).encode())
    with pytest.raises(TorchrunError, match="leads out of the folder"):
        Outputs(store.address, {0: (key, 1, 0)}).download(tmp_path / "there")


# --- as an artifact, and elsewhere ----------------------------------------------------------------


def test_outputs_are_small_and_read_wherever_the_datastore_is(root, store, tmp_path):
    for number in range(300):
        write(root / f"file {number}", "x")
    found = outputs(root, store, ".")
    list(found)  # the list is not stored with it
    data = pickle.dumps(found)
    assert len(data) < 500 + len(str(tmp_path))
    assert pickle.loads(data) == found
    # On another machine the same folder may lie elsewhere; Metaflow's settings there tell.
    os.rename(tmp_path / "store", tmp_path / "elsewhere")
    os.makedirs(tmp_path / "sysroot")
    os.rename(tmp_path / "elsewhere", tmp_path / "sysroot" / ".metaflow")
    program = "import pickle, sys; print(pickle.load(sys.stdin.buffer).open('file 7').read())"
    env = {**os.environ, "METAFLOW_DATASTORE_SYSROOT_LOCAL": str(tmp_path / "sysroot"), "METAFLOW_USER": "tester"}
    done = subprocess.run([sys.executable, "-c", program], input=data, capture_output=True, env=env)
    assert done.stdout == b"b'x'\n", done.stderr.decode()


def test_outputs_tell_what_they_are(root, store):
    assert repr(Outputs({"type": "local", "root": "x", "flow": "F"}, {})) == "<Outputs: 0 files, 0 bytes>"
    write(root / "a", "x" * 1500)
    found = outputs(root, store, "a")
    assert repr(found) == "<Outputs: 1 file, 1.5 kB of node 0>"
    (file,) = found
    assert repr(file) == f"OutputFile(name='a', size=1500, node=0, modified={file.modified!r})"
    assert not Outputs(store.address, {})
