"""Which files patterns name, in folders of every kind."""

import os
import socket

import pytest
from unit_helpers import HOSTILE, write

from metaflow_extensions.torchrun.plugins.torchrun.features.outputs.files import find

# What can be a file's name, in bytes that are no text, too.
NAMES = [name for name in HOSTILE if name] + [os.fsdecode(b"\xff\xfe"), "[ab]", "**"]


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
    listing = find(str(root), ["a.json", "b.json", "*.pt"])
    assert [file.name for file in listing.files] == ["a.json"]
    assert [remark.split(" of ")[0] for remark in listing.remarks] == ["warning: 'b.json'", "warning: '*.pt'"]


def test_what_is_no_file_or_leads_elsewhere_is_left_out_and_said(root, tmp_path, monkeypatch):
    outside, model = write(tmp_path / "outside" / "secret", "x"), root / "model"
    write(model / "step 5" / "weights", "w")
    write(root / "shared" / "tokenizer", "t")
    os.mkfifo(model / "pipe")
    monkeypatch.chdir(model)  # a socket's name may have 107 bytes
    links = {
        "latest": "step 5",
        "shared": "../shared",
        "step 5/again": "../../model",
        "up": "..",
        "nothing": "gone",
        "loop": "loop/x",
        "secret": outside,
        "folder": outside.parent,
    }
    for name, target in links.items():
        (model / name).symlink_to(target)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        by_name, by_pattern = find(str(root), ["model"]), find(str(root), ["model/*"])
    for listing in (by_name, by_pattern):
        found = ["model/latest/weights", "model/shared/tokenizer", "model/step 5/weights"]
        assert [file.name for file in listing.files] == found
        reasons = {name.removeprefix("model/"): why for name, why in listing.left_out.items()}
        assert "symbolic links" in reasons.pop("loop")
        assert reasons == {
            **dict.fromkeys(["pipe", "socket"], "is no file"),
            **dict.fromkeys(["up", "latest/again", "step 5/again"], "is a link to a folder that it lies in"),
            "nothing": "is a link to nothing, or gone",
            "secret": f"leads to {outside}, out of the working directory",
            "folder": f"leads to {outside.parent}, out of the working directory",
        }


def test_a_link_that_is_named_outright_is_followed_wherever_it_leads(root, tmp_path):
    target = write(tmp_path / "fast disk" / "weights", "w").parent
    (target / "same").symlink_to("weights")
    (root / "model").symlink_to(target)
    listing = find(str(root), ["model"])
    assert [file.name for file in listing.files] == ["model/same", "model/weights"]
    (remark,) = listing.remarks
    assert remark.startswith(f"'model' of run(outputs=...) leads to {target}")
    # By a pattern it was not meant for sure.
    for pattern, name in (("mod*", "model"), ("mod*/weights", "model/weights")):
        assert list(find(str(root), [pattern]).left_out) == [name]


def test_metaflows_own_datastore_is_no_output(root):
    write(root / ".metaflow" / "Flow" / "data.json", "")
    write(root / "mine.json", "")
    assert names(root, "**/*.json", ".") == [".metaflow/Flow/data.json", "mine.json"]
    for pattern in (".", "**/*.json", ".metaflow/Flow", ".*"):
        assert names(root, pattern, apart=str(root / ".metaflow")) == ["mine.json"] * (pattern in (".", "**/*.json"))
