"""Train a digit classifier over several Metaflow tasks; metrics and model become artifacts of the run."""

import json
import tempfile
from pathlib import Path

from metaflow import FlowSpec, IncludeFile, Parameter, current, step, torchrun


class DigitsFlow(FlowSpec):
    # Metaflow stores the file with the run, so that every node has it, wherever it runs.
    data = IncludeFile("data", is_text=False, default="digits.csv.gz", help="the images")
    nodes = Parameter("nodes", type=int, default=2, help="tasks of the train step, each one node of the job")
    nproc = Parameter("nproc", type=int, default=2, help="processes per node")
    epochs = Parameter("epochs", type=int, default=5, help="epochs in all, those of a snapshot included")
    batch_size = Parameter("batch-size", type=int, default=32, help="images per process and step")
    lr = Parameter("lr", type=float, default=0.05, help="learning rate")
    restarts = Parameter("restarts", type=int, default=0, help="how often to start all processes again after a failure")
    fail_after = Parameter("fail-after", type=int, default=0, help="let the last rank fail once after so many epochs")
    snapshot_dir = Parameter("snapshot-dir", default="", help="keep a snapshot here and resume from it; empty: don't")

    @step
    def start(self):
        self.next(self.train, num_parallel=self.nodes)

    @torchrun
    @step
    def train(self):
        self.metrics, self.model = None, None
        with tempfile.TemporaryDirectory() as output_dir:
            self.result = current.torch.run(
                entrypoint="train.py",
                entrypoint_args=self.training_args(output_dir),
                nproc_per_node=self.nproc,
                max_restarts=self.restarts,
            )
            # Rank 0 lives on node 0, and only that node can see the files it wrote.
            if current.parallel.node_index == 0:
                self.metrics = json.loads((Path(output_dir) / "metrics.json").read_text())
                self.model = (Path(output_dir) / "model.pt").read_bytes()
        self.next(self.join)

    def training_args(self, output_dir: str) -> dict[str, object]:
        data = Path(output_dir) / "digits.csv.gz"
        data.write_bytes(self.data)
        args = {
            "data": str(data),
            "epochs": self.epochs,
            "batch-size": self.batch_size,
            "lr": self.lr,
            "output-dir": output_dir,
        }
        if self.fail_after:
            args["fail-after"] = self.fail_after
        if self.snapshot_dir:
            args["snapshot-dir"] = str(Path(self.snapshot_dir).resolve())
        return args

    @step
    def join(self, inputs):
        control = next(node for node in inputs if node.metrics)
        self.metrics, self.model = control.metrics, control.model
        self.next(self.end)

    @step
    def end(self):
        metrics = self.metrics
        world_size = self.nodes * self.nproc
        if metrics["world_size"] != world_size or not metrics["same_on_all_ranks"]:
            raise RuntimeError(f"this was not one job of {world_size} ranks: {metrics}")
        for epoch in metrics["history"]:
            origin = "from the snapshot" if epoch["epoch"] < metrics["first_epoch"] else "trained in this run"
            print("epoch {epoch}: loss {loss:.4f}, held-out accuracy {accuracy:.1%}".format(**epoch), f"({origin})")
        print(f"{world_size} ranks over {metrics['backend']} ended with the same weights: ok")
        print(f"accuracy on {metrics['held_out_images']} held-out digits: {metrics['accuracy']:.1%}")
        print(f"artifacts of {current.flow_name}/{current.run_id}: metrics, model ({len(self.model)} bytes)")


if __name__ == "__main__":
    DigitsFlow()
