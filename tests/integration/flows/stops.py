"""Ranks that add up until they are told to stop, each at its own speed; rank 0 notes the step. ``all`` or ``rank0`` asks."""

import random
import sys
import time

import torch
import torch.distributed as dist
from metaflow_torchrun import stopping
from notes import note

dist.init_process_group("gloo")
rank, pauses = dist.get_rank(), random.Random(dist.get_rank())
for step in range(10**6):
    if (sys.argv[1] == "all" or rank == 0) and stopping():
        note(f"saved-{rank}", {"step": step})
        break
    if step == 5:
        note(f"steps-{rank}", {})
    time.sleep(pauses.random() * 0.02)
    dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
