"""A worker on a GPU: notes where it is and what an all-reduce gives, and then does as its argument says.

``again`` fails the first time; ``hang`` has the last rank stay away from a collective; ``full`` asks for more memory
than any GPU has; ``first`` takes the first GPU that it sees, whatever its local rank.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from notes import note

WHAT = sys.argv[1] if len(sys.argv) > 1 else ""
RANK, WORLD, LOCAL_RANK = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
LAUNCH, RESTART = os.environ["TORCHELASTIC_RUN_ID"].split("-")[0], os.environ["TORCHELASTIC_RESTART_COUNT"]


def load_batch() -> None:
    while True:
        time.sleep(0.1)


def train_step(tensor: torch.Tensor) -> None:
    dist.all_reduce(tensor)
    torch.cuda.synchronize()


def main() -> None:
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0 if WHAT == "first" else LOCAL_RANK) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    if WHAT == "full":
        torch.empty(1 << 50, dtype=torch.uint8, device=device)
    dist.init_process_group("nccl" if has_gpu else "gloo")
    total = torch.ones(1, device=device) * RANK
    dist.all_reduce(total)
    seen = {
        "rank": RANK,
        "node": int(os.environ["GROUP_RANK"]),
        "backend": dist.get_backend(),
        "device": str(torch.cuda.get_device_properties(device).uuid) if has_gpu else "cpu",
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "sum": total.item(),
    }
    note(f"{LAUNCH}-{RESTART}-{RANK}", seen)
    if WHAT == "again" and RESTART == "0" and RANK == WORLD - 1:
        raise RuntimeError("only the first time")
    if WHAT == "hang":
        print("ready", flush=True)
        load_batch() if RANK == WORLD - 1 else train_step(total)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
