"""Train a digit classifier over several Metaflow tasks; metrics and model are stored with the run."""

import json
import tempfile
from pathlib import Path

from metaflow import FlowSpec, IncludeFile, Parameter, current, step, torchrun


class DigitsFlow(FlowSpec):
    # Metaflow stores the file with the run, so every node has it on any machine.
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
        with tempfile.TemporaryDirectory() as folder:
            self.result = current.torch.run(
                entrypoint="train.py",
                entrypoint_args=self.training_args(folder),
                nproc_per_node=self.nproc,
                max_restarts=self.restarts,
                cwd=folder,
                outputs=["metrics.json", "model.pt"],  # rank 0 writes them
            )
        self.next(self.join)

    def training_args(self, folder: str) -> dict[str, object]:
        data = Path(folder) / "digits.csv.gz"
        data.write_bytes(self.data)
        args = {
            "data": str(data),
            "epochs": self.epochs,
            "batch-size": self.batch_size,
            "lr": self.lr,
            "output-dir": folder,
        }
        if self.fail_after:
            args["fail-after"] = self.fail_after
        if self.snapshot_dir:
            args["snapshot-dir"] = str(Path(self.snapshot_dir).resolve())
        return args

    @step
    def join(self, inputs):
        result = inputs[0].result
        self.outputs, self.world_size = result.outputs, result.world_size  # of the nodes that are no spares
        self.next(self.end)

    @step
    def end(self):
        metrics = json.load(self.outputs.open("metrics.json"))
        if metrics["world_size"] != self.world_size or not metrics["same_on_all_ranks"]:
            raise RuntimeError(f"this was not one job of {self.world_size} ranks: {metrics}")
        for epoch in metrics["history"]:
            origin = "from the snapshot" if epoch["epoch"] < metrics["first_epoch"] else "trained in this run"
            print("epoch {epoch}: loss {loss:.4f}, held-out accuracy {accuracy:.1%}".format(**epoch), f"({origin})")
        print(f"{self.world_size} ranks over {metrics['backend']} ended with the same weights: ok")
        print(f"accuracy on {metrics['held_out_images']} held-out digits: {metrics['accuracy']:.1%}")
        stored = ", ".join(f"{file.name} ({file.size} bytes)" for file in self.outputs)
        print(f"outputs of {current.flow_name}/{current.run_id}: {stored}")


if __name__ == "__main__":
    DigitsFlow()
