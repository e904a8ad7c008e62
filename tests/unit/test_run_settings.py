"""Whose value of a setting counts: that of the call, of ``torchrun_args``, or the attribute."""

import signal

import pytest

from metaflow_extensions.torchrun.plugins.torchrun.errors import TorchrunConfigError
from metaflow_extensions.torchrun.plugins.torchrun.settings import parse_settings
from metaflow_extensions.torchrun.plugins.torchrun.task.arguments import Position, resolve

NODE = Position(2, 1, "10.0.0.7")

# Setting -> values of the call, of torchrun_args (None where torchrun has no such option) and of the attribute, and
# what is made of them.
SETTINGS = {
    "nproc_per_node": (("5", "6", "auto"), (5, 6, "auto")),
    "master_port": (("29501", "29502", 29503), (29501, 29502, 29503)),
    "max_restarts": ((0, "6", 7), (0, 6, 7)),
    "hang_timeout_s": (("5", None, 7), (5.0, None, 7.0)),
    "timeout_s": ((9, None, 7), (9.0, None, 7.0)),
    "warm": ((False, None, "workers"), ("off", None, "workers")),
    "restart_on": (("user", None, "hang"), ({"user"}, None, {"hang"})),
    "preemption_signal": (("usr1", None, "usr2"), (signal.SIGUSR1, None, signal.SIGUSR2)),
    "env": (({}, None, {"A": 1}), ({}, None, {"A": "1"})),
    "before_run": (([], None, ["make"]), ((), None, (("sh", "-ec", "make"),))),
    "cwd": (("/", None, "/tmp"), ("/", None, "/tmp")),
}


def value_of(setting, step=None, **arguments):
    """Return a setting of a call of `run` in a step with these attributes."""
    return getattr(resolve({"entrypoint": "x.py", **arguments}, parse_settings(step or {}, "train"), NODE), setting)


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_call_comes_before_torchrun_args_and_these_before_the_attribute(setting):
    (call, option, attribute), (of_call, of_option, of_attribute) = SETTINGS[setting]
    step = {setting: attribute}
    assert value_of(setting, step, **{setting: call}) == of_call
    assert value_of(setting, step, **{setting: None}) == value_of(setting, step) == of_attribute
    if option is not None:
        args, hyphens = {"torchrun_args": {setting: option}}, setting.replace("_", "-")
        assert value_of(setting, step, **args) == value_of(setting, step, **args, **{setting: of_option}) == of_option
        words = rf"run\({setting}={of_call}\) and torchrun_args {hyphens}={of_option} disagree"
        with pytest.raises(TorchrunConfigError, match=words):
            value_of(setting, step, **args, **{setting: call})


@pytest.mark.parametrize("setting", [name for name, values in SETTINGS.items() if name not in ("env", "cwd", "warm")])
def test_a_wrong_value_of_a_call_is_named(setting):
    with pytest.raises(TorchrunConfigError, match=rf"run\({setting}\) (is|has) 'x'"):
        value_of(setting, **{setting: "x"})


def test_a_folder_of_the_step_is_looked_for_on_the_node():
    with pytest.raises(TorchrunConfigError, match=r"@torchrun\(cwd\).*not a folder on this node"):
        value_of("cwd", {"cwd": "not here"})


def test_what_no_call_changes_is_as_in_the_step():
    step = parse_settings({"grace_s": 5, "spare_nodes": 1, "nproc_per_node": 3}, "train")
    run = resolve({"entrypoint": "x.py"}, step, NODE)
    assert (run.grace_s, run.spare_nodes, run.nproc_from) == (5.0, 1, "@torchrun(nproc_per_node)")
    assert resolve({"nproc_per_node": 2}, step, NODE).nproc_from == "run(nproc_per_node)"
