"""A training whose loss is written at its end. Launch 0 goes on while it is asked; in it rank 3 then waits for data."""

import gc
import os
import sys
import time

import torch
import torch.distributed as dist

OUT, NUMBER = os.environ["GANG_OUT"], sys.argv[-1]
STEPS = 300
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def load_batch(step):
    while NUMBER == "0" and step == STEPS // 2 and rank == 3 and not os.path.exists(f"{OUT}/enough"):
        open(f"{OUT}/waits", "a").close()
        time.sleep(0.1)
    return torch.randn(8, 64)


for step in range(STEPS):
    optimizer.zero_grad()
    loss = model(load_batch(step)).square().mean()
    loss.backward()
    optimizer.step()
    if NUMBER == "0" and step < STEPS // 2:
        time.sleep(0.02)  # so that it is asked while it computes
total = loss.detach()
dist.all_reduce(total)
if rank == 0:
    with open(f"{OUT}/loss-{NUMBER}", "w") as file:
        file.write(f'"{total.item().hex()}"')
del model, loss  # else gloo may abort at the end (torch 2.13, see docs/troubleshooting.md)
gc.collect()
dist.destroy_process_group()
