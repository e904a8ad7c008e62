"""Rank 1 waits for data that never comes, so rank 0 waits in a collective. Nothing is printed."""

import os
import time

import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])


def load_batch() -> None:
    while True:
        time.sleep(0.1)


def train_step() -> None:
    dist.all_reduce(torch.ones(1))


dist.init_process_group("gloo")
if rank == 1:
    load_batch()
train_step()
