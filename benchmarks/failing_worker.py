"""A worker that goes on after its first collective until somebody ends it; see `failures.py`."""

import os
import sys
import time


def work() -> None:
    """Add up a number over all ranks, leave the pid, and go on, with collectives where they are asked for."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():  # torchrunx has done it
        dist.init_process_group("gloo")
    one = torch.ones(1)
    dist.all_reduce(one)
    path = os.path.join(os.environ["BENCHMARK_FOLDER"], f"worker-{dist.get_rank()}")
    with open(f"{path}.part", "w", encoding="ascii") as file:
        file.write(str(os.getpid()))
    os.replace(file.name, path)
    while True:
        time.sleep(0.01)
        if os.environ["BENCHMARK_KIND"] == "talks":
            dist.all_reduce(one)


def work_by_torchrunx(workers: int) -> None:
    """Have torchrunx start the workers, on two hosts that are this machine."""
    import failing_worker  # its agents import the function by the module's name
    import torchrunx

    hosts = ["localhost", "127.0.0.1"]
    torchrunx.Launcher(hostnames=hosts, workers_per_host=workers, backend="gloo").run(failing_worker.work)


if __name__ == "__main__":
    work_by_torchrunx(int(sys.argv[1])) if sys.argv[1:] else work()
