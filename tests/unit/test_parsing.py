"""Every parse function of a setting: numbers and texts in, checked values out, errors that name the setting."""

import signal
from functools import partial

import pytest

from metaflow_extensions.torchrun.plugins.torchrun.errors import TorchrunConfigError
from metaflow_extensions.torchrun.plugins.torchrun.parsing import (
    DEFAULT_RETRY_ON,
    parse_nproc,
    parse_port,
    parse_required_seconds,
    parse_restarts,
    parse_retry_on,
    parse_seconds,
    parse_signal,
    parse_switch,
)


@pytest.mark.parametrize(
    ("parse", "value", "parsed"),
    [
        *(
            (parse_nproc, *row)
            for row in [(None, None), ("8", 8), (" 8 ", 8), (2.0, 2), (" CPU", "cpu"), ("Gpu", "gpu")]
        ),
        *((parse_port, *row) for row in [(None, None), ("", None), ("1", 1), (65535, 65535), (" 80 ", 80)]),
        *((parse_restarts, *row) for row in [(None, None), (0, 0), ("3", 3)]),
        *((parse_seconds, *row) for row in [(None, None), (3, 3.0), ("2.5", 2.5)]),
        (partial(parse_required_seconds, zero=True), "0", 0.0),
        *((parse_switch, on, True) for on in (True, 1, "true", "1", " TRUE ")),
        *((parse_switch, off, False) for off in (False, 0, None, "False", "0")),
        *((parse_retry_on, *row) for row in [(None, None), ("", set()), ("user, killed", {"user", "killed"})]),
        (parse_retry_on, ["start", "hang"], {"start", "hang"}),
        *((parse_signal, *row) for row in [(None, None), ("SIGUSR1", signal.SIGUSR1), (" usr2 ", signal.SIGUSR2)]),
        *((parse_signal, term, signal.SIGTERM) for term in (signal.SIGTERM, int(signal.SIGTERM), "15")),
    ],
)
def test_what_is_written_is_read(parse, value, parsed):
    assert parse(value, "here") == parsed


@pytest.mark.parametrize(
    ("parse", "wrong", "why"),
    [
        *(
            (parse_nproc, wrong, "'auto', 'cpu', 'gpu'")
            for wrong in (0, -1, "0", "many", "", 1.5, True, False, [1], "gpus", "1e3")
        ),
        *(
            (parse_port, wrong, "a whole number from 1 to 65535")
            for wrong in (0, -1, 65536, "many", 1.5, True, "29500 29501", [29500])
        ),
        *((parse_restarts, wrong, "at least 0") for wrong in (-1, "-1", "many", 1.5, True)),
        *(
            (parse_seconds, wrong, "a number of seconds above 0")
            for wrong in (0, -1, "x", "nan", float("inf"), True, [])
        ),
        (parse_required_seconds, None, "a number of seconds above 0"),
        (partial(parse_required_seconds, zero=True), -0.1, "a number of seconds"),
        *((parse_switch, wrong, "True or False") for wrong in ("ja", 2, "10", 1.5, [True])),
        (parse_retry_on, "often", "no such class"),
        *((parse_retry_on, wrong, "Metaflow's @retry") for wrong in ("user,node_lost", ["preempted"], "store")),
        *((parse_retry_on, wrong, "a list") for wrong in (3, ["user", 3])),
        *((parse_signal, wrong, "a signal") for wrong in ("SIGNOPE", "0", 999, True, -15)),
        *((parse_signal, wrong, "heed") for wrong in ("KILL", "STOP")),
    ],
)
def test_a_wrong_value_is_refused_with_the_settings_name_and_the_reason(parse, wrong, why):
    with pytest.raises(TorchrunConfigError, match=f"here (is|has) .*{why}"):
        parse(wrong, "here")


def test_by_default_all_restarts_but_what_the_surviving_nodes_cannot_mend():
    assert {"user", "killed", "timeout", "hang"} == DEFAULT_RETRY_ON
