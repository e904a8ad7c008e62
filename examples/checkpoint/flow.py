"""Train with checkpoints in Metaflow's datastore: after a lost node, the next attempt continues."""

import hashlib
import tempfile
from pathlib import Path

from metaflow import FlowSpec, Parameter, checkpoint, current, load_model, model, retry, step, torchrun


class CheckpointFlow(FlowSpec):
    nodes = Parameter("nodes", type=int, default=2, help="tasks of the train step, each one node of the job")
    nproc = Parameter("nproc", type=int, default=2, help="processes per node")
    nproc_again = Parameter(
        "nproc-again", type=int, default=0, help="processes per node when tried again; 0: as before"
    )
    steps = Parameter("steps", type=int, default=20, help="steps in all")
    every = Parameter("every", type=int, default=4, help="steps between two checkpoints")
    sharded = Parameter("sharded", is_flag=True, default=False, help="each rank has and saves a part of the weights")
    restarts = Parameter(
        "restarts", type=int, default=0, help="how often to start all processes again within an attempt"
    )
    pause = Parameter("pause", type=float, default=0.0, help="seconds to wait after each step")
    die_at = Parameter("die-at", type=int, default=0, help="let the last rank die once after so many steps")

    @step
    def start(self):
        self.training = current.run_id  # a run that `resume` starts keeps this value
        self.next(self.train, num_parallel=self.nodes)

    @retry(times=2, minutes_between_retries=0)
    @model
    # The script itself loads checkpoints, not each task. The card of 0.2.14 can make a step fail.
    @checkpoint(load_policy="none", show_card=False)
    @torchrun
    @step
    def train(self):
        first = current.retry_count == 0
        self.trained = None
        with tempfile.TemporaryDirectory() as folder:
            weights = Path(folder, "weights.pt")
            args = {"training": self.training, "steps": self.steps, "every": self.every, "pause": self.pause}
            args["output"] = weights
            if first and self.die_at:
                args["die-at"] = self.die_at
            current.torch.run(
                entrypoint="train_sharded.py" if self.sharded else "train.py",
                entrypoint_args=args,
                nproc_per_node=self.nproc if first else self.nproc_again or self.nproc,
                max_restarts=self.restarts,
            )
            if weights.exists():  # rank 0 has written them
                self.trained = current.model.save(str(weights), label="weights")
        self.next(self.join)

    @step
    def join(self, inputs):
        self.trained = next(node.trained for node in inputs if node.trained)
        self.next(self.end)

    @step
    def end(self):
        with tempfile.TemporaryDirectory() as folder:
            load_model(self.trained, folder)
            (file,) = Path(folder).iterdir()
            self.weights = file.read_bytes()
        print(f"weights after {self.steps} steps: {hashlib.sha256(self.weights).hexdigest()[:12]}")


if __name__ == "__main__":
    CheckpointFlow()
