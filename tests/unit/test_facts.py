"""What a node says of itself, found without importing torch, and what becomes of a contradiction."""

import platform
import sys
from dataclasses import replace

import pytest
from unit_helpers import write

from metaflow_extensions.torchrun.plugins.torchrun.errors import TorchNotFoundError
from metaflow_extensions.torchrun.plugins.torchrun.gang.protocol import Join, Ready
from metaflow_extensions.torchrun.plugins.torchrun.gang.state import Gang
from metaflow_extensions.torchrun.plugins.torchrun.launch.facts import (
    contents_digest,
    device_kind,
    node_facts,
    shm_bytes,
    shm_warning,
    too_few_warning,
)
from metaflow_extensions.torchrun.plugins.torchrun.launch.spec import LaunchSpec
from metaflow_extensions.torchrun.plugins.torchrun.machine.accelerators import Machine

MACHINE = Machine(4)
NO_PYTHON = (("no-python", None),)


def spec(entrypoint="train.py", module=False, options=(), source=None):
    return LaunchSpec(str(entrypoint), (), module, 2, 2, 0, sys.executable, options=options, source=source)


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Return a function that installs packages, for this test only, where Python looks first and last."""
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])

    def install(version_file=None, **packages):
        write(tmp_path / "site" / "torch" / "__init__.py", "raise AssertionError('torch must not be imported')\n")
        if version_file is not None:
            write(tmp_path / "site" / "torch" / "version.py", version_file)
        for name, version in packages.items():
            folder = tmp_path / "site" / f"{name}-{version}.dist-info"
            write(folder / "METADATA", f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")

    return install


# As torch 2.13, a CUDA build of torch 2.5 and a ROCm build of torch 2.6 write it.
CPU = "__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n"
CUDA = "__version__ = '2.5.1+cu124'\ncuda: Optional[str] = '12.4'\nhip: Optional[str] = None\n"
ROCM = "__version__ = '2.6.0+rocm6.2'\ncuda: Optional[str] = None\nhip: Optional[str] = '6.2.4'\n"


@pytest.mark.parametrize(
    ("version_file", "packages", "expected"),
    [
        (CPU, {"torch": "2.13.0+cpu"}, ("2.13.0+cpu", "none", "none")),
        (
            CUDA,
            {"torch": "2.5.1", "nvidia_nccl_cu12": "2.21.5", "nvidia_nccl_cu13": "2.28.0"},
            ("2.5.1", "12.4", "2.21.5"),
        ),
        (CUDA, {}, ("2.5.1+cu124", "12.4", "none")),
        (ROCM, {"torch": "2.6.0"}, ("2.6.0", "ROCm 6.2.4", "none")),
        (None, {}, ("unknown", "none", "none")),
        ("not Python (", {"torch": "2.5.1"}, ("2.5.1", "none", "none")),
    ],
)
def test_versions_are_read_not_imported(version_file, packages, expected, site, tmp_path):
    site(version_file, **packages)
    script = spec(write(tmp_path / "train.py", "pass"))
    found = node_facts(script, Machine(4, ("0",)))
    assert (found["torch"], found["cuda"], found["nccl"]) == expected
    assert found["python"] == ".".join(platform.python_version_tuple()[:2])
    assert (found["devices"], found["contents"]) == (device_kind(("0",)), contents_digest(script))
    assert "torch" not in sys.modules


def test_a_node_without_torch_says_so_and_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(TorchNotFoundError, match=r"PyTorch is not installed for .*pip install torch"):
        node_facts(spec(), MACHINE)


# --- devices and contents -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "accelerators", "kind"),
    [
        (["dev/nvidia0", "dev/nvidiactl"], ("0",), "nvidia"),
        (["dev/nvidia0"], (), "none"),  # CUDA_VISIBLE_DEVICES hides them
        (["dev/nvidiactl", "dev/nvidia-uvm"], ("0",), "unknown"),
        (["dev/kfd"], ("0", "1"), "amd"),
    ],
)
def test_the_kind_of_devices(files, accelerators, kind, tmp_path):
    for name in files:
        write(tmp_path / name, "")
    assert device_kind(accelerators, str(tmp_path)) == kind


def test_two_files_of_one_name_are_told_apart_by_all_their_contents(tmp_path):
    texts = ("print(1)", "print(1)", "#" * 3_000_000 + "1", "#" * 3_000_000 + "2")
    scripts = [write(tmp_path / str(number) / "train.py", text) for number, text in enumerate(texts)]
    digests = [contents_digest(spec(script)) for script in scripts]
    assert digests[0] == digests[1] == contents_digest(spec("python", options=NO_PYTHON, source=str(scripts[0])))
    assert len(set(digests)) == 3
    assert {len(digest) for digest in digests} == {16}
    for how in ({"module": True}, {"options": NO_PYTHON}):
        assert contents_digest(spec(scripts[0], **how)) == "none", "there is no file to read"
    assert contents_digest(spec(tmp_path)) == "unknown"


@pytest.mark.parametrize(
    ("machine", "variables", "task", "devices", "seen"),
    [
        (Machine(4, ("0", "1")), {}, {}, "unknown", "2 unknown"),
        (Machine(4), {}, {}, "none", "none"),
        # The step's code, or the image, hides them.
        (Machine(4, ("0", "1")), {}, {"CUDA_VISIBLE_DEVICES": ""}, "none", "none"),
        (Machine(4, ("0", "1")), {}, {"CUDA_VISIBLE_DEVICES": "1"}, "unknown", "1 unknown"),
        (Machine(4, ("0", "1")), {}, {"HIP_VISIBLE_DEVICES": "-1"}, "none", "none"),
        # Nodes of one machine: each has its share.
        (Machine(4, ("0", "1"), 2, 1), {}, {"CUDA_VISIBLE_DEVICES": "0,1"}, "unknown", "1 unknown"),
        (Machine(4, ("0",), 2, 1), {}, {}, "none", "none"),
        # What `run(env=...)` hides, it hides on purpose.
        (Machine(4, ("0", "1")), {"CUDA_VISIBLE_DEVICES": ""}, {}, "unknown", "none"),
        (Machine(4, ("0",), 2, 1), {"CUDA_VISIBLE_DEVICES": "0"}, {}, "none", "1 unknown"),
    ],
)
def test_accelerators_are_those_that_the_workers_see(machine, variables, task, devices, seen, site, monkeypatch):
    site(CPU)
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in task.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(device_kind, "__defaults__", ("/nowhere",))
    found = node_facts(replace(spec(), env=tuple(variables.items())), machine)
    assert (found["devices"], found["accelerators"]) == (devices, seen)


def test_a_machine_with_fewer_accelerators_than_nodes_is_warned_of():
    assert "1 accelerator can't be shared" in too_few_warning(spec(), Machine(4, ("0",), 2, 0))
    shown = replace(spec(), env=(("CUDA_VISIBLE_DEVICES", "0"),))
    for said, machine in ((spec(), Machine(4)), (spec(), Machine(4, ("0", "1"), 2)), (shown, Machine(4, ("0",), 2))):
        assert too_few_warning(said, machine) is None


# --- contradictions -------------------------------------------------------------------------------

NAMES = {
    "torch": "torch version",
    "python": "Python version",
    "cuda": "CUDA version that torch was built for",
    "nccl": "NCCL version",
    "devices": "kind of accelerators",
    "contents": "contents of the entrypoint",
}


@pytest.mark.parametrize("fact", NAMES)
def test_every_fact_is_compared(fact, site):
    site(CUDA, torch="2.5.1")
    own = node_facts(spec(), MACHINE)
    assert own.keys() == {*NAMES, "accelerators"}
    gang = Gang(2, lambda pinned: 40001)
    for node in range(2):
        gang.handle(node, Join(node, f"host-{node}"))
    assert gang.handle(0, Ready(0, 2, "abc", own)) == []
    seen = {"accelerators": "1 other"} if fact == "devices" else {}
    sent = gang.handle(1, Ready(0, 2, "abc", {**own, **seen, fact: "other"}))
    said = f"The nodes differ in the {NAMES[fact]} (node 0: {own[fact]}, node 1: other)"
    assert [(node, said in verdict.error.message) for node, verdict in sent] == [(0, True), (1, True)]


# --- /dev/shm -------------------------------------------------------------------------------------

MIB = 1024 * 1024


@pytest.mark.parametrize(
    ("size", "nproc", "accelerators", "place", "remedy"),
    [
        (64 * MIB, 2, (), "kubernetes", "Write @kubernetes(shared_memory=1024) "),
        (64 * MIB, 1, ("0",), "aws-batch", "Write @batch(shared_memory=1024) "),
        (1024 * MIB - 1, 8, ("0",), None, "mount -o remount,size=1G /dev/shm"),
        (64 * MIB, 2, (), "local", "docker run --shm-size=1g"),
        # Enough, or nobody to share it.
        (1024 * MIB, 8, ("0",), "kubernetes", None),
        (64 * MIB, 1, (), "kubernetes", None),
        (None, 8, ("0",), "kubernetes", None),
    ],
)
def test_too_little_shared_memory_is_told_with_what_to_write(size, nproc, accelerators, place, remedy):
    environ = {} if place is None else {"METAFLOW_RUNTIME_ENVIRONMENT": place}
    warning = shm_warning(size, nproc, accelerators, environ)
    if remedy is None:
        assert warning is None
    else:
        assert warning.startswith(f"warning: /dev/shm has {size // MIB} MiB. ")
        assert remedy in warning


def test_a_machine_without_shared_memory_is_no_error(tmp_path):
    assert shm_bytes(str(tmp_path / "none")) is None
    assert shm_bytes(str(tmp_path)) > 0
