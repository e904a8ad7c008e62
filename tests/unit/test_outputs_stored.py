"""Files that go to a datastore and come back, here and elsewhere."""

import itertools
import os
import time

import pytest
from gang_views import Story
from metaflow.datastore import FlowDataStore
from metaflow.plugins.datastores.local_storage import LocalStorage
from unit_helpers import settings_of_run, write

from metaflow_extensions.torchrun.plugins.torchrun.compat.datastore import DatastoreValues
from metaflow_extensions.torchrun.plugins.torchrun.errors import TorchrunConfigError, TorchrunError
from metaflow_extensions.torchrun.plugins.torchrun.outputs import Outputs
from metaflow_extensions.torchrun.plugins.torchrun.task import launch_outputs as storing
from metaflow_extensions.torchrun.plugins.torchrun.task.launch_outputs import named_outputs, upload

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
    """Let parts have 64 KiB."""
    monkeypatch.setattr(storing, "PART_BYTES", 64 * KIB)


def stored(root, store, *patterns, within_s=None, begin=lambda *_: None, lines=None):
    """Store what patterns name; return the entry of the node in a result."""
    told, said = upload(store, patterns, str(root), within_s, begin)
    (lines if lines is not None else []).extend(said)
    return tuple(told[name] for name in ("key", "files", "size"))


def outputs(root, store, *patterns):
    return Outputs(store.address, {0: stored(root, store, *patterns)})


def read(found, name, **of):
    with found.open(name, **of) as file:
        return file.read()


def content(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# --- there and back -------------------------------------------------------------------------------


def test_files_come_back_as_they_were(root, store, small, tmp_path):
    sizes = {"model/a": 0, "model/b": 1, "c": 4 * KIB, "e": 64 * KIB, "f": 3 * 64 * KIB + 5}
    for name, size in sizes.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(os.urandom(size))
    (root / "größe 🙂\n*").write_bytes(b"x")
    (root / os.fsdecode(b"\xff")).write_bytes(b"y")
    os.utime(root / "c", (1e9, 1e9))
    found = outputs(root, store, ".")
    assert (len(found), found.size) == (7, sum(sizes.values()) + 2)
    assert {file.name: file.size for file in found if file.name in sizes} == sizes
    assert "model/b" in found
    assert "model" not in found
    folder = found.download(tmp_path / "there" / "deep")
    assert content(folder) == content(root)
    assert os.stat(folder / "c").st_mtime == 1e9
    for name in sizes:
        assert read(found, name) == (root / name).read_bytes()
    assert max(store.saved[:-1]) == 64 * KIB, "no more of a file is in memory"


# --- several nodes --------------------------------------------------------------------------------


@pytest.fixture
def of_two(root, tmp_path, store, small):
    """Return the outputs of two nodes: one file is the same, one is of one node alone, one differs."""
    other = tmp_path / "other"
    for node, folder in enumerate((root, other)):
        write(folder / "config.json", "{}")
        write(folder / f"shard {node}", str(node) * 10_000)
        write(folder / "log", f"of node {node}")
    return Outputs(store.address, {0: stored(root, store, "."), 1: stored(other, store, ".")})


def test_files_of_several_nodes_are_told_apart(of_two, tmp_path):
    assert of_two.nodes == [0, 1]
    both = itertools.product(["config.json", "log"], [0, 1])
    assert [(file.name, file.node) for file in of_two] == [*both, ("shard 0", 0), ("shard 1", 1)]
    assert read(of_two, "config.json") == b"{}"
    assert read(of_two, "shard 1") == b"1" * 10_000
    assert read(of_two, "log", node=1) == b"of node 1"
    with pytest.raises(LookupError, match=r"Nodes 0, 1 have stored other content .*: 'log'\. Say whose.*node="):
        of_two.open("log")
    with pytest.raises(FileNotFoundError, match=r"'shard 2'; there are 'config.json', 'log', 'shard 0'"):
        of_two.open("shard 2")
    with pytest.raises(FileNotFoundError, match="no output of node 1 'shard 0'"):
        of_two.open("shard 0", node=1)
    assert sorted(content(of_two.download(tmp_path / "one", node=1))) == ["config.json", "log", "shard 1"]


def test_files_of_several_nodes_are_put_together_where_they_do_not_clash(of_two, root, store, tmp_path):
    with pytest.raises(LookupError, match=r"the same name: 'log'.*download\(folder, node="):
        of_two.download(tmp_path / "there")
    assert not (tmp_path / "there").exists(), "it is told before anything is written"
    write(tmp_path / "third" / "deep" / "y", "2")
    both = Outputs(store.address, {0: stored(root, store, "."), 1: stored(tmp_path / "third", store, ".")})
    assert list(content(both.download(tmp_path / "there"))) == ["config.json", "deep/y", "log", "shard 0"]


# --- what goes wrong ------------------------------------------------------------------------------


def test_what_can_not_be_read_is_left_out_and_said(root, store, monkeypatch):
    write(root / "gone", "x")
    write(root / "left", "x")
    find, lines = storing.find, []

    def find_and_lose(*about):
        found = find(*about)
        os.unlink(root / "gone")
        return found

    monkeypatch.setattr(storing, "find", find_and_lose)
    entry = stored(root, store, ".", lines=lines)
    assert Outputs(store.address, {0: entry}).left_out == {"gone": "can't be read: No such file or directory"}
    assert entry[1] == 1
    said = lines[0]
    assert said == f"warning: left out of the outputs in {root}: 'gone' can't be read: No such file or directory"


def test_a_file_that_changes_while_it_is_read_is_stored_as_far_as_it_is_there(root, store, small):
    grows, shrinks = write(root / "grows", "x" * 100 * KIB), write(root / "shrinks", "x" * 200 * KIB)
    save = store.save

    def save_while_they_change(data):
        with open(grows, "a") as file:
            file.write("more")
        os.truncate(shrinks, 70 * KIB)
        return save(data)

    store.save = save_while_they_change
    found = {file.name: file.size for file in outputs(root, store, "grows", "shrinks")}
    assert found == {"grows": 100 * KIB, "shrinks": 70 * KIB}, "as it was when it was opened, or what was left"


def test_what_does_not_fit_into_the_time_after_a_failure_is_named(root, store, small, monkeypatch):
    for name in ("a", "b", "c"):
        write(root / name, name * 100 * KIB)
    write(root / "empty", "")
    begun = []

    def begin(what, *_):
        begun.append(what)
        if len(begun) == 4:  # after the search and the first file; the next one is begun
            monkeypatch.setattr(time, "monotonic", lambda: 1e12)

    found = Outputs(store.address, {0: stored(root, store, "b", ".", within_s=1000.0, begin=begin)})
    assert [file.name for file in found] == ["b", "empty"], "in the order given"
    assert found.left_out == dict.fromkeys(["a", "c"], "could not be stored in time")


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


@pytest.mark.parametrize("has_failed", [True, False])
def test_a_failed_launch_that_has_left_nothing_says_nothing_of_it(has_failed, root, store):
    """Its cause is the next line; of one that ended well, a name without a file is worth a warning."""
    said = []
    stored(root, store, "*.pt", within_s=60.0 if has_failed else None, lines=said)
    assert [len(said), *(["matches nothing" in said[0]] if said else [])] == ([0] if has_failed else [2, True])


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"outputs": ["../model"]}, r"run\(outputs\) has '../model'"),
        ({"outputs": "a", "outputs_from": "rank0"}, r"run\(outputs_from\) is 'rank0'.*'control'.*'all'"),
        ({"outputs": None, "outputs_from": "all"}, "outputs_from='all'.*outputs names none"),
    ],
)
def test_what_can_not_be_asked_for_is_refused(given, why, store):
    with pytest.raises(TorchrunConfigError, match=why):
        named_outputs(settings_of_run(**given), 0, store)
    with pytest.raises(TorchrunConfigError, match="needs a datastore"):
        named_outputs(settings_of_run(outputs="a"), 0, None)


def test_what_a_generation_before_has_stored_is_forgotten():
    """A node is lost while it stores; all starts again with a spare."""
    story = Story(3, spare_nodes=1).running(policy={"max_restarts": 1}).ended(codes=(0, 0), stores=True)
    story.report("outputs", 0, key="k0", files=2, size=3_000_000, names=["a", "b"])
    assert story.stored(0).view.outputs
    story = story.lost(1).at(9)
    assert (story.view.generation, story.view.outputs) == (1, {})
