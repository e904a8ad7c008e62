"""A worker that tells when it has passed its first barrier, and then waits for its end; see `lost_nodes.py`."""

import os
import time

from collective_worker import note


def work() -> None:
    """Pass a barrier with all ranks, and wait for a file."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.barrier()
    note(f"rank-{dist.get_rank()}-on-{os.environ['MF_PARALLEL_NODE_INDEX']}")
    note(f"barrier-{dist.get_rank()}")
    while not os.path.exists(os.path.join(os.environ["BENCHMARK_FOLDER"], "end")):
        time.sleep(0.01)
    dist.destroy_process_group()


if __name__ == "__main__":
    work()
