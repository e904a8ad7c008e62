"""Functions on all GPUs of one node: `process_group="auto"`, and tensors of a GPU that come back."""

import sys

from around import Around
from metaflow import current, step, torchrun
from notes import note


def reduced():
    import torch
    import torch.distributed as dist

    total = torch.ones(3, device="cuda") * dist.get_rank()
    dist.all_reduce(total)
    layer = torch.nn.Linear(2, 2, device="cuda")
    return {"total": total, "layer": layer, "backend": dist.get_backend(), "device": str(total.device)}


class GpuFlow(Around):
    @step
    def start(self):
        self.next(self.train, num_parallel=1)

    @torchrun
    @step
    def train(self):
        result = current.torch.run(reduced, process_group="auto")
        before = "torch" in sys.modules
        values = list(result)
        seen = [
            {
                "backend": value["backend"],
                "device": value["device"],
                "here": [str(value["total"].device), str(value["layer"].weight.device)],
                "total": value["total"].tolist(),
            }
            for value in values
        ]
        note("values", {"seen": seen, "torch before": before})
        self.next(self.join)


if __name__ == "__main__":
    GpuFlow()
