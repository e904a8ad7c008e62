"""A worker, as a script and as a function, that tells when its first collective is done.

All processes of a machine share the monotonic clock (CLOCK_MONOTONIC of Linux).
"""

import os
import sys
import time


def note(name: str) -> None:
    """Leave the time for the benchmark."""
    path = os.path.join(os.environ["BENCHMARK_FOLDER"], name)
    with open(f"{path}.part", "w", encoding="ascii") as file:
        file.write(repr(time.monotonic()))
    os.replace(file.name, path)


def first_collective(backend: str = "gloo", fails_after_s: str = "") -> None:
    """Add up a number over all ranks and tell when that is done; the last rank may fail so much later, once."""
    import torch
    import torch.distributed as dist

    where = ["BENCHMARK_LAUNCH", "TORCHELASTIC_RESTART_COUNT", "RANK"]
    launch, restarts, rank = (os.environ.get(name, "0") for name in where)
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend)
    total = torch.ones(1, device="cuda" if backend == "nccl" else "cpu")
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size()  # a device is waited for here
    note(f"collective-{launch}-{restarts}-{rank}")
    if fails_after_s and restarts == "0":
        if int(rank) < dist.get_world_size() - 1:
            time.sleep(600)  # until it is stopped
        time.sleep(float(fails_after_s))
        note(f"failed-{launch}")
        raise RuntimeError("told to fail here")
    dist.destroy_process_group()


if __name__ == "__main__":
    first_collective(*sys.argv[1:])
