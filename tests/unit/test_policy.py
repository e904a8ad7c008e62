"""What is to be done with a launch when: from the user's words to values."""

import json
import signal

import pytest

from metaflow_extensions.torchrun.plugins.torchrun.errors import TorchrunConfigError
from metaflow_extensions.torchrun.plugins.torchrun.policy import (
    DEFAULT_RETRY_ON,
    LaunchPolicy,
    parse_restarts,
    parse_retry_on,
    parse_signal,
)


@pytest.mark.parametrize("wrong", [-1, "-1", "many", 1.5, True])
def test_a_wrong_number_of_restarts_is_refused_by_name(wrong):
    with pytest.raises(TorchrunConfigError, match="here is"):
        parse_restarts(wrong, "here")


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (None, None),
        ("user", {"user"}),
        ("user,killed", {"user", "killed"}),
        (["start", "hang"], {"start", "hang"}),
        ("", set()),
    ],
)
def test_classes_that_restart_are_read_from_text_and_lists(value, names):
    assert parse_retry_on(value, "here") == names


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("often", "no such class"),
        ("user,node_lost", "Metaflow's @retry"),
        (["preempted"], "Metaflow's @retry"),
        (3, "a list"),
    ],
)
def test_a_class_that_no_restart_mends_is_refused(wrong, why):
    with pytest.raises(TorchrunConfigError, match=f"here.*{why}"):
        parse_retry_on(wrong, "here")


def test_by_default_all_restarts_but_what_the_surviving_nodes_cannot_mend():
    assert {"user", "killed", "timeout", "hang"} == DEFAULT_RETRY_ON


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (None, None),
        ("SIGUSR1", signal.SIGUSR1),
        (" usr2 ", signal.SIGUSR2),
        (int(signal.SIGTERM), signal.SIGTERM),
        ("15", signal.SIGTERM),
        (signal.SIGINT, signal.SIGINT),
    ],
)
def test_a_signal_is_read_from_its_name_or_number(value, number):
    assert parse_signal(value, "here") == number


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("SIGNOPE", "a signal"),
        ("0", "a signal"),
        (999, "a signal"),
        (True, "a signal"),
        (-15, "a signal"),
        ("KILL", "heed"),
        ("STOP", "heed"),
    ],
)
def test_a_signal_that_nobody_could_heed_is_refused(wrong, why):
    with pytest.raises(TorchrunConfigError, match=f"here is.*{why}"):
        parse_signal(wrong, "here")


def test_a_policy_travels_as_json():
    policy = LaunchPolicy(5.0, 60.0, 30.0, 2, frozenset({"user"}), signal.SIGUSR1, 1)
    assert LaunchPolicy.from_wire(json.loads(json.dumps(policy.to_wire()))) == policy
    assert LaunchPolicy.from_wire({}) == LaunchPolicy()
