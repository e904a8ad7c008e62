"""What `current.torch` makes of a call, before anything runs."""

import pytest
from recorded_calls import recorded_calls

from metaflow_extensions.torchrun.plugins.torchrun.errors import TorchrunConfigError
from metaflow_extensions.torchrun.plugins.torchrun.single_node import TorchrunSingleNodeMultiGPU


@pytest.fixture
def launch_of(monkeypatch, tmp_path):
    return recorded_calls(monkeypatch, tmp_path)


def test_arguments_that_0_2_ignored_are_warned_of(launch_of):
    (warning, _) = launch_of(local_output_dir="out", push_results_dir_to_cloud=True)[1]
    assert warning.startswith("warning: run(push_results_dir_to_cloud, local_output_dir) has no effect")


@pytest.mark.parametrize("name", ["log-dir", "log_dir", "local_ranks_filter"])
def test_an_option_about_output_has_no_effect_and_a_line_says_once_where_it_is(name, launch_of):
    call, said = launch_of(torchrun_args={name: "1"})
    (warning,) = [line for line in said if line.startswith("warning: torchrun_args lo")]
    assert "has no effect" in warning
    assert "python flow.py torchrun logs --rank N" in warning
    assert launch_of(torchrun_args={name: "1"})[1] == [line for line in said if line != warning]
    assert launch_of()[0] == call


def test_what_needs_a_name_is_said_with_the_value_that_was_given(launch_of):
    with pytest.raises(TorchrunConfigError, match=r"Name the others, as in nproc_per_node=2\.$"):
        launch_of(positional=("train.py", {"epochs": 1}, 2))


def test_positional_arguments_may_stand_in_the_order_of_0_2(launch_of):
    def call_of(*positional, **named):
        return launch_of(positional=positional, **named)[0]

    options, args = {"max_restarts": 3, "tee": "3"}, {"epochs": 1}
    today = call_of("train.py", args, torchrun_args=options, nproc_per_node=2)
    assert call_of(options, "train.py", args, 2) == today
    assert call_of(options, "train.py", args, 2, True, "out", None) == today
    assert call_of(options, "train.py", entrypoint_args=args, nproc_per_node=2) == today
    assert call_of(options, entrypoint="train.py", entrypoint_args=args, nproc_per_node=2) == today
    assert call_of([], "train.py", args) == call_of(None, "train.py", args) == call_of("train.py", args)
    with pytest.raises(TypeError, match="entrypoint"):
        call_of(options, "train.py", entrypoint="other.py")


@pytest.mark.parametrize("positional", [(), ({"lr": 1},), (["--lr", "1"],), (None,)])
def test_a_list_alone_or_before_arguments_is_a_command(positional, launch_of):
    call, _ = launch_of(positional=(["sh", "-c", "true"], *positional))
    given = ("--lr", "1") if positional not in ((), (None,)) else ()
    assert (call.entrypoint, call.args) == ("sh", ("-c", "true", *given))
    assert call.options == {"no-python": None}


# --- names that `run` does not have -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("gathr", "Did you mean gather? It has entrypoint, entrypoint_args, module, "),
        ("timeout", "Did you mean timeout_s? It has"),
        ("nproc", "Did you mean nproc_per_node? It has"),
        ("grace_s", "It is an attribute of @torchrun. It has"),
        ("größe * 🙂", "It has entrypoint, "),
    ],
)
def test_a_misspelt_argument_is_told_apart(name, hint, launch_of):
    with pytest.raises(TorchrunConfigError) as caught:
        launch_of(**{name: 3})
    assert caught.value.message.startswith(f"run() has no argument {name}. {hint}")
    assert "local_output_dir" not in caught.value.message
    with pytest.raises(TorchrunConfigError, match="no argument"):
        TorchrunSingleNodeMultiGPU().run("train.py", **{name: 3})
