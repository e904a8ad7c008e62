"""A script for torchrun's own elasticity: the first generation ends when a node is gone, the next ends well."""

import os
import time

import torch
import torch.distributed as dist
from notes import note

restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group("gloo")
seen = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_MAX_RESTARTS")}
note(f"elastic-{restarts}-{dist.get_rank()}.json", {**seen, "restarts": restarts})
while dist.get_world_size() > 1:
    dist.all_reduce(torch.ones(1))
    time.sleep(0.1)
print("alone, and done", flush=True)
dist.destroy_process_group()
