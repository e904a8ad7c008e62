"""A step without num_parallel."""

import json
import os

from metaflow import FlowSpec, TorchrunSingleNodeMultiGPU, step


class SingleFlow(FlowSpec):
    @step
    def start(self):
        runner = TorchrunSingleNodeMultiGPU()
        self.result = runner.run(entrypoint="worker.py", entrypoint_args={"a": 1}, nproc_per_node=3)
        self.next(self.end)

    @step
    def end(self):
        with open(os.path.join(os.environ["GANG_OUT"], "end"), "w") as file:
            json.dump({"world_size": self.result.world_size, "exit_codes": self.result.exit_codes}, file)


if __name__ == "__main__":
    SingleFlow()
