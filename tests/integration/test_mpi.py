"""A gang whose ranks are started by mpirun and talk over MPI."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "from-shell"
# torchrun is that of this environment. The PyTorch of PyPI has no MPI, so the ranks need another Python with one that has.
PYTHON = os.environ.get("MPI_PYTHON", "/usr/bin/python3")
COMMAND = "python flow.py run --backend mpi --python /usr/bin/python3"
# An import of PyTorch takes seconds, and each rank imports it twice; ranks that wait compute.
END_S = 150
pytestmark = pytest.mark.timeout(2 * END_S)
HAS_MPI = "import torch.distributed, shutil; assert torch.distributed.is_mpi_available() and shutil.which('mpirun')"


def test_the_flow_runs_over_mpi_with_all_nodes_on_this_machine(start_flow, tmp_path):
    try:
        missing = subprocess.run([PYTHON, "-c", HAS_MPI], capture_output=True, check=False).returncode != 0
    except OSError:
        missing = True
    if missing:
        pytest.skip(  # also in CI: the PyTorch of PyPI has none, and that of Debian 12 neither
            f"{PYTHON} has no PyTorch with MPI, so nothing was run over MPI. On Debian 13: apt-get install python3-torch "
            "openmpi-bin; MPI_PYTHON names another Python"
        )
    folder = shutil.copytree(EXAMPLE, tmp_path / "example")
    run = start_flow(*COMMAND.replace("/usr/bin/python3", PYTHON).split()[3:], flow="flow.py", folder=folder)
    assert run.wait(END_S) == 0, run.text
    assert "4 ranks over mpi have the same weights: ok" in run.text
