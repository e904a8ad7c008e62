"""Loads data in processes of torch's, and compiles."""

import sys

import torch
from note import note
from torch.utils.data import DataLoader, Dataset, get_worker_info


class Numbers(Dataset):
    """A data set of the program's own, which tells who has loaded an item."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, int]:
        info = get_worker_info()
        return torch.full((2,), index), info.id, torch.get_num_threads()


def loaded() -> list[list[float]]:
    """What comes of workers; `processes` starts some in each other way, too."""
    loader = DataLoader(Numbers(), batch_size=2, num_workers=2)
    return [[*batch.flatten().tolist(), *who.tolist(), *threads.tolist()] for batch, who, threads in loader]


def seeds_of_workers() -> dict[str, object]:
    """The seeds that torch gives to a loader's workers."""
    loader = DataLoader(range(2), num_workers=2, collate_fn=lambda _: torch.initial_seed())
    return {f"seed of loader {number}": seed for number, seed in enumerate(loader)}


def wave(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.sin() + 1).relu().sum()


def compiled() -> list[float]:
    tensor = torch.linspace(0, 1, 16, requires_grad=True)
    total = torch.compile(wave, backend="eager")(tensor)
    total.backward()
    return [total.item(), tensor.grad.sum().item()]


def main() -> None:
    random = seeds_of_workers()
    same = {
        "loaded": loaded(),
        "compiled": compiled(),
        "main": sys.modules["__main__"].__file__,
    }
    note("loaders", same=same, random=random)


if __name__ == "__main__":
    main()
