"""Which files patterns name, in folders of every kind."""

import os
import socket
import stat
import subprocess

import pytest
from unit_helpers import HOSTILE, write

from metaflow_extensions.torchrun.plugins.torchrun.features.outputs.files import find, lines

# What can be a file's name, in bytes that are no text, too.
NAMES = [name for name in HOSTILE if name and name not in (".", "..")] + [os.fsdecode(b"\xff\xfe"), "[ab]", "**"]


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


def names(root, *patterns, **more):
    return [file.name for file in find(str(root), patterns, **more).files]


def test_files_folders_and_patterns_are_found_once_and_in_order(root):
    for name in ("model/weights.pt", "model/deep/er/x", "model/.hidden", "a.json", "b.json", "logs/n0/c.json", "other"):
        write(root / name, name)
    (root / "model" / "empty").mkdir()
    whole = ["model/.hidden", "model/deep/er/x", "model/weights.pt"]
    assert names(root, "model") == whole
    assert names(root, "*.json", "a.json", "model") == ["a.json", "b.json", *whole]
    assert names(root, "**/*.json") == ["a.json", "b.json", "logs/n0/c.json"]
    assert names(root, "logs/*/?.json") == ["logs/n0/c.json"]
    assert names(root, ".") == names(root, "**") == sorted(["a.json", "b.json", "logs/n0/c.json", "other", *whole])
    (found,) = find(str(root), ["other"]).files
    assert (found.size, stat.S_IMODE(os.stat(found.path).st_mode)) == (5, found.mode)


def test_names_may_be_of_anything(root):
    for name in NAMES:
        (root / "any").mkdir(exist_ok=True)
        (root / "any" / name).write_text(name, errors="surrogateescape")
    assert names(root, "any") == sorted(f"any/{name}" for name in NAMES)
    # A name that is there is meant as it stands, whatever it would mean as a pattern.
    write(root / "any" / "a", "")
    assert names(root, "any/[ab]") == ["any/[ab]"]


def test_a_pattern_that_fits_nothing_is_said(root):
    write(root / "a.json", "")
    listing = find(str(root), ["a.json", "b.json", "*.pt"])
    assert [file.name for file in listing.files] == ["a.json"]
    assert list(lines(listing, 10)) == [
        f"warning: '{pattern}' of run(outputs=...) matches nothing in {root}" for pattern in ("b.json", "*.pt")
    ]


def test_what_is_no_file_or_leads_elsewhere_is_left_out_and_said(root, tmp_path):
    outside = write(tmp_path / "outside" / "secret", "x")
    model = root / "model"
    write(model / "step 5" / "weights", "w")
    write(root / "shared" / "tokenizer", "t")
    os.mkfifo(model / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        here = os.getcwd()
        os.chdir(model)  # such a name may have 107 bytes
        server.bind("socket")
        os.chdir(here)
    (model / "latest").symlink_to("step 5")
    (model / "shared").symlink_to("../shared")
    (model / "up").symlink_to("..")
    (model / "step 5" / "again").symlink_to("../../model")
    (model / "nothing").symlink_to("gone")
    (model / "secret").symlink_to(outside)
    (model / "folder").symlink_to(outside.parent)
    (root / "apart.json").symlink_to("/nowhere at all/x.json")
    (root / "loop.json").symlink_to("loop.json/x")
    (root / "own.json").write_text("{}")
    patterns = find(str(root), ["*.json"])
    assert [file.name for file in patterns.files] == ["own.json"]
    assert patterns.left_out["apart.json"] == "is a link to nothing"
    assert "loop.json" in patterns.left_out
    listing = find(str(root), ["model"])
    found = ["model/latest/weights", "model/shared/tokenizer", "model/step 5/weights"]
    assert [file.name for file in listing.files] == found
    assert listing.left_out == {
        "model/pipe": "is a named pipe",
        "model/socket": "is a socket",
        "model/up": "is a link to a folder that it lies in",
        "model/latest/again": "is a link to a folder that it lies in",
        "model/step 5/again": "is a link to a folder that it lies in",
        "model/nothing": "is a link to nothing",
        "model/secret": f"leads to {outside}, out of the working directory",
        "model/folder": f"leads to {outside.parent}, out of the working directory",
    }
    (line,) = lines(listing, 3)
    assert line.startswith("warning: left out of the outputs: 'model/folder' leads to ")
    assert line.endswith("; and 5 more")


def test_a_link_that_is_named_outright_is_followed_wherever_it_leads(root, tmp_path):
    target = write(tmp_path / "fast disk" / "weights", "w").parent
    (target / "same").symlink_to("weights")
    (root / "model").symlink_to(target)
    listing = find(str(root), ["model"])
    assert [file.name for file in listing.files] == ["model/same", "model/weights"]
    assert listing.remarks == [f"'model' of run(outputs=...) leads to {target}, out of the working directory"]
    # By a pattern it was not meant for sure.
    assert find(str(root), ["mod*"]).left_out == {"model": f"leads to {target}, out of the working directory"}
    assert find(str(root), ["mod*/weights"]).left_out == {
        "model/weights": f"leads to {target}/weights, out of the working directory"
    }


def test_metaflows_own_datastore_is_no_output(root):
    write(root / ".metaflow" / "Flow" / "data.json", "")
    write(root / "mine.json", "")
    assert names(root, "**/*.json", ".") == [".metaflow/Flow/data.json", "mine.json"]
    for pattern in (".", "**/*.json", ".metaflow/Flow", ".*"):
        assert names(root, pattern, apart=str(root / ".metaflow")) == ["mine.json"] * (pattern in (".", "**/*.json"))


def test_a_deep_tree_is_searched(root):
    depth = 1500  # deeper than Python calls functions
    here = os.getcwd()
    os.chdir(root)
    for _ in range(depth):
        os.mkdir("d")
        os.chdir("d")
    with open("leaf", "w"):
        pass
    os.chdir(here)
    try:
        assert names(root, "d") == ["d/" * depth + "leaf"]
    finally:
        subprocess.run(["rm", "-r", root / "d"], check=True)  # which pytest can't, for it does call functions
