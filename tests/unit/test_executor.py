"""What `current.torch` makes of a call, before anything runs."""

import signal

import pytest
from recorded_calls import recorded_calls

from metaflow_extensions.torchrun.plugins.torchrun import executor, gang_of_one
from metaflow_extensions.torchrun.plugins.torchrun.errors import TorchrunConfigError, TorchrunError
from metaflow_extensions.torchrun.plugins.torchrun.gang.cause import Cause, rename_node
from metaflow_extensions.torchrun.plugins.torchrun.gang.launch import Launch
from metaflow_extensions.torchrun.plugins.torchrun.gang.policy import LaunchPolicy
from metaflow_extensions.torchrun.plugins.torchrun.single_node import TorchrunSingleNodeMultiGPU


@pytest.fixture
def launch_of(monkeypatch, tmp_path):
    return recorded_calls(monkeypatch, tmp_path)


def test_a_call_decides_what_it_says_and_leaves_the_rest_to_the_attributes(launch_of):
    attributes = {"nproc_per_node": 7, "max_restarts": "2", "restart_on": "hang", "master_port": 29500}
    spec, policy, said = launch_of({**attributes, "preemption_signal": "USR1"})
    assert (spec.nproc, spec.master_port) == (7, 29500)
    assert said[0] == "processes per node: 7 (set by @torchrun(nproc_per_node))"
    assert policy == LaunchPolicy(None, 2, frozenset({"hang"}), signal.SIGUSR1)
    own = {"max_restarts": 0, "restart_on": ["user"], "timeout_s": 60, "preemption_signal": "INT"}
    spec, policy, said = launch_of(attributes, **own, torchrun_args={"nproc_per_node": 3, "master_port": 29501})
    assert (spec.nproc, spec.master_port) == (3, 29501)
    assert policy == LaunchPolicy(60.0, 0, frozenset({"user"}), signal.SIGINT)
    assert launch_of()[2] == ["processes per node: 4 (@kubernetes requests gpu=4)"]


def test_arguments_that_0_2_ignored_are_warned_of(launch_of):
    (warning, _) = launch_of(local_output_dir="out", push_results_dir_to_cloud=True)[2]
    assert warning.startswith("warning: run(push_results_dir_to_cloud, local_output_dir) has no effect")


def test_what_needs_a_name_is_said_with_the_value_that_was_given(launch_of):
    with pytest.raises(TorchrunConfigError, match=r"Name the others, as in nproc_per_node=2\.$"):
        launch_of(positional=("train.py", {"epochs": 1}, 2))


def test_positional_arguments_may_stand_in_the_order_of_0_2(launch_of):
    def spec_of(*positional, **named):
        return launch_of(positional=positional, **named)[0]

    options, args = {"max_restarts": 3, "tee": "3"}, {"epochs": 1}
    today = spec_of("train.py", args, torchrun_args=options, nproc_per_node=2)
    assert spec_of(options, "train.py", args, 2) == today
    assert spec_of(options, "train.py", args, 2, True, "out", None) == today
    assert spec_of(options, "train.py", entrypoint_args=args, nproc_per_node=2) == today
    assert spec_of(options, entrypoint="train.py", entrypoint_args=args, nproc_per_node=2) == today
    assert spec_of([], "train.py", args) == spec_of(None, "train.py", args) == spec_of("train.py", args)
    with pytest.raises(TypeError, match="entrypoint"):
        spec_of(options, "train.py", entrypoint="other.py")


@pytest.mark.parametrize("positional", [(), ({"lr": 1},), (["--lr", "1"],), (None,)])
def test_a_list_alone_or_before_arguments_is_a_command(positional, launch_of):
    spec, *_ = launch_of(positional=(["sh", "-c", "true"], *positional))
    given = ("--lr", "1") if positional not in ((), (None,)) else ()
    assert (spec.entrypoint, spec.args) == ("sh", ("-c", "true", *given))
    assert spec.options == (("no-python", None),)


def test_a_command_has_no_spare_workers_and_a_line_says_so(launch_of):
    command = (["sh", "x"],)
    for positional, warm, has_spares in (
        (command, "workers", True),
        (command, "agent", True),
        (command, "workers", False),
    ):
        said = launch_of(positional=positional, warm=warm, has_spares=has_spares)[2]
        assert any("the workers start cold" in line for line in said) is (warm == "workers" and has_spares)


@pytest.mark.parametrize("warm", ["agent", "workers", "off"])
def test_the_supervisor_is_told_what_starts_warm(warm, launch_of):
    launch_of({"warm": warm})
    assert launch_of.plans[-1].warm == warm


@pytest.mark.parametrize("rank", [0, None])
def test_a_gang_of_one_in_a_gangs_step_speaks_of_the_node_that_it_is_there(rank):
    kind = "exit" if rank == 0 else "terminated"
    error = Launch(0).error(Cause(kind, 0, "Host-B", rank, rank, 3, "it had to"), [])
    rename_node(error, 2)
    assert "ode 2 (host Host-B)" in error.message
    assert "ode 0 (" not in error.message
    assert error.cause["node"] == 2
    rename_node(TorchrunError("no cause"), 2)


def test_a_working_directory_that_was_removed_is_said(launch_of, tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(TorchrunConfigError, match=r"was removed.*os\.chdir"):
        launch_of()


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


@pytest.mark.parametrize(
    ("positional", "named"),
    [
        (("train.py", {"epochs": 1}), {"entrypoint": "train.py", "entrypoint_args": {"epochs": 1}}),
        ((["sh", "x"], ["-l"]), {"entrypoint": ["sh", "x"], "entrypoint_args": ["-l"]}),
        (({"tee": 3}, "train.py", [1], 2), {"entrypoint_args": [1], "torchrun_args": {"tee": 3}, "nproc_per_node": 2}),
        (({"tee": 3},), {"torchrun_args": {"tee": 3}}),
        ((None, "train.py"), {"entrypoint": "train.py", "torchrun_args": None}),
    ],
)
def test_a_single_node_takes_positional_arguments_as_a_gang_does(positional, named, monkeypatch):
    given = []
    monkeypatch.setattr(gang_of_one.GangOfOne, "run", lambda self, **options: given.append(options))
    TorchrunSingleNodeMultiGPU().run(*positional)
    assert given == [{"entrypoint": "train.py" if "train.py" in positional else None, "entrypoint_args": None, **named}]


@pytest.mark.parametrize("given", [{"outputs": ["x"]}, {"hang_timeout_s": 5}, {"attributes": {"hang_timeout_s": 5}}])
def test_what_only_a_feature_can_do_is_refused_without_it(given, launch_of):
    with pytest.raises(TorchrunConfigError, match=r"needs the feature (outputs|hangs), which is not installed"):
        launch_of(**given)


def test_a_warning_is_given_once_in_a_task(launch_of, monkeypatch):
    monkeypatch.setattr(executor, "shm_warning", lambda *_: "warning: /dev/shm is small")
    assert "warning: /dev/shm is small" in launch_of()[2]
    assert "warning: /dev/shm is small" not in launch_of()[2]
