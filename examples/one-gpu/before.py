"""Trains a small classifier on one GPU, or on the CPU where there is none."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def make_data() -> TensorDataset:
    """Return random points, each with a label: which half of its coordinates is larger."""
    points = torch.randn(4096, 8, generator=torch.Generator().manual_seed(0))
    labels = (points[:, :4].norm(dim=1) > points[:, 4:].norm(dim=1)).long()
    return TensorDataset(points, labels)


def make_model() -> nn.Module:
    hidden = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), hidden, nn.Linear(64, 2))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)
    data = make_data()
    loader = DataLoader(data, batch_size=args.batch_size, shuffle=True)
    model = make_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    for epoch in range(args.epochs):
        total = torch.zeros((), device=device)
        for points, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(points.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            total += loss.detach()
        print(f"epoch {epoch}: loss {total.item() / len(loader):.4f}")
    torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
