"""What a node reports of itself before a launch, found without importing torch."""

import os
import platform
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from gang_of import FACTS
from unit_helpers import write

from metaflow_extensions.torchrun.plugins.torchrun.machine.accelerators import Machine
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.call import Call, FunctionSpec
from metaflow_extensions.torchrun.plugins.torchrun.task import facts

CALL = Call("train.py", (), False, 2, 2, 0, sys.executable)
NO_PYTHON = {"no-python": None}
TWO = ("0", "1")


HIDING = replace(CALL, env={"CUDA_VISIBLE_DEVICES": ""})  # by `run(env=...)`


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Return a function that installs packages, for this test only, where Python looks first and last."""
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])

    def install(version_file=None):
        write(tmp_path / "site" / "torch" / "__init__.py", "raise AssertionError('torch must not be imported')\n")
        if version_file is not None:
            write(tmp_path / "site" / "torch" / "version.py", version_file)

    return install


# As torch 2.13 and a CUDA build of torch 2.5 write it.
CPU = "__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n"
CUDA = "__version__ = '2.5.1+cu124'\ncuda: Optional[str] = '12.4'\nhip: Optional[str] = None\n"


@pytest.mark.parametrize(
    ("version_file", "version"),
    [(CPU, "2.13.0+cpu"), (CUDA, "2.5.1+cu124"), (None, "unknown"), ("not Python (", "unknown")],
)
def test_versions_are_read_not_imported(version_file, version, site, tmp_path):
    site(version_file)
    script = replace(CALL, entrypoint=str(write(tmp_path / "train.py", "pass")))
    found = facts.with_facts(replace(script, machine=Machine(4, ("0",)))).facts
    assert found["torch"] == version
    assert found["python"] == ".".join(platform.python_version_tuple()[:2])
    assert (found["devices"], found["contents"]) == ("1 accelerator", facts.contents_digest(script))
    function = replace(script, function=FunctionSpec("Trainer.fit"))
    assert ("function" in found, facts.with_facts(function).facts["function"]) == (False, "Trainer.fit")
    assert "torch" not in sys.modules
    assert found.keys() == FACTS.keys(), "all are compared"


def test_two_files_of_one_name_are_told_apart_by_all_their_contents(tmp_path):
    texts = ("print(1)", "print(1)", "#" * 3_000_000 + "1", "#" * 3_000_000 + "2")
    scripts = [str(write(tmp_path / str(number) / "train.py", text)) for number, text in enumerate(texts)]
    digests = [facts.contents_digest(replace(CALL, entrypoint=script)) for script in scripts]
    command = replace(CALL, entrypoint="python", options=NO_PYTHON, source=scripts[0])
    assert digests[0] == digests[1] == facts.contents_digest(command)
    assert len(set(digests)) == 3
    assert {len(digest) for digest in digests} == {16}
    for how in ({"module": True}, {"options": NO_PYTHON}):
        assert facts.contents_digest(replace(CALL, entrypoint=scripts[0], **how)) == "none", "there is no file to read"
    assert facts.contents_digest(replace(CALL, entrypoint=str(tmp_path))) == "unknown"


@pytest.mark.parametrize(("call", "seen"), [(CALL, "2 accelerators"), (HIDING, "none")])
def test_accelerators_are_those_that_the_workers_see_but_a_call_hides_them_on_purpose(call, seen, site):
    site(CPU)
    assert facts.with_facts(replace(call, machine=Machine(4, TWO))).facts["devices"] == seen


# --- /dev/shm -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "nproc", "accelerators", "place", "remedy"),
    [
        (64, 2, (), "kubernetes", "Write @kubernetes(shared_memory=1024) "),
        (64, 1, ("0",), "aws-batch", "Write @batch(shared_memory=1024) "),
        (1023, 8, ("0",), "local", "mount -o remount,size=1G /dev/shm"),
        # Enough, or nobody to share it.
        (1024, 8, ("0",), "kubernetes", None),
        (64, 1, (), "kubernetes", None),
    ],
)
def test_too_little_shared_memory_is_told_with_what_to_write(size, nproc, accelerators, place, remedy, monkeypatch):
    monkeypatch.setattr("os.statvfs", lambda path: SimpleNamespace(f_blocks=size * 256, f_frsize=4096))
    environ = {"METAFLOW_RUNTIME_ENVIRONMENT": place}
    warning = facts.shm_warning(replace(CALL, nproc=nproc, machine=Machine(4, accelerators), environ=environ))
    assert (warning is None) is (remedy is None)
    assert not warning or (warning.startswith(f"warning: /dev/shm has {size} MiB. ") and remedy in warning)


def test_a_python_of_another_installation_is_told(tmp_path):
    for name in ("python3.11", "pip"):
        write(tmp_path / name, "#!/bin/sh\n").chmod(0o755)
    elsewhere, here = {"PATH": str(tmp_path)}, {"PATH": os.path.dirname(sys.executable)}
    told = f"pip is {tmp_path}/pip, but this step runs under {sys.executable}"
    assert told in facts.foreign_python(["pip", "x"], elsewhere)
    assert "'-m', 'pip'" in facts.foreign_python(["sh", "-ec", "pip install x"], elsewhere)
    assert "write [sys.executable, ...]" in facts.foreign_python(["python3.11", "x.py"], elsewhere)
    for words in (["make"], ["sh", "-ec", "pipe"], ["pip9"], ["/usr/bin/python3"], [], ["sh", "-ec", " "]):
        assert facts.foreign_python(words, elsewhere) is None
    assert facts.foreign_python(["python"], here) is None
