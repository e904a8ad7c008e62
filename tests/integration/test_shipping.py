"""What a pod gets: the code package of an installed extension, unpacked and run where nothing else is installed."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from flow_runs import STAND_IN
from gaps import gap
from interpreters import MINORS, RARE, interpreters
from metaflow.metaflow_environment import MetaflowEnvironment

# One process runs all of these, since they share environments that take seconds to make.
pytestmark = pytest.mark.xdist_group("shipping")

FLOWS = Path(__file__).parent / "flows"
REPOSITORY = Path(__file__).parents[2]
SOURCES = REPOSITORY / "metaflow_extensions"
KINDS = ("pip install", "pip install -e")
# What Metaflow installs in a pod by itself, whatever the datastore (`_get_install_dependencies_cmd` in
# metaflow/metaflow_environment.py, 2.19), and needs to be imported.
POD_PACKAGES = ("requests",)
LAPTOP_PACKAGES = ("metaflow", "setuptools")

# Runs in the pod: imports the modules that it is given and says where everything came from.
IMPORT_ALL = """
import importlib, json, sys
import metaflow
from metaflow import TorchrunError, TorchrunResult, TorchrunSingleNodeMultiGPU, current, torchrun
files = [importlib.import_module(name).__file__ for name in sys.argv[1:]]
loaded = [name for name, module in sys.modules.items() if getattr(module, "__file__", None)]
foreign = {name.split(".")[0] for name in loaded} - set(sys.stdlib_module_names)
print(json.dumps({"files": files, "foreign": sorted(foreign), "metaflow": metaflow.__file__}))
"""

# Runs in a pod, on the datastore of another: reads the results with Metaflow's client.
RESULT = "metaflow_extensions.torchrun.plugins.torchrun.result"
READ_RESULTS = """
import json
from metaflow import Flow, namespace
namespace(None)
tasks = sorted(Flow("GangFlow").latest_run["train"], key=lambda task: task["node"].data)
results = [task["results"].data[0] for task in tasks]
print(json.dumps([[type(r).__module__, type(r).__name__, r.node_index, r.world_size, r.exit_codes] for r in results]))
"""


class Place(NamedTuple):
    """A laptop or a pod: its Python, its environment variables, and a pod's folder."""

    python: str
    env: dict[str, str]
    folder: Path

    def run(self, *words: object, cwd: Path | None = None) -> str:
        return output_of(self.python, *words, env=self.env, cwd=cwd or self.folder)


def output_of(*command: object, env: dict[str, str], cwd: Path | None = None) -> str:
    """Return what a command says, on both streams."""
    words = [str(word) for word in command]
    done = subprocess.run(words, env=env, cwd=cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout


def plain_environment(path: str) -> dict[str, str]:
    """Return an environment in which nothing leads to the one these tests run in."""
    return {"PATH": f"{path}:/usr/bin:/bin", "METAFLOW_USER": "tester", "PYTHONNOUSERSITE": "1", "LC_ALL": "C.UTF-8"}


def link_distributions(names: tuple[str, ...], folder: Path) -> set[str]:
    """Link installed distributions and all that they require, and nothing else, into a folder; return their modules."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        with suppress(importlib.metadata.PackageNotFoundError):  # it is for another Python or system
            distribution = importlib.metadata.distribution(name)
            for entry in {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
                source, target = Path(str(distribution.locate_file(entry))), folder / entry
                if source.exists() and not target.exists():
                    target.symlink_to(source)
            needed = [requirement for requirement in distribution.requires or [] if "extra ==" not in requirement]
            link_distributions(tuple(re.split(r"[^\w.-]", each)[0] for each in needed), folder)
    return {path.name.split(".")[0] for path in folder.iterdir()}


def make_venv(python: str, folder: Path) -> Path:
    """Make a virtual environment without any package; return its site-packages."""
    output_of(python, "-m", "venv", "--without-pip", folder, env=plain_environment(os.path.dirname(python)))
    return next(folder.glob("lib/python3.*/site-packages"))


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the project, so that building leaves nothing in the real one."""
    folder = tmp_path_factory.mktemp("repository") / "metaflow torchrun"
    folder.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, folder)
    for name in ("metaflow_extensions", "tests", "examples"):
        shutil.copytree(REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns(".*", "__pycache__"))
    (folder / ".git").mkdir()
    (folder / ".git" / "config.py").write_text("# must not travel\n")
    return folder


@pytest.fixture(scope="module")
def laptops(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Callable[[str], Place]:
    """Return a function that installs the project in one of the two ways."""

    @cache
    def install(kind: str) -> Place:
        folder = tmp_path_factory.mktemp("laptop")
        packages = make_venv(interpreters()[sys.version_info.minor], folder / "venv")
        link_distributions(LAPTOP_PACKAGES, folder / "packages")
        (packages / "packages.pth").write_text(f"{folder / 'packages'}\n")
        python = folder / "venv" / "bin" / "python"
        env = {**plain_environment(str(python.parent)), "HOME": str(folder)}
        pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--disable-pip-version-check"]
        offline = ["--no-index", "--no-deps", "--no-build-isolation"]
        output_of(*pip, *offline, *kind.split()[2:], repository, env=env, cwd=folder)
        return Place(str(python), env, folder)

    return install


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory, laptops: Callable[[str], Place]) -> Callable[[str, int], Place]:
    """Return a function that packs a flow on a laptop and unpacks it in a pod with another Python."""

    @cache
    def image(minor: int) -> Path:
        """Return the folder of a Python that has what a pod has, and a stand-in for PyTorch."""
        folder = tmp_path_factory.mktemp(f"image-3.{minor}")
        packages = make_venv(interpreters()[minor], folder)
        link_distributions(POD_PACKAGES, packages)
        (packages / "torch").symlink_to(STAND_IN / "torch")  # our code runs under Pythons without PyTorch, too
        return folder

    @cache
    def package(kind: str) -> tuple[Path, str]:
        laptop = laptops(kind)
        folder = tmp_path_factory.mktemp("flow") / "my flow"
        shutil.copytree(FLOWS, folder)
        file = folder.parent / "job"
        save = ("gang.py", "--no-pylint", "package", "save", file)
        said = laptop.run(*save, cwd=folder)
        return file, said[said.index('{"version"') :].strip()

    @cache
    def start(kind: str, minor: int) -> Place:
        file, metadata = package(kind)
        folder = tmp_path_factory.mktemp("pod")
        env = {**plain_environment(str(image(minor) / "bin")), "HOME": str(folder)}
        commands = [*unpack_commands(file, metadata), "env -0"]
        after = output_of("bash", "-c", " && ".join(commands), env=env, cwd=folder)
        variables = dict(entry.split("=", 1) for entry in after.split("\0") if "=" in entry)
        names = ("PATH", "PYTHONPATH", "METAFLOW_EXTRACTED_ROOT", "PYTHONNOUSERSITE", "LC_ALL", "HOME", "METAFLOW_USER")
        python = shutil.which("python", path=variables["PATH"])
        return Place(str(python), {name: variables[name] for name in names}, folder / "metaflow")

    return start


def unpack_commands(file: Path, metadata: str) -> Iterator[str]:
    """Yield Metaflow's own commands that unpack a code package in a pod, with a copy for the download."""
    for command in MetaflowEnvironment(None).get_package_commands("s3://bucket/key", "s3", metadata):
        if command.startswith("i=0; while"):
            yield f"cp '{file}' job.tar"
        elif command.startswith(("mkdir ", "cd ", "export ", "TAR_OPTIONS=")):
            yield command


def shipped_files() -> set[str]:
    return {str(path.relative_to(REPOSITORY)) for path in SOURCES.rglob("*") if path.suffix in (".py", ".typed")}


@pytest.mark.parametrize("kind", KINDS)
def test_the_code_package_has_all_of_ours_and_nothing_else_of_the_project(kind, pods):
    folder = pods(kind, sys.version_info.minor).folder
    code = folder / ".mf_code"
    ours = {str(path.relative_to(code)) for path in (code / "metaflow_extensions").rglob("*") if path.is_file()}
    assert ours - {"metaflow_extensions/__init__.py"} == shipped_files()  # Metaflow adds the __init__
    assert {path.name for path in code.iterdir()} == {"metaflow", "metaflow_extensions", "metaflow_torchrun"}
    own = {str(path.relative_to(folder)) for path in folder.rglob("*.py") if code not in path.parents}
    assert own == {str(path.relative_to(FLOWS)) for path in FLOWS.rglob("*.py")}


@pytest.mark.parametrize("kind", KINDS)
def test_a_pod_with_pythons_own_library_and_requests_imports_all_of_ours(kind, pods, tmp_path):
    pod = pods(kind, sys.version_info.minor)
    # Workers import their sitecustomize when they start; it hands on to the next one, which is not in this image.
    files = sorted(n for n in shipped_files() if n.endswith(".py") and not n.endswith("/sitecustomize.py"))
    modules = [name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in files]
    pod.run("-c", "from metaflow_torchrun import report")
    said = json.loads(pod.run("-c", IMPORT_ALL, *modules))
    code = pod.folder / ".mf_code"
    assert said["files"] == [str(code / name) for name in files]
    assert said["metaflow"] == str(code / "metaflow" / "__init__.py")
    allowed = link_distributions(POD_PACKAGES, tmp_path / "names") | {"metaflow", "metaflow_extensions"}
    assert set(said["foreign"]) <= allowed


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind_", "minor"),
    [*[("pip install", minor) for minor in MINORS], *[(kind, sys.version_info.minor) for kind in KINDS[1:]]],
)
def test_a_gang_runs_from_the_package_and_every_python_reads_its_results(kind_, minor, pods, run_flow):
    if minor not in interpreters():
        what = f"No Python 3.{minor} on this machine: our code was not run under it, nor were artifacts exchanged."
        (pytest.skip if minor in RARE else gap)(f"{what} Install it, or name it in PYTHONS: PATH={os.environ['PATH']}")
    pod = pods(kind_, minor)
    flow = run_flow(folder=pod.folder, python=pod.python, env=pod.env, attrs={"nproc_per_node": 2})
    workers = flow.notes("worker-*")
    assert sorted(worker["env"]["RANK"] for worker in workers) == ["0", "1", "2", "3"]
    assert {worker["file"] for worker in workers} == {str(pod.folder / "worker.py")}
    tasks = flow.note("end")["tasks"]
    assert [task["facts"]["world_size"] for task in tasks] == [4, 4]
    assert all(task["results"][0]["command"].startswith(f"{pod.python} -m ") for task in tasks)
    for reader in sorted(set(MINORS) & set(interpreters())) if kind_ == "pip install" else ():
        other = pods("pip install", reader)
        env = {**other.env, "METAFLOW_DATASTORE_SYSROOT_LOCAL": str(flow.home)}
        read = json.loads(output_of(other.python, "-c", READ_RESULTS, env=env, cwd=other.folder))
        assert read == [[RESULT, "TorchrunResult", node, 4, {str(2 * node + i): 0 for i in (0, 1)}] for node in (0, 1)]
