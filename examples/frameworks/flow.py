"""Runs a script of a framework, unchanged, on all ranks of several nodes."""

from pathlib import Path

from metaflow import FlowSpec, Parameter, current, step, torchrun

# A script must not have the name of a package: Python would import the script instead.
SCRIPTS = {
    "trainer": "hf_trainer.py",
    "accelerate": "hf_accelerate.py",
    "lightning": "lightning_ddp.py",
    "fsdp2": "fsdp2_checkpoint.py",
    "tensor-parallel": "tensor_parallel.py",
    "pipelining": "pipelining.py",
    "deepspeed": "deepspeed_zero1.py",
}


class FrameworksFlow(FlowSpec):
    framework = Parameter("framework", default="fsdp2", help=f"one of {', '.join(SCRIPTS)}")
    nodes = Parameter("nodes", type=int, default=2, help="tasks of the train step, each one node of the job")
    nproc = Parameter("nproc", type=int, default=2, help="processes per node")
    folder = Parameter("folder", default="checkpoints", help="of FSDP2's checkpoints; all nodes must see it")
    args = Parameter("args", default="", help="arguments of the script, with spaces between")

    @step
    def start(self):
        if self.framework not in SCRIPTS:
            raise ValueError(f"--framework is {self.framework!r}, but must be one of {', '.join(SCRIPTS)}")
        self.checkpoints = str(Path(self.folder, current.run_id).resolve())
        self.next(self.train, num_parallel=self.nodes)

    @torchrun
    @step
    def train(self):
        script, run = SCRIPTS[self.framework], current.torch.run
        if self.framework == "fsdp2":  # half of the ranks continue where all ranks ended
            run(script, {"folder": self.checkpoints, "steps": 20}, nproc_per_node=self.nproc)
            run(script, {"folder": self.checkpoints, "steps": 40}, nproc_per_node=max(1, self.nproc // 2))
        else:
            run(script, self.args.split(), nproc_per_node=self.nproc)
        self.next(self.join)

    @step
    def join(self, inputs):
        self.next(self.end)

    @step
    def end(self):
        pass


if __name__ == "__main__":
    FrameworksFlow()
