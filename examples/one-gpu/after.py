"""Trains a small classifier on many GPUs, or on the CPU where there are none."""

import argparse
import gc
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make_data() -> TensorDataset:
    """Return random points, each with a label: which half of its coordinates is larger."""
    points = torch.randn(4096, 8, generator=torch.Generator().manual_seed(0))
    labels = (points[:, :4].norm(dim=1) > points[:, 4:].norm(dim=1)).long()
    return TensorDataset(points, labels)


def make_model() -> nn.Module:
    hidden = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), hidden, nn.Linear(64, 2))


def pick_device() -> torch.device:
    """Return one GPU per process where this node has enough of them, else the CPU."""
    if torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]):
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64, help="of all ranks together")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    device = pick_device()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    data = make_data()
    sampler = DistributedSampler(data, shuffle=True, seed=args.seed)
    loader = DataLoader(data, batch_size=args.batch_size // ranks, sampler=sampler)
    model = DistributedDataParallel(make_model().to(device))
    torch.manual_seed(args.seed + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros((), device=device)
        for points, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(points.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: loss {total.item() / len(loader) / ranks:.4f}")
    if rank == 0:
        torch.save(model.module.state_dict(), "model.pt")
    del model  # its threads must not outlive the process group
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
