"""A worker that goes on after its first collective until somebody ends it; see `failures.py`."""

import os
import time


def work() -> None:
    """Add up a number over all ranks, leave the pid, and go on, with collectives where they are asked for."""
    import torch
    import torch.distributed as dist

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


if __name__ == "__main__":
    work()
