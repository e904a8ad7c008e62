"""Files of workers on their way through the datastore: of launches that end well, fail, or call a function."""

import os
from pathlib import Path

from metaflow import FlowSpec, LaunchFailed, TorchrunSingleNodeMultiGPU, current, step, torchrun
from notes import note

NAMES = ["* 模型/", "*.json", "nothing*"]


def write(name):
    Path(name).write_text(os.environ["RANK"])
    return name


def contents(outputs):
    return {f"{file.node} {file.name}": outputs.open(file.name, file.node).read()[:9].decode() for file in outputs}


class OutputsFlow(FlowSpec):
    @step
    def start(self):
        folder = Path("alone")
        folder.mkdir()
        self.alone = TorchrunSingleNodeMultiGPU().run(
            entrypoint="writes.py", entrypoint_args=["alone"], cwd=str(folder), outputs="*.json"
        )
        self.next(self.train, num_parallel=2)

    @torchrun(nproc_per_node=1)
    @step
    def train(self):
        folder = Path(f"node {current.parallel.node_index}")
        folder.mkdir()
        here = {"cwd": str(folder), "outputs": NAMES}
        self.of_all = current.torch.run("writes.py", ["good"], outputs_from="all", **here)
        self.of_control = current.torch.run("writes.py", ["other"], outputs=["other*"], cwd=str(folder))
        self.of_function = current.torch.run(write, ["written"], outputs=["written"], cwd=str(folder))
        try:
            current.torch.run("writes.py", ["failing"], cwd=str(folder), outputs=["failing*"], outputs_from="all")
        except LaunchFailed as error:
            self.error = error
        note(f"task-{current.parallel.node_index}", {"failed": str(self.error)})
        self.next(self.join)

    @step
    def join(self, inputs):
        control, member = inputs
        self.alone = control.alone
        self.results = [control.of_all, member.of_all]
        self.end_note = {
            "of all": [contents(task.of_all.outputs) for task in inputs],
            "of control": [contents(task.of_control.outputs) for task in inputs],
            "of function": contents(control.of_function.outputs),
            "failed": [contents(task.error.outputs) for task in inputs],
        }
        self.next(self.end)

    @step
    def end(self):
        note("end", self.end_note)


if __name__ == "__main__":
    OutputsFlow()
