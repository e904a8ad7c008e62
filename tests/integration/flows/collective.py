"""Rank 3 fails while the others wait for it in a collective."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 3:
    time.sleep(1)
    raise ValueError("bad loss: *0*  *1 🙂")
dist.all_reduce(torch.ones(1))
