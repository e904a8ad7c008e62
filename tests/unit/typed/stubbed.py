"""What a type checker makes of a flow with Metaflow's stubs; test_typing.py runs mypy over it and reads its comments.

Metaflow's generator (2.19) knows no overloads, so what a function returns is Any.
"""
# ruff: noqa: F821

from metaflow import FlowSpec, TorchrunError, TorchrunResult, TorchrunSingleNodeMultiGPU, current, step, torchrun


def train(epochs: int) -> float:
    return epochs * 0.1


class Flow(FlowSpec):
    @torchrun
    @step
    def start(self) -> None:
        reveal_type(current.torch)  # is TorchrunExecutor
        reveal_type(current.torch.run("train.py", {"epochs": 3}, timeout_s=60))  # is TorchrunResult[Any]
        reveal_type(current.torch.run(train, [3], nproc_per_node="gpu", process_group="auto"))  # is TorchrunResult[Any]
        reveal_type(current.torch.run(train, outputs=["x"], outputs_from="all"))  # is TorchrunResult[Any]
        reveal_type(current.torch.world_size)  # is int
        reveal_type(TorchrunSingleNodeMultiGPU().run("train.py", {"epochs": 3}))  # is TorchrunResult[Any]

    @torchrun(nproc_per_node="gpu", all_nodes_started_timeout=60, restart_on={"user", "hang"}, preemption_signal=10)
    @step
    def middle(self) -> None:
        current.torch.run(3)  # wrong
        current.torch.run("train.py", timeout_s="long")  # wrong
        current.torch.run(train, process_group="mpi")  # wrong
        current.torch.run(train, gathr=True)  # wrong
        current.torch.run(train, outputs="x", outputs_from="nodes")  # wrong
        current.torch.launch()  # wrong

    def values(self, result: TorchrunResult[float]) -> None:
        reveal_type(current.torch.run(train).rank(0))  # is Any
        reveal_type([current.torch.run(train).local_rank(0), *current.torch.run(train)])  # is list[Any]
        reveal_type(result.rank(0))  # is float
        reveal_type((result.metrics, result.exit_codes))  # is tuple[dict[str, float], dict[int, int]]
        reveal_type((result.duration_s, result.world_size, result.command))  # is tuple[float, int, str]
        reveal_type((result.launch, result.num_nodes, result.gathered))  # is tuple[int, int, bool]
        reveal_type(result.values)  # is Mapping[int, bytes]
        reveal_type((result.restarts, result.events))  # is tuple[list[dict[str, Any]], tuple[dict[str, Any], ...]]
        reveal_type(result.outputs)  # is Outputs | None
        assert result.outputs is not None
        reveal_type(result.outputs.download("x"))  # is Path
        print(result.metricks)  # wrong
        result.outputs.downlod("x")  # wrong

    def errors(self, error: TorchrunError) -> None:
        reveal_type((error.message, error.cause))  # is tuple[str, dict[str, Any] | None]
        reveal_type((error.events, error.outputs))  # is tuple[list[dict[str, Any]], Outputs | None]
        print(error.caus)  # wrong

    @torchrun(nproc_per_node=2, restart_on="user,hang", preemption_signal="SIGUSR1", hang_timeout_s=7.5)
    @step
    def more(self) -> None:
        reveal_type(len(current.torch.run(train)))  # is int

    @torchrun
    @step
    def without_types(self):
        current.torch.run("train.py", timeout_s="long")  # wrong

    @torchrun(nproc=2)  # wrong
    @step
    def end(self) -> None: ...

    @torchrun(grace_s="long")  # wrong
    @step
    def other(self) -> None: ...

    @torchrun(restart_on=3)  # wrong
    @step
    def another(self) -> None: ...
