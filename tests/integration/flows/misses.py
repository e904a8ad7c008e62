"""Ranks that miss collectives: in each case some wait until a file is there, so that others wait for them."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])


def step(size: int = 1024, group: dist.ProcessGroup | None = None) -> None:
    dist.all_reduce(torch.ones(size), group=group)


def held(case: str, pause_s: float = 0.05) -> None:
    while not (folder / case).exists():
        time.sleep(pause_s) if pause_s else None


dist.init_process_group("gloo")
pairs = [dist.new_group([at, at + 2], group_desc="dp") for at in range(2)]
step()
if rank == 1:
    held("skips")
step()
if rank == 2:
    held("subgroup")
step(77, pairs[rank % 2])
if rank == 3:
    held("loops", pause_s=0.0)
step()
if rank == 2:
    os.kill(os.getpid(), signal.SIGSTOP)
step()
if rank == 1:
    dist.broadcast(torch.ones(1024), 1)
step(16)
