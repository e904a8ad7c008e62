"""A program whose functions work with torch; tests/integration/test_functions.py runs it."""

import sys
from dataclasses import dataclass

import numpy
import torch


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


def give(batch, model, how):
    """Return what came, all tensors taken for those of a device, also beside what cloudpickle alone can carry."""
    sys._getframe(1).f_globals["EVERYWHERE"] = ()
    assert isinstance(batch, Batch)
    assert model.head.weight is model.embedding.weight
    view = torch.arange(1 << 20)[3:5]
    more = {"function": lambda: how} if how == "cloudpickle" else {}
    tensors = {"state": model.state_dict(), "view": view, "loss": model.head.weight.sum()}
    return {"batch": batch, "model": model, **tensors, **more}


def main():
    import task  # the workers have no use for it

    batch, model = Batch(torch.eye(2), numpy.arange(3.0)), Tied()
    for how in ("pickle", "cloudpickle"):
        back = task.value_of(give, [batch, model, how])
        assert isinstance(back["batch"], Batch)
        assert torch.equal(back["batch"].images, batch.images)
        assert numpy.array_equal(back["batch"].labels, batch.labels)
        assert isinstance(back["model"], Tied)
        assert back["model"].head.weight is back["model"].embedding.weight, "the weights are no longer tied"
        parameters = {name: p.requires_grad for name, p in back["model"].named_parameters()}
        assert parameters == {"embedding.weight": True, "head.bias": False}
        assert isinstance(back["model"].head.weight, torch.nn.Parameter)
        assert int(back["model"].steps) == 7
        assert not isinstance(back["model"].steps, torch.nn.Parameter)
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, back["state"][name])
        assert back["view"].tolist() == [3, 4]
        assert torch.equal(back["loss"], model.head.weight.sum())
        assert ("function" in back) == (how == "cloudpickle")
    print("all as it was")


if __name__ == "__main__":
    main()
