"""Train a small GPT on Python's reference manual over several Metaflow tasks, and store model and sample."""

import json
import os
import shlex
import sys
import textwrap

from metaflow import FlowSpec, Parameter, card, current, step, torchrun
from metaflow.metaflow_config import DEFAULT_DATASTORE


def loss_table(history: list[dict[str, float]]) -> str:
    """Return one line for each evaluation, with a bar as long as the held-out loss."""
    # Metaflow's log removes leading spaces, so the columns are aligned to the left.
    lines = ["step  training  held out"]
    for entry in history:
        bar = "#" * round(8 * entry["held_out_loss"])
        lines.append("{step:<4}  {train_loss:<8.3f}  {held_out_loss:<8.3f}  ".format(**entry) + bar)
    return "\n".join(lines)


def python_command() -> str:
    """Return a command that starts a Python which finds this run: in its folder, or with the datastore's variable."""
    if DEFAULT_DATASTORE != "local":
        return "python"
    root = os.environ.get("METAFLOW_DATASTORE_SYSROOT_LOCAL")
    place = f"METAFLOW_DATASTORE_SYSROOT_LOCAL={shlex.quote(root)}" if root else f"cd {shlex.quote(os.getcwd())} &&"
    return f"{place} {shlex.quote(sys.executable)}"


class MinGPTFlow(FlowSpec):
    nodes = Parameter("nodes", type=int, default=2, help="tasks of the train step, each one node of the job")
    nproc = Parameter("nproc", type=int, default=2, help="processes per node")
    steps = Parameter("steps", type=int, default=600, help="optimizer steps")
    batch_size = Parameter("batch-size", type=int, default=8, help="blocks of text per process and step")

    @step
    def start(self):
        self.next(self.train, num_parallel=self.nodes)

    @card(type="torchrun")
    @torchrun
    @step
    def train(self):
        self.result = current.torch.run(
            entrypoint="train.py",
            entrypoint_args={"steps": self.steps, "batch-size": self.batch_size, "output-dir": "trained"},
            nproc_per_node=self.nproc,
            outputs=["trained/"],  # stores what rank 0 writes there
        )
        self.next(self.join)

    @step
    def join(self, inputs):
        self.outputs = inputs[0].result.outputs
        self.next(self.end)

    @step
    def end(self):
        metrics, world_size = json.load(self.outputs.open("trained/metrics.json")), self.nodes * self.nproc
        sample = self.outputs.open("trained/sample.txt").read().decode()
        if metrics["world_size"] != world_size or not metrics["same_on_all_ranks"]:
            raise RuntimeError(f"this was not one job of {world_size} ranks: {metrics}")
        before, after = metrics["history"][0]["held_out_loss"], metrics["history"][-1]["held_out_loss"]
        if not after < before:
            raise RuntimeError(f"nothing was learned: held-out loss {before:.3f} before, {after:.3f} after")

        print(f"A GPT of {metrics['parameters']:,} parameters, trained by {world_size} ranks on {self.nodes} nodes")
        print(f"over {metrics['backend']}; all ranks ended with the same weights: ok\n")
        print(loss_table(metrics["history"]))
        print(f"\nloss on text it never saw: {before:.3f} before, {after:.3f} after training")
        print("\nWhat it writes now:\n")
        # The "|" keeps the indentation, which Metaflow's log would remove.
        print(textwrap.indent(sample, "| ", lambda line: True))
        print()
        print(f"Stored with this run: {', '.join(f'{file.name} ({file.size:,} bytes)' for file in self.outputs)}.")
        print(f"To look at them, start python with: {python_command()}")
        print("and type:")
        print(">>> from metaflow import Run, namespace")
        print(">>> namespace(None)  # whoever you are, whoever ran it")
        print(f'>>> data = Run("{current.flow_name}/{current.run_id}").data')
        print('>>> print(data.outputs.open("trained/sample.txt").read().decode())')


if __name__ == "__main__":
    MinGPTFlow()
