"""The attributes of @torchrun, as Python writes them and as `--with` sends them."""

import signal

import pytest

from metaflow_extensions.torchrun.plugins.torchrun.errors import TorchrunConfigError
from metaflow_extensions.torchrun.plugins.torchrun.settings import (
    DEFAULTS,
    parse_settings,
    refuse_unknown,
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
