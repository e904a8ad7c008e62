"""The attributes of @torchrun, as Python writes them and as `--with` sends them."""

import signal

import pytest

from metaflow_extensions.torchrun.plugins.torchrun.errors import TorchrunConfigError
from metaflow_extensions.torchrun.plugins.torchrun.settings import (
    DEFAULTS,
    parse_seconds,
    parse_settings,
    refuse_unknown,
)


@pytest.mark.parametrize(
    ("attribute", "text", "value"),
    [
        ("nproc_per_node", "2", 2),
        ("nproc_per_node", "auto", "auto"),
        ("nproc_per_node", "GPU", "gpu"),
        ("all_nodes_started_timeout", "90", 90.0),
        ("all_nodes_started_timeout", "0.5", 0.5),
        ("master_port", "29500", 29500),
        ("channel_port", "29501", 29501),
        ("heartbeat_timeout_s", "5", 5.0),
        ("grace_s", "0", 0.0),
        ("max_restarts", "3", 3),
        ("retry_on", "user, start", {"user", "start"}),
        ("preflight", "True", True),
        ("preemption_signal", "usr1", signal.SIGUSR1),
        ("hang_timeout_s", "90", 90.0),
    ],
)
def test_every_attribute_may_be_text(attribute, text, value):
    assert getattr(parse_settings({**DEFAULTS, attribute: text}, "train"), attribute) == value


def test_every_attribute_is_tried_as_text_above():
    (mark,) = test_every_attribute_may_be_text.pytestmark
    assert {row[0] for row in mark.args[1]} == set(DEFAULTS)


@pytest.mark.parametrize("attribute", ["nproc_per_node", "master_port", "channel_port"])
@pytest.mark.parametrize("text", ["", "None", "none", " "])
def test_none_may_be_text(attribute, text):
    assert getattr(parse_settings({**DEFAULTS, attribute: text}, "train"), attribute) is None


def test_the_defaults_are_those_of_the_issue():
    settings = parse_settings({}, "train")
    assert settings.nproc_per_node is None
    assert settings.all_nodes_started_timeout == 600
    assert settings.master_port is None
    assert settings.max_restarts == 0
    assert settings.retry_on == {"user", "killed", "timeout", "hang"}
    assert settings.preemption_signal == signal.SIGTERM
    assert settings.hang_timeout_s is None


@pytest.mark.parametrize(
    ("attribute", "wrong"),
    [
        *(("nproc_per_node", wrong) for wrong in (0, -1, "0", "many", 1.5, "1.5", True, [2])),
        *(("all_nodes_started_timeout", wrong) for wrong in (0, -1, "soon", "nan", "inf", None, True)),
        *((port, wrong) for port in ("master_port", "channel_port") for wrong in (0, -1, 99999, "99999", "x", 1.5)),
        *(("heartbeat_timeout_s", wrong) for wrong in (0, "0", -3, "x", [])),
        *(("grace_s", wrong) for wrong in (-1, "-0.1", "x", "")),
        *(("max_restarts", wrong) for wrong in (-1, "x", 1.5, True)),
        *(("retry_on", wrong) for wrong in ("never", ["user", 3], 7, "node_lost")),
        *(("preemption_signal", wrong) for wrong in ("SIGNOPE", 0, True, "SIGKILL")),
        *(("hang_timeout_s", wrong) for wrong in (0, -1, "x", True)),
    ],
)
def test_a_wrong_value_names_step_attribute_and_value(attribute, wrong):
    with pytest.raises(TorchrunConfigError) as caught:
        parse_settings({**DEFAULTS, attribute: wrong}, "train")
    assert "Step train" in str(caught.value)
    assert f"@torchrun({attribute}" in str(caught.value)
    if wrong not in ("", None):
        assert repr(wrong) in str(caught.value)


def test_one_port_for_two_purposes_is_refused():
    with pytest.raises(TorchrunConfigError, match=r"Step train: @torchrun\(master_port=.*channel_port are both 29500"):
        parse_settings({"master_port": 29500, "channel_port": "29500"}, "train")


@pytest.mark.parametrize(("value", "seconds"), [(None, None), (3, 3.0), ("2.5", 2.5)])
def test_a_time_limit_may_be_absent(value, seconds):
    assert parse_seconds(value, "run(timeout_s)") == seconds


@pytest.mark.parametrize("wrong", [0, -1, "x", float("nan"), float("inf"), True])
def test_a_wrong_time_limit_is_refused(wrong):
    with pytest.raises(TorchrunConfigError, match=r"run\(timeout_s\) is"):
        parse_seconds(wrong, "run(timeout_s)")


def test_an_unknown_attribute_names_the_step_and_the_nearest():
    refuse_unknown([], "train")
    with pytest.raises(TorchrunConfigError, match=r"Step train: .* attribute nproc_per_nodes.*mean nproc_per_node\?"):
        refuse_unknown(["nproc_per_nodes"], "train")
    with pytest.raises(TorchrunConfigError) as caught:
        refuse_unknown(["größe"], "train")
    assert all(name in str(caught.value) for name in DEFAULTS)
