"""Starts workers as torchrun does, with its options, its variables and its folders, and without its import of PyTorch.

That import takes 1.6 s of a core in each agent. What torchrun does beyond this (rendezvous, exit barrier, most of what it
says) is not here, so tests that depend on it have the real one.
"""

import argparse
import os
import signal
import string
import subprocess
import sys
import time

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

_KILL_S = 30.0  # torchrun's own patience with workers that it stops
_LOOK_S = 0.05
# So long a worker that has failed can be seen by others. torchrun is there within 0.1 s.
_LEAVE_S = 0.3
_stopped_by: list[int] = []


def start_worker(options, words, local_rank):
    """Start a worker in a session of its own, with its output where the logs' specification says."""
    nproc, node = int(options.nproc_per_node), int(options.node_rank)
    host, _, port = options.rdzv_endpoint.rpartition(":")
    ranks = {"RANK": node * nproc + local_rank, "LOCAL_RANK": local_rank, "GROUP_RANK": node}
    sizes = {"WORLD_SIZE": nproc * int(options.nnodes), "LOCAL_WORLD_SIZE": nproc, "GROUP_WORLD_SIZE": options.nnodes}
    elastic = {"RUN_ID": options.rdzv_id, "RESTART_COUNT": 0, "MAX_RESTARTS": 0}
    env = {"MASTER_ADDR": host, "MASTER_PORT": port, **ranks, **sizes}
    env.update({f"TORCHELASTIC_{name}": value for name, value in elastic.items()})
    logs = DefaultLogsSpecs(options.log_dir).reify({local_rank: env})
    env["TORCHELASTIC_ERROR_FILE"] = logs.error_files[local_rank]
    command = [string.Template(word).safe_substitute(local_rank=local_rank) for word in words]
    with open(logs.stdouts[local_rank], "wb", 0) as out, open(logs.stderrs[local_rank], "wb", 0) as err:
        return SubprocessHandler(command, {**os.environ, **{name: str(value) for name, value in env.items()}}, out, err)


def stop(handlers):
    """End the workers that still run, and wait for them."""
    deadline = time.monotonic() + _KILL_S
    for handler in handlers:
        if handler.proc.poll() is None:
            handler.close()
    for handler in handlers:
        try:
            handler.proc.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            handler.close(signal.SIGKILL)
            handler.proc.wait()


def has_failed(worker):
    """Tell whether a worker has failed, without taking its exit code from those who watch it."""
    end = os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    return end is not None and end.si_status != 0


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("nnodes", "node-rank", "nproc-per-node", "rdzv-endpoint", "rdzv-id", "log-dir"):
        parser.add_argument("--" + name, required=True)
    parser.add_argument("--no-python", action="store_true")
    parser.add_argument("--module", action="store_true")
    own, words = sys.argv[1 : sys.argv.index("--")], sys.argv[sys.argv.index("--") + 1 :]
    options, _ = parser.parse_known_args(own)
    signal.signal(signal.SIGTERM, lambda number, _: _stopped_by.append(number))
    python = [sys.executable, "-u", *(["-m"] if options.module else [])]
    command = words if options.no_python else [*python, *words]
    handlers = [start_worker(options, command, local_rank) for local_rank in range(int(options.nproc_per_node))]
    workers = [handler.proc for handler in handlers]
    codes = [None]
    while None in codes and not any(codes) and not _stopped_by:
        time.sleep(_LOOK_S)
        if any(has_failed(worker) for worker in workers if worker.returncode is None):
            time.sleep(_LEAVE_S)
        codes = [worker.poll() for worker in workers]
    stop(handlers)
    if any(codes) or _stopped_by:
        sys.exit(1)  # not returned: a spare agent calls this function, as torchrun's, which raises then


if __name__ == "__main__":
    main()
