"""Hugging Face's Accelerate: your own training loop, on GPUs or CPUs."""

import argparse
import os

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def data() -> TensorDataset:
    """Points with a label: on which side of a line they are."""
    points = torch.randn(512, 2, generator=torch.Generator().manual_seed(0))
    return TensorDataset(points, (points @ torch.tensor([1.0, -2.0]) > 0).long())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--forget-cpu", action="store_true", help="see what becomes of that")
    args = parser.parse_args()
    # Without a GPU and without `cpu`, Accelerate makes no process group, and each rank would train by itself.
    accelerator = Accelerator(cpu=not torch.cuda.is_available() and not args.forget_cpu)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = DataLoader(data(), batch_size=16, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(3):
        right = torch.zeros((), device=accelerator.device)
        for points, sides in loader:
            guesses = model(points)
            accelerator.backward(nn.functional.cross_entropy(guesses, sides))
            optimizer.step()
            optimizer.zero_grad()
            right += (guesses.argmax(dim=1) == sides).sum()
        right = accelerator.reduce(right)
        accelerator.print(f"epoch {epoch}: {right.item() / 512:.1%} right")
    if os.environ["RANK"] == "0":
        ranks = accelerator.num_processes
        print(f"Accelerate: {ranks} of {os.environ['WORLD_SIZE']} ranks train together")
    accelerator.end_training()


if __name__ == "__main__":
    main()
