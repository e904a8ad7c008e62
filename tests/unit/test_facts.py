"""What a node says of itself, found without importing torch, and what becomes of a contradiction."""

import platform
import sys

import pytest
from unit_helpers import write

from metaflow_extensions.torchrun.plugins.torchrun.errors import GangError, TorchNotFoundError
from metaflow_extensions.torchrun.plugins.torchrun.gang.protocol import Go, Join, Ready, Verdict
from metaflow_extensions.torchrun.plugins.torchrun.gang.state import Gang
from metaflow_extensions.torchrun.plugins.torchrun.launch.facts import (
    contents_digest,
    device_kind,
    nccl_version,
    node_facts,
)
from metaflow_extensions.torchrun.plugins.torchrun.launch.spec import LaunchSpec
from metaflow_extensions.torchrun.plugins.torchrun.machine.accelerators import Machine

MACHINE = Machine(4)


def spec(entrypoint="train.py", module=False, options=()):
    return LaunchSpec(str(entrypoint), (), module, 2, 2, 0, sys.executable, options=options)


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
        (CPU, {"torch": "2.13.0+cpu"}, {"torch": "2.13.0+cpu", "cuda": "none", "nccl": "none"}),
        (
            CUDA,
            {"torch": "2.5.1", "nvidia_nccl_cu12": "2.21.5", "nvidia_nccl_cu13": "2.28.0"},
            {"torch": "2.5.1", "cuda": "12.4", "nccl": "2.21.5"},
        ),
        (CUDA, {"torch": "2.5.1"}, {"torch": "2.5.1", "cuda": "12.4", "nccl": "none"}),
        (CUDA.replace("12.4", "13.0"), {"torch": "2.9.1", "nvidia_nccl_cu13": "2.28.0"}, {"nccl": "2.28.0"}),
        (ROCM, {"torch": "2.6.0"}, {"torch": "2.6.0", "cuda": "ROCm 6.2.4", "nccl": "none"}),
        (CUDA, {}, {"torch": "2.5.1+cu124", "cuda": "12.4"}),
        (None, {}, {"torch": "unknown", "cuda": "none", "nccl": "none"}),
        ("not Python (", {"torch": "2.5.1"}, {"torch": "2.5.1", "cuda": "none"}),
    ],
)
def test_versions_are_read_not_imported(version_file, packages, expected, site):
    site(version_file, **packages)
    found = node_facts(spec(), MACHINE)
    assert {name: found[name] for name in expected} == expected
    assert "torch" not in sys.modules


def test_a_node_without_torch_says_so_and_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(TorchNotFoundError, match=r"PyTorch is not installed for .*pip install torch.*@pypi"):
        node_facts(spec(), MACHINE)


def test_the_other_facts(site, tmp_path):
    site(CPU)
    found = node_facts(spec(write(tmp_path / "train.py", "pass")), Machine(4, ("0",)))
    assert found["python"] == ".".join(platform.python_version_tuple()[:2])
    assert found["devices"] == device_kind(("0",))
    assert found["contents"] == contents_digest(spec(tmp_path / "train.py"))
    assert all(isinstance(value, str) for value in found.values())


def test_nccl_belongs_to_a_cuda_build_only():
    assert nccl_version(None) is None
    assert nccl_version("ROCm 6.2.4") is None


# --- devices and contents -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "accelerators", "kind"),
    [
        (["dev/nvidia0", "dev/nvidiactl"], ("0",), "nvidia"),
        (["dev/nvidia0"], (), "none"),  # CUDA_VISIBLE_DEVICES hides them
        (["dev/nvidiactl", "dev/nvidia-uvm"], ("0",), "unknown"),
        (["dev/kfd"], ("0", "1"), "amd"),
        ([], ("0",), "unknown"),
        ([], (), "none"),
    ],
)
def test_the_kind_of_devices(files, accelerators, kind, tmp_path):
    for name in files:
        write(tmp_path / name, "")
    assert device_kind(accelerators, str(tmp_path)) == kind


def test_two_files_of_one_name_are_told_apart_by_their_contents(tmp_path):
    one, same, other = (
        contents_digest(spec(write(tmp_path / folder / "train.py", text)))
        for folder, text in (("a", "print(1)"), ("b", "print(1)"), ("c", "print(2)"))
    )
    assert one == same != other
    assert len(one) == 16


def test_a_file_of_many_blocks_is_read_to_its_end(tmp_path):
    one, other = (
        contents_digest(spec(write(tmp_path / f"{end}.py", "#" * 3_000_000 + end))) for end in ("one", "other")
    )
    assert one != other


@pytest.mark.parametrize("how", [{"module": True}, {"options": (("no-python", None),)}])
def test_a_module_or_program_has_no_contents_here(how, tmp_path):
    assert contents_digest(spec(write(tmp_path / "train.py", "pass"), **how)) == "none"


def test_a_file_that_cannot_be_read_is_left_to_its_interpreter(tmp_path):
    assert contents_digest(spec(tmp_path)) == "unknown"


# --- contradictions -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fact", "values", "said"),
    [
        ("torch", ("2.5.1", "2.6.0"), "torch version (node 0: 2.5.1, node 1: 2.6.0)"),
        ("python", ("3.10", "3.11"), "Python version (node 0: 3.10, node 1: 3.11)"),
        ("cuda", ("12.4", "none"), "CUDA version that torch was built for (node 0: 12.4, node 1: none)"),
        ("nccl", ("2.21.5", "2.28.0"), "NCCL version (node 0: 2.21.5, node 1: 2.28.0)"),
        ("devices", ("nvidia", "none"), "kind of accelerators (node 0: nvidia, node 1: none)"),
        ("contents", ("aa11", "bb22"), "contents of the entrypoint (node 0: aa11, node 1: bb22)"),
    ],
)
def test_a_contradiction_ends_the_launch_before_it_begins(fact, values, said, site, tmp_path):
    site(CUDA, torch="2.5.1")
    gang = Gang(2, lambda pinned: 40001)
    own = node_facts(spec(write(tmp_path / "train.py", "pass")), MACHINE)
    assert fact in own
    sent = []
    for node in range(2):
        gang.handle(node, Join(node, f"host-{node}"))
    for node in range(2):
        sent += gang.handle(node, Ready(0, 2, "abc", {**own, fact: values[node]}))
    errors = [message.error for _, message in sent if isinstance(message, Verdict)]
    assert not [message for _, message in sent if isinstance(message, Go)]
    assert [node for node, _ in sent] == [0, 1]
    assert all(type(error) is GangError for error in errors)
    assert {str(error) for error in errors} == {str(errors[0])}
    assert f"The nodes differ in the {said}" in errors[0].message


def test_nodes_with_the_same_facts_go(site, tmp_path):
    site(CUDA, torch="2.5.1")
    gang = Gang(2, lambda pinned: 40001)
    own = node_facts(spec(write(tmp_path / "train.py", "pass")), MACHINE)
    sent = []
    for node in range(2):
        gang.handle(node, Join(node, f"host-{node}"))
    for node in range(2):
        sent += gang.handle(node, Ready(0, 2, "abc", own))
    assert [type(message) for _, message in sent] == [Go, Go]
