"""The attributes of @torchrun, as Python writes them and as `--with` sends them, and whose value of a setting counts."""

import signal

import pytest

from metaflow_extensions.torchrun.plugins.torchrun.errors import TorchrunConfigError
from metaflow_extensions.torchrun.plugins.torchrun.settings import (
    DEFAULTS,
    Choice,
    choose,
    parse_settings,
    refuse_unknown,
    with_attributes,
)


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


def test_every_attribute_is_tried_as_text_above():
    (mark,) = test_every_attribute_may_be_text.pytestmark
    assert {row[0] for row in mark.args[1]} == set(DEFAULTS)


def test_none_is_the_default_and_may_be_text():
    settings = parse_settings({}, "train")
    assert (settings.nproc_per_node, settings.master_port, settings.channel_port) == (None, None, None)
    assert (settings.max_restarts, settings.hang_timeout_s) == (0, None)
    assert settings.restart_on == {"user", "killed", "timeout", "hang"}
    assert (settings.preemption_signal, settings.all_nodes_started_timeout) == (signal.SIGTERM, 600)
    required = {"all_nodes_started_timeout", "heartbeat_timeout_s", "grace_s"}
    for nothing in (None, "", "None", "none", " "):
        assert parse_settings(dict.fromkeys(set(DEFAULTS) - required, nothing), "train") == settings
        for attribute in required:
            with pytest.raises(TorchrunConfigError, match=rf"Step train: @torchrun\({attribute}=.* is None"):
                parse_settings({attribute: nothing}, "train")


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


def test_one_port_for_two_purposes_is_refused():
    with pytest.raises(TorchrunConfigError, match=r"Step train: @torchrun\(master_port=.*channel_port are both 29500"):
        parse_settings({"master_port": 29500, "channel_port": "29500"}, "train")


def test_an_unknown_attribute_names_the_step_and_the_nearest():
    refuse_unknown([], "train")
    with pytest.raises(TorchrunConfigError, match=r"Step train: .* attribute nproc_per_nodes.*mean nproc_per_node\?"):
        refuse_unknown(["nproc_per_nodes"], "train")
    with pytest.raises(TorchrunConfigError) as caught:
        refuse_unknown(["die größe"], "train")
    assert all(name in str(caught.value) for name in DEFAULTS)


def test_the_former_preflight_leads_to_the_page_that_says_what_to_do_instead():
    with pytest.raises(TorchrunConfigError, match=r"attribute preflight\. .*run\(check_links\).*docs/preflight\.md"):
        refuse_unknown(["preflight"], "train")


# --- whose value counts ---------------------------------------------------------------------------

# Setting -> values of the call, of torchrun_args (None where torchrun has no such option) and of the attribute, and
# what is made of them.
SETTINGS = {
    "nproc_per_node": (("5", "6", "auto"), (5, 6, "auto")),
    "master_port": (("29501", "29502", 29503), (29501, 29502, 29503)),
    "max_restarts": ((0, "6", 7), (0, 6, 7)),
    "hang_timeout_s": (("5", None, 7), (5.0, None, 7.0)),
    "restart_on": (("user", None, "hang"), ({"user"}, None, {"hang"})),
    "preemption_signal": (("usr1", None, "usr2"), (signal.SIGUSR1, None, signal.SIGUSR2)),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_call_comes_before_torchrun_args_and_these_before_the_attribute(setting):
    (call, option, attribute), (of_call, of_option, of_attribute) = SETTINGS[setting]
    settings = parse_settings({setting: attribute}, "train")
    hyphens = setting.replace("_", "-")
    assert choose(setting, {setting: call}, {}, settings) == Choice(of_call, f"run({setting})")
    assert choose(setting, {setting: None}, {}, settings) == Choice(of_attribute, f"@torchrun({setting})")
    if option is not None:
        assert choose(setting, {}, {hyphens: option}, settings) == Choice(of_option, f"torchrun_args {hyphens}")
        assert choose(setting, {setting: of_option}, {hyphens: option}, settings).value == of_option
        words = rf"run\({setting}={of_call}\) and torchrun_args {hyphens}={of_option} disagree"
        with pytest.raises(TorchrunConfigError, match=words):
            choose(setting, {setting: call}, {hyphens: option}, settings)


@pytest.mark.parametrize("setting", [*SETTINGS, "timeout_s"])
def test_a_wrong_value_of_a_call_is_named(setting):
    settings = parse_settings({}, "train")
    with pytest.raises(TorchrunConfigError, match=rf"run\({setting}\) (is|has) 'x'"):
        choose(setting, {setting: "x"}, {}, settings)
    hyphens = setting.replace("_", "-")
    with pytest.raises(TorchrunConfigError, match=rf"torchrun_args {hyphens} (is|has) 'x'"):
        choose(setting, {}, {hyphens: "x"}, settings)


def test_the_surroundings_of_a_call_override_those_of_the_step(tmp_path):
    step = {"env": {"A": "1"}, "cwd": str(tmp_path), "before_run": ["make"], "timeout_s": 7}
    settings = parse_settings(step, "train")
    of_step = with_attributes({"env": None, "gather": True}, settings)
    assert of_step == {"env": {"A": "1"}, "gather": True, "cwd": str(tmp_path), "before_run": (("sh", "-ec", "make"),)}
    call = {"env": {}, "cwd": "/", "before_run": []}
    assert with_attributes(call, settings) == call
    assert [choose("timeout_s", given, {}, settings).value for given in ({}, {"timeout_s": 9})] == [7, 9]


def test_a_folder_of_the_step_is_looked_for_on_the_node():
    settings = parse_settings({"cwd": "not here"}, "train")
    with pytest.raises(TorchrunConfigError, match=r"@torchrun\(cwd\).*not a folder on this node"):
        with_attributes({}, settings)
