"""Fit a line to points on all machines, with the given backend. Start it by hand, by a launcher or by a flow.

Who it is, it takes from the environment, as torchrun and older launchers set it: RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR and MASTER_PORT. With MPI, mpirun says it in its own way.
"""

import argparse
import json
import os
import socket
from pathlib import Path

import torch
import torch.distributed as dist

SLOPE, OFFSET = 3.0, -1.0


def pick_device(backend: str) -> torch.device:
    """Return a GPU for this process with nccl, otherwise the CPU."""
    if backend != "nccl":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def average(tensor: torch.Tensor) -> torch.Tensor:
    """Return the mean over all ranks."""
    dist.all_reduce(tensor)
    return tensor / dist.get_world_size()


def fit(steps: int, device: torch.device) -> tuple[torch.Tensor, float]:
    """Return the weights, equal on all ranks, and the last loss; each rank has its own points."""
    torch.manual_seed(dist.get_rank())
    x = torch.rand(256, device=device)
    y = SLOPE * x + OFFSET
    weights = torch.zeros(2, device=device)
    loss = torch.zeros(1, device=device)
    for _ in range(steps):
        error = weights[0] * x + weights[1] - y
        gradient = torch.stack([(error * x).mean(), error.mean()])
        weights -= average(gradient)
        loss = average((error**2).mean().reshape(1))
    return weights, float(loss.item())


def are_the_same(weights: torch.Tensor) -> bool:
    """Return whether all ranks have the same weights."""
    least, most = weights.clone(), weights.clone()
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return torch.equal(least, most)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=["gloo", "nccl", "mpi"], default="gloo")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--ranks", type=int, help="fail unless there are so many")
    parser.add_argument("--output", type=Path, help="rank 0 writes what it has found here, as JSON")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    device = pick_device(args.backend)
    dist.init_process_group(args.backend)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    print(f"rank {rank} of {ranks} on {socket.gethostname()}, {args.backend}, {device}", flush=True)
    if args.ranks not in (None, ranks):
        raise RuntimeError(f"{args.ranks} ranks were asked for, but {args.backend} made a group of {ranks}")
    weights, loss = fit(args.steps, device)
    same = are_the_same(weights)
    if rank == 0 and args.output:
        found = {"slope": weights[0].item(), "offset": weights[1].item(), "loss": loss, "ranks": ranks, "same": same}
        args.output.write_text(json.dumps(found))
    dist.barrier()  # With MPI (torch 2.6), to destroy the group right after a collective can deadlock.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
