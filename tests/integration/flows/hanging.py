"""Rank 1 waits for data that never comes, so rank 0 waits in a collective."""

import os
import time

print("a sign of life before the imports, which take seconds", flush=True)
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

print("imported", flush=True)
rank = int(os.environ["RANK"])


def load_batch() -> None:
    while True:
        time.sleep(0.1)


def train_step() -> None:
    dist.all_reduce(torch.ones(1))


dist.init_process_group("gloo")
print("ready", flush=True)
if rank == 1:
    load_batch()
train_step()
