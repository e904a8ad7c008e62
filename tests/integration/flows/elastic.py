"""A script for torchrun's own elasticity: the first generation ends when a node is gone, the next ends well."""

import json
import os
import time

import torch
import torch.distributed as dist

out, restarts = os.environ["GANG_OUT"], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group("gloo")
seen = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_MAX_RESTARTS")}
with open(os.path.join(out, f"part-{os.getpid()}"), "w") as file:
    json.dump({**seen, "restarts": restarts}, file)
os.replace(os.path.join(out, f"part-{os.getpid()}"), os.path.join(out, f"elastic-{restarts}-{dist.get_rank()}.json"))
while dist.get_world_size() > 1:
    dist.all_reduce(torch.ones(1))
    time.sleep(0.1)
print("alone, and done", flush=True)
dist.destroy_process_group()
