"""Functions of the flow file as entrypoints: several launches of different widths in one step."""

import atexit
import json
import os
import sys
import time
from dataclasses import dataclass

from metaflow import FlowSpec, TorchrunError, current, step, torchrun

OUT = os.environ.get("GANG_OUT", "")


@dataclass
class Metrics:
    rank: int
    node: int
    pid: int
    losses: list
    weights: bytes = b""


class BadBatch(ValueError):
    def __init__(self, batch):
        super().__init__(f"batch {batch} is bad")
        self.batch = batch

    def __reduce__(self):
        return type(self), (self.batch,)


def train(epochs, settings):
    rank = int(os.environ["RANK"])
    # The last rank's value is larger than any frame of the gang's channel.
    weights = bytes([rank]) * (64 << 20) if rank == settings["large"] else b""
    return Metrics(rank, int(os.environ["GROUP_RANK"]), os.getpid(), [1 / (e + 1) for e in range(epochs)], weights)


def who_is_alive(pids):
    return [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


def fail_on(rank):
    if int(os.environ["RANK"]) == rank:
        raise BadBatch(17)
    time.sleep(300)


def fail_first():
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise ConnectionError("only the first time")
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def all_reduce(model):
    """Train one step by DistributedDataParallel, which lives as long as this function."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    atexit.register(lambda: print(f"process group at the end: {dist.is_initialized()}"))
    ddp = DistributedDataParallel(model)
    ddp(torch.ones(1, 3) * dist.get_rank()).sum().backward()
    gradient = model.weight.grad.tolist()
    return {"world": dist.get_world_size(), "backend": dist.get_backend(), "gradient": gradient, "model": model}


def note(name, what):
    path = os.path.join(OUT, name)
    with open(path + ".part", "w") as file:
        json.dump(what, file)
    os.replace(path + ".part", path)


class FunctionsFlow(FlowSpec):
    @step
    def start(self):
        self.next(self.train, num_parallel=2)

    @torchrun(nproc_per_node=2)
    @step
    def train(self):
        torch = current.torch
        self.node = current.parallel.node_index
        self.trained = torch.run(train, {"epochs": 3, "settings": {"large": 3}}, gather=True)
        pids = [metrics.pid for metrics in self.trained]
        self.alive = torch.run(who_is_alive, [pids], nproc_per_node=1)
        self.failure = self.fail(torch)
        self.restarted = torch.run(fail_first, max_restarts=1, nproc_per_node=1)
        note(f"task-{self.node}", {"torch": "torch" in sys.modules})
        self.reduced = torch.run(all_reduce, {"model": self.model()}, nproc_per_node=1, init="auto", gather=True)
        self.next(self.join)

    def fail(self, torch):
        try:
            torch.run(fail_on, {"rank": 3})
        except ValueError as error:
            return {
                "class": type(error).__name__,
                "is": isinstance(error, BadBatch),
                "batch": error.batch,
                "notes": error.__notes__,
                "cause": [type(error.__cause__).__name__, error.__cause__.cause["rank"], str(error.__cause__)],
                "is ours": isinstance(error.__cause__, TorchrunError),
            }

    def model(self):
        import torch

        return torch.nn.Linear(3, 1, bias=False)

    @step
    def join(self, inputs):
        tasks = sorted(inputs, key=lambda task: task.node)
        control, member = tasks
        metrics = [control.trained.rank(rank) for rank in range(4)]
        same = [isinstance(one, Metrics) for one in metrics]
        try:
            member.trained.rank(0)
        except LookupError as error:
            missing = str(error)
        reduced = [control.reduced.rank(rank) for rank in (0, 1)]
        self.end_note = {
            "trained": [[one.rank, one.node, one.losses, len(one.weights), one.weights[:1].hex()] for one in metrics],
            "same": same,
            "iterated": [[one.rank for one in task.trained] for task in tasks],
            "lengths": [len(task.trained) for task in tasks],
            "local": [task.trained.local_rank(1).rank for task in tasks],
            "missing": missing,
            "alive": [task.alive.local_rank(0) for task in tasks],
            "worlds": [task.alive.world_size for task in tasks],
            "failures": [task.failure for task in tasks],
            "restarted": [[*task.restarted, len(task.restarted.restarts)] for task in tasks],
            "reduced": [
                [one["world"], one["backend"], one["gradient"], type(one["model"]).__name__] for one in reduced
            ],
        }
        self.next(self.end)

    @step
    def end(self):
        note("end", self.end_note)


if __name__ == "__main__":
    FunctionsFlow()
