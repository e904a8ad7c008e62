"""A function on one node, in a step without num_parallel."""

import os

from metaflow import FlowSpec, TorchrunSingleNodeMultiGPU, step


def work(base):
    if base < 0:
        raise KeyError("below zero")
    return base + int(os.environ["LOCAL_RANK"])


class AloneFlow(FlowSpec):
    @step
    def start(self):
        self.result = TorchrunSingleNodeMultiGPU().run(entrypoint=work, entrypoint_args={"base": 40}, nproc_per_node=2)
        try:
            TorchrunSingleNodeMultiGPU().run(entrypoint=work, entrypoint_args=[-1])
        except KeyError as error:
            self.raised = [str(error), *error.__notes__]
        self.next(self.end)

    @step
    def end(self):
        self.values = list(self.result)


if __name__ == "__main__":
    AloneFlow()
