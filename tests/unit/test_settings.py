"""The attributes of @torchrun, as Python writes them and as `--with` sends them."""

import signal

import pytest

from metaflow_extensions.torchrun.plugins.torchrun.errors import TorchrunConfigError
from metaflow_extensions.torchrun.plugins.torchrun.settings import (
    DEFAULTS,
    parse_settings,
    refuse_unknown,
)
from metaflow_extensions.torchrun.plugins.torchrun.task.arguments import Position, resolve


@pytest.mark.parametrize(
    ("attribute", "text", "value"),
    [
        ("nproc_per_node", "GPU", "gpu"),
        ("all_nodes_started_timeout", "0.5", 0.5),
        ("master_port", "29500", 29500),
        ("channel_port", "29501", 29501),
        ("heartbeat_timeout_s", "5", 5.0),
        ("grace_s", "0", 0.0),
        ("max_restarts", "3", 3),
        ("restart_on", "user, start", {"user", "start"}),
        ("spare_nodes", "1", 1),
        ("min_nodes", "2", 2),
        ("preemption_signal", "usr1", signal.SIGUSR1),
        ("hang_timeout_s", "90", 90.0),
        ("logs", "Rank0", "rank0"),
        ("warm", "False", "off"),
        ("preload", "numpy, os.path", ("numpy", "os.path")),
        ("env", '{"SEED": 1}', {"SEED": "1"}),
        ("cwd", "not here", "not here"),
        ("before_run", '["make data", ["a", "b"]]', (("sh", "-ec", "make data"), ("a", "b"))),
        ("timeout_s", "60", 60.0),
    ],
)
def test_every_attribute_may_be_text(attribute, text, value):
    assert getattr(parse_settings({**DEFAULTS, attribute: text}, "train"), attribute) == value


assert {row[0] for row in test_every_attribute_may_be_text.pytestmark[0].args[1]} == set(DEFAULTS)


def test_none_is_the_default_and_may_be_text():
    settings = parse_settings({}, "train")
    assert (settings.nproc_per_node, settings.master_port, settings.channel_port) == (None, None, None)
    assert (settings.max_restarts, settings.hang_timeout_s) == (0, None)
    assert (settings.spare_nodes, settings.min_nodes) == (0, None)
    assert settings.restart_on == {"user", "killed", "timeout", "hang", "node_lost", "preempted"}
    assert (settings.preemption_signal, settings.all_nodes_started_timeout) == (signal.SIGTERM, 600)
    assert (settings.grace_s, settings.heartbeat_timeout_s) == (30, 30)
    for nothing in (None, "", "None", "none", " "):
        assert parse_settings(dict.fromkeys(DEFAULTS, nothing), "train") == settings


WRONG = [
    *((attribute, "die größe", "'die größe'") for attribute in sorted(DEFAULTS.keys() - {"cwd", "env"})),
    *(
        (attribute, 0, "above 0")
        for attribute in ("heartbeat_timeout_s", "all_nodes_started_timeout", "hang_timeout_s")
    ),
    ("cwd", 3, "3"),
    ("env", "my secret", ""),
]


@pytest.mark.parametrize(("attribute", "wrong", "said"), WRONG)
def test_a_wrong_value_names_step_attribute_and_value(attribute, wrong, said):
    with pytest.raises(TorchrunConfigError) as caught:
        parse_settings({**DEFAULTS, attribute: wrong}, "train")
    assert f"Step train: @torchrun({attribute}=...)" in str(caught.value)
    assert said in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("nodes", "given", "shown"), [(2, None, "all"), (16, None, "all"), (17, None, "node"), (99, "all", "all")]
)
def test_the_lines_of_a_small_gang_are_all_shown(nodes, given, shown):
    assert parse_settings({"logs": given}, "train").logs_of(nodes) == shown


def test_an_unknown_attribute_names_the_step_and_the_nearest():
    refuse_unknown([], "train")
    with pytest.raises(TorchrunConfigError, match=r"Step train: .* attribute nproc_per_nodes.*mean nproc_per_node\?"):
        refuse_unknown(["nproc_per_nodes"], "train")
    with pytest.raises(TorchrunConfigError) as caught:
        refuse_unknown(["die größe"], "train")
    assert all(name in str(caught.value) for name in DEFAULTS)


# --- whose value counts ---------------------------------------------------------------------------

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
