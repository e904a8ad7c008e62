"""Packaging of metaflow-torchrun."""

import re
from pathlib import Path

from setuptools import find_namespace_packages, setup

HERE = Path(__file__).parent

PLUGIN = "metaflow_extensions/torchrun/plugins/torchrun"
TOPLEVEL = HERE / "metaflow_extensions" / "torchrun" / "toplevel" / "toplevel.py"
VERSION = re.search(r'^__version__ = "(.+)"$', TOPLEVEL.read_text(encoding="utf-8"), re.MULTILINE)[1]

# The clients that Metaflow (2.19) needs there and does not bring itself. A task installs those of its datastore when it
# starts, so an image has them with METAFLOW_SKIP_INSTALL_DEPENDENCIES only; a test compares the lists
# with Metaflow's (`_get_install_dependencies_cmd` in metaflow/metaflow_environment.py).
# python-dateutil: kubernetes 37.0.2 wants 3 or newer, but botocore (1.44), which Metaflow itself brings, an older one. Left
# to find that out, pip downloads one boto3 after another for minutes, since it tries older ones of these first.
KUBERNETES = ["kubernetes", "python-dateutil<3"]
BACKENDS = {
    "kubernetes": KUBERNETES,
    "aws": ["boto3"],
    "azure": ["azure-identity", "azure-storage-blob", "azure-keyvault-secrets", "simple-azure-blob-downloader"],
    "gcp": [
        *("google-cloud-storage", "google-auth", "google-cloud-secret-manager"),
        *("simple-gcp-object-downloader", "packaging"),
    ],
}
# Used where it is installed, for functions without a name to go by.
FUNCTIONS = ["cloudpickle"]
# torch is the user's choice of version and build, so it is no requirement of the package itself.
# The oldest with which the tests of `make test-matrix` have passed: they and the examples meet over gloo, on CPUs, and
# before 2.8 gloo may hang at the end of a process group. NCCL, on GPUs, has no part in that: tests/WHERE.md.
EXAMPLES = ["torch>=2.8", "numpy"]
# build, setuptools: a test builds this package and installs it in the ways that users do, without an index.
# ipykernel, nbclient: functions from a notebook.
# debugpy: ipykernel brings it; an editor attaches to a worker by it.
# mypy: a test reads what it makes of a sample.
# metaflow-checkpoint: a gang goes on from the checkpoints that it keeps.
TEST = [
    *EXAMPLES,
    *FUNCTIONS,
    "pytest>=8",
    "pytest-rerunfailures",
    "pytest-timeout",
    "pytest-xdist",
    "hypothesis",
    "metaflow-checkpoint",
    "psutil",
    "build",
    "setuptools>=77",
    "debugpy",
    "ipykernel",
    "nbclient",
    "mypy",
]
# What the scripts in examples/frameworks train with; wandb: docs/frameworks.md shows it.
FRAMEWORKS = [*EXAMPLES, "wandb", "transformers", "accelerate", "lightning", "deepspeed"]
# The clients of the backends that tests/remote talk to; it has no secrets.
REMOTE = [*KUBERNETES, "boto3", "azure-identity", "azure-storage-blob", "google-cloud-storage", "google-auth"]
# The site of the pages; newer than mkdocs 1 is another program.
DOCS = ["mkdocs>=1.6,<2", "mkdocs-material>=9.7"]
DEV = [*TEST, *DOCS, "ruff"]


def page_without_links_to_files() -> str:
    """Return the README for a package index, which has none of the files that it links to."""
    page = (HERE / "README.md").read_text(encoding="utf-8")
    page = re.sub(r"^!\[[^]]*\]\((?!https?:)[^)]*\)\n", "", page, flags=re.MULTILINE)  # an image has a line of its own
    page = re.sub(r"<picture>.*?</picture>\n*", "", page, flags=re.DOTALL)
    return re.sub(r"\[([^]]*)\]\((?!https?:)[^)]*\)", r"\1", page)


setup(
    name="metaflow-torchrun",
    version=VERSION,
    description="Run PyTorch on many machines from a Metaflow step: torchrun on every node, supervised as one gang",
    long_description=page_without_links_to_files(),
    long_description_content_type="text/markdown",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["metaflow", "pytorch", "torchrun", "distributed training", "kubernetes", "aws batch"],
    project_urls={"Metaflow": "https://metaflow.org"},
    packages=[*find_namespace_packages(include=["metaflow_extensions", "metaflow_extensions.*"]), "metaflow_torchrun"],
    # Tasks get it from there, see `supervisor.command`. The wheel has it a second time, for scripts that run elsewhere.
    package_dir={"metaflow_torchrun": f"{PLUGIN}/worker/importable/metaflow_torchrun"},
    package_data={"metaflow_extensions.torchrun": ["py.typed"], "metaflow_torchrun": ["py.typed"]},
    python_requires=">=3.10",
    install_requires=["metaflow>=2.13"],
    extras_require={
        **BACKENDS,
        "functions": FUNCTIONS,
        "examples": EXAMPLES,
        "frameworks": FRAMEWORKS,
        "test": TEST,
        "docs": DOCS,
        "dev": DEV,
        "remote": [*TEST, *REMOTE],
    },
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Programming Language :: Python :: 3.14",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
)
