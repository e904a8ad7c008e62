"""A step without num_parallel."""

from metaflow import FlowSpec, TorchrunSingleNodeMultiGPU, card, current, step
from notes import note


class SingleFlow(FlowSpec):
    @card(type="torchrun")
    @card(id="own")
    @step
    def start(self):
        runner = TorchrunSingleNodeMultiGPU()
        current.card["own"].append(runner.card("outcome"))
        self.result = runner.run(entrypoint="worker.py", entrypoint_args={"a": 1}, nproc_per_node=3)
        self.next(self.end)

    @step
    def end(self):
        note("end", {"world_size": self.result.world_size, "exit_codes": self.result.exit_codes})


if __name__ == "__main__":
    SingleFlow()
