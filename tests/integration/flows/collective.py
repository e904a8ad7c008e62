"""The last rank fails while the others wait for it in a collective."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == dist.get_world_size() - 1:
    time.sleep(1)
    raise ValueError("bad loss: *0*  *1 🙂")
dist.all_reduce(torch.ones(1))
