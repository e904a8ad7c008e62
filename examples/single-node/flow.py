"""Several processes inside one ordinary step: no num_parallel, no join."""

import json
import tempfile

from metaflow import FlowSpec, Parameter, TorchrunSingleNodeMultiGPU, step


class SingleNodeFlow(FlowSpec):
    nproc = Parameter("nproc", type=int, default=2, help="processes in the step")
    steps = Parameter("steps", type=int, default=60, help="optimizer steps")

    @step
    def start(self):
        self.next(self.train)

    @step
    def train(self):
        with tempfile.TemporaryDirectory() as folder:
            self.result = TorchrunSingleNodeMultiGPU().run(
                entrypoint="train.py",
                entrypoint_args={"steps": self.steps, "output-dir": folder},
                nproc_per_node=self.nproc,
                cwd=folder,
                outputs=["rank-*.json"],  # stored with the run
            )
        self.next(self.end)

    @step
    def end(self):
        outputs = self.result.outputs
        ranks = [json.load(outputs.open(file.name)) for file in outputs]
        if len(ranks) != self.nproc:
            raise RuntimeError(f"expected {self.nproc} reports, got {ranks}")
        # Each rank had other points. Equal results mean that the gradients were averaged.
        answers = {(report["slope"], report["intercept"]) for report in ranks}
        if len(answers) != 1:
            raise RuntimeError(f"the ranks ended with different models: {answers}")
        first = ranks[0]
        print(f"slope     {first['slope']:+.3f}, true value {first['true_slope']:+.3f}")
        print(f"intercept {first['intercept']:+.3f}, true value {first['true_intercept']:+.3f}")
        print(f"{len(ranks)} ranks in one task ended with the same model: ok")


if __name__ == "__main__":
    SingleNodeFlow()
