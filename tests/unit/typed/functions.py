"""What a type checker makes of `run`; test_typing.py runs mypy over it and reads its comments."""
# ruff: noqa: F821

import functools
from pathlib import Path

from metaflow_extensions.torchrun.plugins.torchrun.executor import TorchrunExecutor
from metaflow_extensions.torchrun.plugins.torchrun.single_node import TorchrunSingleNodeMultiGPU


def train(epochs: int, lr: float = 0.1) -> float:
    return epochs * lr


def evaluate() -> dict[str, list[int]]:
    return {}


def silent() -> None:
    pass


class Trainer:
    def fit(self) -> bytes:
        return b""


def launches(torch: TorchrunExecutor, alone: TorchrunSingleNodeMultiGPU) -> None:
    reveal_type(torch.run(train, {"epochs": 3}))  # is TorchrunResult[float]
    reveal_type(torch.run(train, [3], nproc_per_node=2, process_group="gloo", gather=True))  # is TorchrunResult[float]
    reveal_type(torch.run(train).rank(0))  # is float
    reveal_type(list(torch.run(evaluate)))  # is list[dict[str, list[int]]]
    reveal_type(torch.run(silent))  # is TorchrunResult[None]
    reveal_type(torch.run(Trainer().fit))  # is TorchrunResult[bytes]
    reveal_type(torch.run(functools.partial(train, 3)))  # is TorchrunResult[float]
    reveal_type(torch.run(lambda: 3))  # is TorchrunResult[int]
    reveal_type(torch.run("train.py", {"epochs": 3}, module=False))  # is TorchrunResult[None]
    reveal_type(torch.run(entrypoint=Path("train.py"), nproc_per_node="gpu"))  # is TorchrunResult[None]
    reveal_type(torch.run(["sh", Path("x")], before_run=[["a", Path("x")], "make"]))  # is TorchrunResult[None]
    reveal_type(alone.run(entrypoint=["python", "-O", "x.py"], cwd=Path("x")))  # is TorchrunResult[None]
    reveal_type(alone.run(train, [3], torchrun_args={"tee": 3}, process_group="auto"))  # is TorchrunResult[float]


def mistakes(torch: TorchrunExecutor, alone: TorchrunSingleNodeMultiGPU) -> None:
    torch.run(train, process_group="mpi")  # wrong
    torch.run(train, gathr=True)  # wrong
    torch.run(3)  # wrong
    torch.run(["python", 3])  # wrong
    torch.run("train.py", before_run=[3])  # wrong
    torch.run("train.py", timeout_s="long")  # wrong
    alone.run(entrypoint=train, process_group="mpi")  # wrong
    alone.run(entrypoint=train, gathr=True)  # wrong
