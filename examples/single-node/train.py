"""Fit a line on all ranks. Its slope and intercept are known, so the result can be checked."""

import argparse
import gc
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

SLOPE, INTERCEPT = 3.0, -2.0


def pick_device() -> torch.device:
    """Return one GPU per process where this machine has enough of them, else the CPU."""
    if torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]):
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def noisy_points(count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return points that only this rank has: the seed is the rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.rand(count, 1, generator=generator) * 2 - 1
    y = SLOPE * x + INTERCEPT + 0.1 * torch.randn(count, 1, generator=generator)
    return x.to(device), y.to(device)


def fit(steps: int, device: torch.device) -> tuple[float, float, float]:
    """Return slope, intercept and the last loss of this rank."""
    line = torch.nn.Linear(1, 1).to(device)
    model = DistributedDataParallel(line, device_ids=[device.index] if device.type == "cuda" else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    x, y = noisy_points(256, device)
    loss = torch.zeros(())
    for number in range(1, steps + 1):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        if number % 20 == 0:
            print(f"step {number}: loss {loss.item():.4f}")
    return line.weight.item(), line.bias.item(), loss.item()


def leave_group() -> None:
    # DDP's reference cycles keep the group's gloo threads alive. A thread that still runs while Python exits aborts the
    # process ("terminate called without an active exception"). Garbage collection ends the threads here.
    gc.collect()
    dist.destroy_process_group()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output-dir", type=Path, help="every rank writes rank-<rank>.json here")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    device = pick_device()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    slope, intercept, loss = fit(args.steps, device)
    if args.output_dir:
        args.output_dir.mkdir(parents=True, exist_ok=True)
        report = {"rank": dist.get_rank(), "slope": slope, "intercept": intercept, "loss": loss}
        report |= {"true_slope": SLOPE, "true_intercept": INTERCEPT}
        (args.output_dir / f"rank-{dist.get_rank()}.json").write_text(json.dumps(report))
    leave_group()


if __name__ == "__main__":
    main()
