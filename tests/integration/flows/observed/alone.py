"""Trains without a process group, as each rank of a script does that forgets it."""


def train():
    import torch

    model = torch.nn.Linear(2, 1)
    model(torch.ones(1, 2)).sum().backward()


if __name__ == "__main__":
    train()
