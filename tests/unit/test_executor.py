"""The world of `current.torch`, and how its `run` and that of `TorchrunSingleNodeMultiGPU` may be called."""

from types import SimpleNamespace

import pytest

from metaflow_extensions.torchrun.plugins.torchrun.errors import TorchrunConfigError
from metaflow_extensions.torchrun.plugins.torchrun.executor import TorchrunExecutor
from metaflow_extensions.torchrun.plugins.torchrun.machine.accelerators import Machine
from metaflow_extensions.torchrun.plugins.torchrun.run_arguments import Runner
from metaflow_extensions.torchrun.plugins.torchrun.settings import parse_settings
from metaflow_extensions.torchrun.plugins.torchrun.single_node import TorchrunSingleNodeMultiGPU


def test_spares_are_not_in_the_world():
    settings = parse_settings({"spare_nodes": 1, "nproc_per_node": 2}, "train")
    torch = TorchrunExecutor(SimpleNamespace(num_nodes=4), "10.0.0.7", Machine(8), settings)
    assert (torch.num_nodes, torch.world_size) == (4, 6)


class Recorder(Runner):
    """Returns the arguments of a call by their names."""

    def launched(self, given):
        return given


run = Recorder().run


def test_what_needs_a_name_is_said_with_the_value_that_was_given():
    with pytest.raises(TorchrunConfigError, match=r"Name the others, as in nproc_per_node=2\.$"):
        run("train.py", {"epochs": 1}, 2)


def test_positional_arguments_may_stand_in_the_order_of_0_2():
    options, args = {"max_restarts": 3, "tee": "3"}, {"epochs": 1}
    today = run("train.py", args, torchrun_args=options, nproc_per_node=2)
    assert run(options, "train.py", args, 2) == today
    ignored = {"push_results_dir_to_cloud": True, "local_output_dir": "out", "cloud_output_dir": None}
    assert run(options, "train.py", args, 2, True, "out", None) == {**today, **ignored}
    assert run(options, "train.py", entrypoint_args=args, nproc_per_node=2) == today
    assert run(options, entrypoint="train.py", entrypoint_args=args, nproc_per_node=2) == today
    assert run([], "train.py") == {"torchrun_args": [], "entrypoint": "train.py"}
    with pytest.raises(TypeError, match="entrypoint"):
        run(options, "train.py", entrypoint="other.py")


@pytest.mark.parametrize("positional", [(), ({"lr": 1},), (["--lr", "1"],), (None,)])
def test_a_list_alone_or_before_arguments_is_a_command(positional):
    named = dict(zip(["entrypoint_args"], positional, strict=False))
    assert run(["sh", "-c", "true"], *positional) == {"entrypoint": ["sh", "-c", "true"], **named}


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("gathr", "Did you mean gather? It has entrypoint, entrypoint_args, module, "),
        ("nproc", "Did you mean nproc_per_node? It has"),
        ("grace_s", "It is an attribute of @torchrun. It has"),
        ("größe * 🙂", "It has entrypoint, "),
    ],
)
def test_a_misspelt_argument_is_told_apart(name, hint):
    for call in (run, TorchrunSingleNodeMultiGPU().run):
        with pytest.raises(TorchrunConfigError) as caught:
            call("train.py", **{name: 3})
        assert caught.value.message.startswith(f"run() has no argument {name}. {hint}")
        assert "local_output_dir" not in caught.value.message
