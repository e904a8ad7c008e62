"""Starts a script by mpirun on all nodes of a torchrun job, without ssh between them.

    torchrun ... --nproc-per-node=1 mpirun.py RANKS_PER_NODE SCRIPT [ARGUMENTS]

mpirun runs on the first node, and calls ssh to start a daemon on every node. Here it calls a shell script instead, which
writes the command to a folder. This program then sends the command to its node through torchrun's store. For Open MPI.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from torch.distributed import PrefixStore, Store, TCPStore, init_process_group, is_mpi_available

# It has the arguments of ssh: the first one is the host, the others are the command line.
AGENT = """#!/bin/sh
host=$1; shift
printf '%s' "$*" > "{folder}/$host.part"
mv "{folder}/$host.part" "{folder}/$host"
"""


def host(node: int) -> str:
    """Return a name for a node that mpirun does not take for its own machine."""
    return f"node-{node}.gang"


def mpirun(folder: str, nodes: int, ranks_per_node: int, words: list[str]) -> list[str]:
    hosts = ",".join(f"{host(node)}:{ranks_per_node}" for node in range(nodes))
    agent = Path(folder) / "agent.sh"
    agent.write_text(AGENT.format(folder=folder))
    agent.chmod(0o700)
    options = ["--host", hosts, "-np", str(nodes * ranks_per_node), "--prtemca", "plm_ssh_agent", str(agent)]
    options += ["--mca", "mpi_yield_when_idle", "1"]  # waiting ranks leave the CPU to other processes
    interface = os.environ.get("GLOO_SOCKET_IFNAME")  # the interface to the other nodes, which the launcher set
    if interface:
        options += ["--mca", "btl_tcp_if_include", interface]
    if interface == "lo":  # all nodes are on this machine: Open MPI 5.0.7 confuses their ranks and shared memory
        options += ["--mca", "coll", "^han", "--mca", "btl", "self,tcp"]
    if os.geteuid() == 0:
        options.append("--allow-run-as-root")
    return ["mpirun", "--leave-session-attached", *options, sys.executable, "-u", *words]


def run_on_all(store: Store, nodes: int, ranks_per_node: int, words: list[str]) -> int:
    """Run mpirun to its end, start its daemon here, and send the other nodes their commands; return its exit code."""
    with tempfile.TemporaryDirectory() as folder:
        running = subprocess.Popen(mpirun(folder, nodes, ranks_per_node, words))
        waiting = set(range(nodes))
        while running.poll() is None:
            for node in [node for node in waiting if (Path(folder) / host(node)).exists()]:
                command = (Path(folder) / host(node)).read_text()
                if node == 0:
                    subprocess.Popen(["sh", "-c", command])
                else:
                    store.set(host(node), command)
                waiting.remove(node)
            time.sleep(0.05)
    for node in waiting:  # mpirun failed before it reached them
        store.set(host(node), f"exit {running.returncode}")
    return running.returncode


def torchruns_store() -> Store:
    """Connect to torchrun's store without libuv, which Debian's PyTorch lacks."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, is_master=False, use_libuv=False)
    return PrefixStore(f"mpirun/{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)


def main() -> None:
    ranks_per_node, words = int(sys.argv[1]), sys.argv[2:]
    if not is_mpi_available():
        init_process_group("mpi")  # raises PyTorch's own error
    node, nodes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = torchruns_store()
    if node == 0:
        sys.exit(run_on_all(store, nodes, ranks_per_node, words))
    store.wait([host(node)])
    sys.exit(subprocess.call(["sh", "-c", store.get(host(node)).decode()]))


if __name__ == "__main__":
    main()
