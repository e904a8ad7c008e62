"""Fails on rank 3 in the first attempt; later, all ranks add up their numbers."""

import os
import sys
import time

if os.environ["ATTEMPT"] == "0":
    if os.environ["RANK"] == "3":
        sys.exit("no luck in the first attempt")
    time.sleep(300)

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank()])
dist.all_reduce(total)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: the sum is {int(total)}", flush=True)
dist.destroy_process_group()
