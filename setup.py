"""Packaging of metaflow-torchrun."""

import re
from pathlib import Path

from setuptools import find_namespace_packages, setup

HERE = Path(__file__).parent

TOPLEVEL = HERE / "metaflow_extensions" / "torchrun" / "toplevel" / "toplevel.py"
VERSION = re.search(r'^__version__ = "(.+)"$', TOPLEVEL.read_text(encoding="utf-8"), re.MULTILINE)[1]

# torch is the user's choice of version and build, so it is no requirement of the package itself.
EXAMPLES = ["torch>=2.1", "numpy"]
# setuptools: a test installs this package in the ways that users do, without an index.
# py-spy: where it is installed, the diagnostics of a hang are collected with it.
# cloudpickle, ipykernel, nbclient: functions without a name to go by are launched, and functions from a notebook.
# tensorboard: its event files are read where it is installed.
# mypy: a test reads what it makes of a sample.
# metaflow-checkpoint: a gang goes on from the checkpoints that it keeps.
FUNCTIONS = ["cloudpickle", "ipykernel", "nbclient", "mypy"]
TEST = [
    *EXAMPLES,
    *FUNCTIONS,
    "pytest>=8",
    "pytest-timeout",
    "pytest-xdist",
    "hypothesis",
    "metaflow-checkpoint",
    "psutil",
    "py-spy",
    "setuptools>=70.1",
    "tensorboard",
]
# The clients of the backends that tests/remote talk to.
REMOTE = ["kubernetes", "boto3", "azure-identity", "azure-storage-blob", "google-cloud-storage", "google-auth"]
DEV = [*TEST, "ruff"]
# An S3 of this machine that counts its requests.
BENCH = [*TEST, "boto3", "moto[s3,server]"]

setup(
    name="metaflow-torchrun",
    version=VERSION,
    description="Run PyTorch on many machines from a Metaflow step: torchrun on every node, supervised as one gang",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_namespace_packages(include=["metaflow_extensions", "metaflow_extensions.*"]),
    package_data={"metaflow_extensions.torchrun": ["py.typed"]},
    python_requires=">=3.10",
    install_requires=["metaflow>=2.13"],
    extras_require={"examples": EXAMPLES, "test": TEST, "dev": DEV, "remote": [*TEST, *REMOTE], "bench": BENCH},
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
