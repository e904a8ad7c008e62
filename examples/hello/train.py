"""Every rank prints its place in the job. Then all ranks add one number each and check the sum."""

import argparse
import json
import os
import socket
from pathlib import Path

import torch
import torch.distributed as dist


def pick_device() -> torch.device:
    """Return one GPU per process where this node has enough of them, else the CPU."""
    if torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]):
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def who_am_i(device: torch.device) -> dict[str, object]:
    """Return this process's place in the job, from torchrun's variables."""
    return {
        "rank": dist.get_rank(),
        "local_rank": int(os.environ["LOCAL_RANK"]),
        "node": int(os.environ["GROUP_RANK"]),
        "host": socket.gethostname(),
        "world_size": dist.get_world_size(),
        "backend": dist.get_backend(),
        "device": str(device),
    }


def sum_over_ranks(device: torch.device) -> int:
    """Add r + 1 for rank r, so that a missing rank always changes the sum."""
    number = torch.tensor([dist.get_rank() + 1], dtype=torch.int64, device=device)
    dist.all_reduce(number, op=dist.ReduceOp.SUM)
    return int(number.item())


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output-dir", type=Path, help="write rank-<rank>.json here (default: write nothing)")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    device = pick_device()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    facts = who_am_i(device)
    print("hello from rank {rank} of {world_size}: local rank {local_rank} on node {node}, {host}".format(**facts))

    facts["sum"] = sum_over_ranks(device)
    facts["expected_sum"] = dist.get_world_size() * (dist.get_world_size() + 1) // 2
    if facts["sum"] != facts["expected_sum"]:
        raise RuntimeError(f"all_reduce gave {facts['sum']}, expected {facts['expected_sum']}")
    print(f"all_reduce gave {facts['sum']}, as expected")

    if args.output_dir:
        args.output_dir.mkdir(parents=True, exist_ok=True)
        (args.output_dir / f"rank-{facts['rank']}.json").write_text(json.dumps(facts))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
