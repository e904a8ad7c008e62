"""What a type checker makes of a flow with Metaflow's stubs; test_typing.py runs mypy over it and reads its comments.

Metaflow's generator (2.19) knows no overloads, no annotated attributes, and no parameters of generic classes.
"""
# ruff: noqa: F821

from metaflow import FlowSpec, TorchrunSingleNodeMultiGPU, current, step, torchrun


def train(epochs: int) -> float:
    return epochs * 0.1


class Flow(FlowSpec):
    @torchrun(nproc_per_node="gpu", restart_on={"user", "hang"}, preemption_signal=10, hang_timeout_s=7.5)
    @step
    def start(self) -> None:
        reveal_type(current.torch)  # is TorchrunExecutor
        reveal_type(current.torch.run("train.py", {"epochs": 3}, timeout_s=60))  # is TorchrunResult
        reveal_type(current.torch.run(train, [3], process_group="auto", outputs=["x"]))  # is TorchrunResult
        reveal_type(current.torch.world_size)  # is int
        reveal_type(TorchrunSingleNodeMultiGPU().run("train.py", {"epochs": 3}))  # is TorchrunResult
        current.torch.run(3)  # wrong
        current.torch.run(train, process_group="mpi")  # wrong
        current.torch.run(train, gathr=True)  # wrong
        current.torch.launch()  # wrong

    @torchrun(nproc=2)  # wrong
    @step
    def untyped(self):
        current.torch.run("train.py", timeout_s="long")  # wrong

    @torchrun(grace_s="long")  # wrong
    @step
    def end(self) -> None: ...
