"""A program whose functions work with torch; tests/integration/test_functions.py runs it."""

from dataclasses import dataclass

import numpy
import torch
from torch.utils.data import DataLoader, Dataset


@dataclass
class Batch:
    images: torch.Tensor
    labels: numpy.ndarray


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(4, 3)
        self.head = torch.nn.Linear(3, 4)
        self.head.weight = self.embedding.weight
        self.head.bias.requires_grad_(False)
        self.register_buffer("steps", torch.tensor(7))


class Squares(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.tensor(index**2)


def give(batch, model):
    """Return what came, and what else a function may return."""
    assert isinstance(batch, Batch)
    assert model.head.weight is model.embedding.weight
    view = torch.arange(1 << 20)[3:5]
    return {"batch": batch, "model": model, "state": model.state_dict(), "view": view, "loss": model.head.weight.sum()}


def load(method):
    """Load data by processes of a DataLoader that import this program anew."""
    return [int(x) for x in DataLoader(Squares(), batch_size=None, num_workers=1, multiprocessing_context=method)]


def main():
    import task  # the workers have no use for it

    batch, model = Batch(torch.eye(2), numpy.arange(3.0)), Tied()
    back = task.value_of(give, [batch, model])
    assert isinstance(back["batch"], Batch)
    assert torch.equal(back["batch"].images, batch.images)
    assert numpy.array_equal(back["batch"].labels, batch.labels)
    assert back["model"].head.weight is back["model"].embedding.weight, "the weights are no longer tied"
    parameters = {name: p.requires_grad for name, p in back["model"].named_parameters()}
    assert parameters == {"embedding.weight": True, "head.bias": False}
    assert int(back["model"].steps) == 7
    assert not isinstance(back["model"].steps, torch.nn.Parameter)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, back["state"][name])
    assert back["view"].tolist() == [3, 4]
    assert torch.equal(back["loss"], model.head.weight.sum())
    assert task.value_of(load, ["spawn"]) == [0, 1, 4, 9]
    print("all as it was")


if __name__ == "__main__":
    main()
