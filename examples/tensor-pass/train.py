"""A tensor goes once around all ranks. Each rank writes its own entry, and rank 0 checks the result."""

import argparse
import json
import os
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


def stamp(rank: int) -> int:
    """Return what a rank writes: not the rank itself, so that a missing or misplaced entry is visible."""
    return 100 + rank


def pass_on(tensor: torch.Tensor, rank: int, world_size: int) -> None:
    tensor[rank] = stamp(rank)
    receiver = (rank + 1) % world_size
    print(f"rank {rank} -> rank {receiver}: {tensor.tolist()}")
    dist.send(tensor, dst=receiver)


def go_round(device: torch.device) -> list[int]:
    """Pass the tensor around. Rank 0 sends first and receives last; the others receive before they send."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tensor = torch.zeros(world_size, dtype=torch.int64, device=device)
    sender = (rank - 1) % world_size
    if rank == 0:
        pass_on(tensor, rank, world_size)
        dist.recv(tensor, src=sender)
    else:
        dist.recv(tensor, src=sender)
        pass_on(tensor, rank, world_size)
    return [int(entry) for entry in tensor.tolist()]


def check(received: list[int], output_dir: Path | None) -> None:
    expected = [stamp(rank) for rank in range(len(received))]
    if received != expected:
        raise RuntimeError(f"rank 0 got {received} back, expected {expected}")
    print(f"rank 0 got {received} back: every rank had its turn")
    if output_dir:
        output_dir.mkdir(parents=True, exist_ok=True)
        report = {"received": received, "expected": expected, "backend": dist.get_backend()}
        (output_dir / "ring.json").write_text(json.dumps(report))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output-dir", type=Path, help="rank 0 writes ring.json here (default: write nothing)")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if int(os.environ["WORLD_SIZE"]) < 2:
        raise SystemExit("a ring needs at least two ranks: raise --nproc-per-node or the number of nodes")
    device = pick_device()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    received = go_round(device)
    if dist.get_rank() == 0:
        check(received, args.output_dir)
    # No rank may end while the next rank still receives from it.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
