"""Functions of the flow file as entrypoints: several launches of different widths in one step."""

import atexit
import os
import sys
import time
from dataclasses import dataclass

from around import Around
from metaflow import TorchrunError, current, step, torchrun
from notes import note


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
    """Fail once, then return a value for each rank."""
    rank = int(os.environ["RANK"])
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise ConnectionError("only the first time")
    # The last rank's value is larger than any frame of the gang's channel.
    weights = bytes([rank]) * (2 << 20) if rank == settings["large"] else b""
    losses = [1 / (e + 1) for e in range(epochs)]
    return Metrics(rank, int(os.environ["GROUP_RANK"]), os.getpid(), losses, weights)


def add_up(pids):
    """Use the process group that was made for this function, and look which of these processes live."""
    import torch
    import torch.distributed as dist

    atexit.register(lambda: print(f"process group at the end: {dist.is_initialized()}"))
    total = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(total)
    return {"sum": total.item(), "alive": [pid for pid in pids if os.path.exists(f"/proc/{pid}")]}


def fail_on(rank):
    if int(os.environ["RANK"]) == rank:
        raise BadBatch(17)
    time.sleep(300)


class FunctionsFlow(Around):
    @torchrun(nproc_per_node=2)
    @step
    def train(self):
        torch = current.torch
        self.node = current.parallel.node_index
        arguments = {"epochs": 3, "settings": {"large": 3}}
        self.trained = torch.run(train, arguments, gather=True, max_restarts=1)
        pids = [metrics.pid for metrics in self.trained]
        self.added = torch.run(add_up, [pids], nproc_per_node=1, process_group="auto")
        self.failure = self.fail(torch)
        note(f"task-{self.node}", {"torch": "torch" in sys.modules})
        self.next(self.join)

    def fail(self, torch):
        try:
            torch.run(fail_on, {"rank": 1}, nproc_per_node=1)
        except ValueError as error:
            return {
                "class": type(error).__name__,
                "is": isinstance(error, BadBatch),
                "batch": error.batch,
                "notes": error.__notes__,
                "cause": [type(error.__cause__).__name__, error.__cause__.cause["rank"], str(error.__cause__)],
                "is ours": isinstance(error.__cause__, TorchrunError),
            }

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
        self.end_note = {
            "trained": [[one.rank, one.node, one.losses, len(one.weights), one.weights[:1].hex()] for one in metrics],
            "same": same,
            "iterated": [[one.rank for one in task.trained] for task in tasks],
            "lengths": [len(task.trained) for task in tasks],
            "local": [task.trained.local_rank(1).rank for task in tasks],
            "missing": missing,
            "added": [[task.added.world_size, *task.added] for task in tasks],
            "failures": [task.failure for task in tasks],
            "restarts": [len(task.trained.restarts) for task in tasks],
        }
        self.next(self.end)

    @step
    def end(self):
        note("end", self.end_note)


if __name__ == "__main__":
    FunctionsFlow()
