"""Ranks that add up, over and over; halfway rank 3 waits for data, until there is the file ``enough``."""

import os
import time

import torch
import torch.distributed as dist

OUT = os.environ["GANG_OUT"]
STEPS = 300
dist.init_process_group("gloo")


def load_batch(step):
    while step == STEPS // 2 and dist.get_rank() == 3 and not os.path.exists(f"{OUT}/enough"):
        open(f"{OUT}/waits", "a").close()
        time.sleep(0.1)
    return torch.randn(8, 64)


for step in range(STEPS):
    dist.all_reduce(load_batch(step))
    if step < STEPS // 2:
        time.sleep(0.02)  # so that it is asked while it computes
dist.destroy_process_group()
