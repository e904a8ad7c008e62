"""Which files patterns name, in folders of every kind."""

import os
import socket

import pytest
from unit_helpers import HOSTILE, write

from metaflow_extensions.torchrun.plugins.torchrun.task.launch_outputs import find

# What can be a file's name, in bytes that are no text, too.
NAMES = [name for name in HOSTILE if name] + [os.fsdecode(b"\xff\xfe"), "[ab]", "**"]


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


def names(root, *patterns, **more):
    return find(str(root), patterns, **more)[0]


def test_files_folders_and_patterns_are_found_once_and_in_order(root):
    for name in ("model/weights.pt", "model/deep/er/x", "model/.hidden", "a.json", "b.json", "logs/n0/c.json", "other"):
        write(root / name, name)
    (root / "model" / "empty").mkdir()
    whole = ["model/.hidden", "model/deep/er/x", "model/weights.pt"]
    assert names(root, "model") == whole
    assert names(root, "model", "*.json", "a.json") == [*whole, "a.json", "b.json"]
    assert names(root, "**/*.json") == ["a.json", "b.json", "logs/n0/c.json"]
    assert names(root, "logs/*/?.json") == ["logs/n0/c.json"]
    assert names(root, ".") == names(root, "**") == sorted(["a.json", "b.json", "logs/n0/c.json", "other", *whole])


def test_names_may_be_of_anything(root):
    (root / "any").mkdir()
    for name in NAMES:
        (root / "any" / name).write_text(name, errors="surrogateescape")
    assert names(root, "any") == sorted(f"any/{name}" for name in NAMES)
    # A name that is there is meant as it stands, whatever it would mean as a pattern.
    write(root / "any" / "a", "")
    assert names(root, "any/[ab]") == ["any/[ab]"]


def test_a_pattern_that_fits_nothing_is_said(root):
    write(root / "a.json", "")
    found = find(str(root), ["a.json", "b.json", "*.pt"])
    assert found == (["a.json"], dict.fromkeys(["b.json", "*.pt"], "matches nothing"))


def test_links_to_files_are_followed_and_those_to_folders_where_an_entry_names_them(root, tmp_path, monkeypatch):
    outside, model = write(tmp_path / "outside" / "weights", "x"), root / "model"
    write(model / "step 5" / "weights", "w")
    os.mkfifo(model / "pipe")
    monkeypatch.chdir(model)  # a socket's name may have 107 bytes
    links = {
        "latest": "step 5",
        "up": "..",
        "loop": "loop/x",
        "nothing": "gone",
        "far": outside.parent,
        "file": outside,
    }
    for name, target in links.items():
        (model / name).symlink_to(target)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        by_name, by_pattern = find(str(root), ["model"]), find(str(root), ["model/*"])
    for found, left_out in (by_name, by_pattern):
        assert found == ["model/file", "model/step 5/weights"]
        assert {name.removeprefix("model/"): why.partition(";")[0] for name, why in left_out.items()} == {
            **dict.fromkeys(["pipe", "socket"], "is no file"),
            **dict.fromkeys(["nothing", "loop"], "is a link to nothing, or gone"),
            "latest": f"is a link to the folder {model / 'step 5'}",
            "up": f"is a link to the folder {root}",
            "far": f"is a link to the folder {outside.parent}",
        }
    assert names(root, "model/latest", "model/far") == ["model/latest/weights", "model/far/weights"]


def test_metaflows_own_datastore_is_no_output(root):
    write(root / ".metaflow" / "Flow" / "data.json", "")
    write(root / "mine.json", "")
    assert names(root, "**/*.json", ".") == [".metaflow/Flow/data.json", "mine.json"]
    for pattern in (".", "**/*.json", ".metaflow/Flow", ".*"):
        assert names(root, pattern, apart=str(root / ".metaflow")) == ["mine.json"] * (pattern in (".", "**/*.json"))
