"""A gang whose ranks are started by mpirun and talk over MPI, on hosts with networks of their own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hosts import connect

EXAMPLE = Path(__file__).parents[2] / "examples" / "from-shell"
# torchrun is that of this environment. The PyTorch of PyPI has no MPI, so the ranks need another Python with one that has.
PYTHON = os.environ.get("MPI_PYTHON", "/usr/bin/python3")
COMMAND = "python flow.py run --backend mpi --python /usr/bin/python3"
# An import of PyTorch takes seconds, and each rank imports it twice; ranks that wait compute.
END_S = 150
pytestmark = pytest.mark.timeout(2 * END_S)
HAS_MPI = "import torch.distributed, shutil; assert torch.distributed.is_mpi_available() and shutil.which('mpirun')"


@pytest.fixture(scope="module", autouse=True)
def _has_mpi() -> None:
    try:
        asked = subprocess.run([PYTHON, "-c", HAS_MPI], capture_output=True, check=False)
        missing = asked.returncode != 0
    except OSError:
        missing = True
    if missing:
        pytest.skip(  # also in CI: the PyTorch of PyPI has none, and that of Debian 12 neither
            f"{PYTHON} has no PyTorch with MPI, so nothing was run over MPI. On Debian 13: apt-get install python3-torch "
            "openmpi-bin; MPI_PYTHON names another Python"
        )


@pytest.mark.slow
@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_ranks_on_two_hosts_train_over_mpi(make_gang, make_host, ranks_per_node):
    hosts = make_host("host-a"), make_host("host-b")
    connect(*hosts, "eth0", ("10.77.0.1/24", "10.77.0.2/24"))
    gang = make_gang(hosts)
    words = ["--backend", "mpi", "--ranks", str(2 * ranks_per_node), "--output", str(gang.out / "found.json")]
    script = [str(EXAMPLE / "mpirun.py"), str(ranks_per_node), str(EXAMPLE / "train.py"), *words]
    gang.start(entrypoint=[PYTHON, *script])
    gang.end_well()
    found = json.loads((gang.out / "found.json").read_text())
    assert (found["ranks"], found["same"]) == (2 * ranks_per_node, True)


@pytest.mark.slow
def test_the_flow_runs_over_mpi_with_all_nodes_on_this_machine(start_flow, tmp_path):
    folder = shutil.copytree(EXAMPLE, tmp_path / "example")
    run = start_flow(*COMMAND.replace("/usr/bin/python3", PYTHON).split()[3:], flow="flow.py", folder=folder)
    assert run.wait(END_S) == 0, run.text
    assert "4 ranks over mpi have the same weights: ok" in run.text
