"""A worker that needs its peers: adds up the ranks over gloo and notes the sum and who was asked."""

import json
import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
names = ("MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
seen = {"sum": total.item(), **{name: os.environ.get(name) for name in names}}
with open(os.path.join(os.environ["OUT"], f"worker-{dist.get_rank()}.json"), "w") as file:
    json.dump(seen, file)
dist.barrier()
dist.destroy_process_group()
