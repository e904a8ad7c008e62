"""Every parse function of a setting: numbers and texts in, checked values out, errors that name the setting."""

import signal
from functools import partial
from pathlib import Path

import pytest

from metaflow_extensions.torchrun.plugins.torchrun import parsing
from metaflow_extensions.torchrun.plugins.torchrun.errors import TorchrunConfigError

READ = [
    (parsing.parse_nproc, [("8", 8), (" 8 ", 8), (2.0, 2), (" CPU", "cpu"), ("Gpu", "gpu")]),
    (parsing.parse_port, [("", None), ("1", 1), (65535, 65535), (" 80 ", 80)]),
    (parsing.parse_restart_on, [("", set()), (["start", "hang"], {"start", "hang"})]),
    (
        parsing.parse_outputs,
        [
            ("model/", ("model",)),
            (Path("a") / "b", ("a/b",)),
            (["./x", "*.json", "a//**/b", "größe 🙂\n*", "x", "..."], ("x", "*.json", "a/**/b", "größe 🙂\n*", "...")),
            (("."), (".",)),
        ],
    ),
    (parsing.parse_signal, [("SIGUSR1", signal.SIGUSR1), (" usr2 ", signal.SIGUSR2)]),
    (parsing.parse_signal, [(term, signal.SIGTERM) for term in (signal.SIGTERM, int(signal.SIGTERM), "15")]),
]
REFUSED = [
    (
        parsing.parse_nproc,
        "'auto', 'cpu', 'gpu'",
        [0, -1, "0", "many", "", 1.5, True, False, [1], "gpus", "1e3", "9" * 5000],
    ),
    (parsing.parse_port, "a whole number from 1 to 65535", [0, -1, 65536, "many", 1.5, True, "29500 29501", [29500]]),
    (parsing.parse_whole, "at least 0", [-1, "-1", "many", 1.5, True]),
    (parsing.parse_seconds, "a number of seconds above 0", [None, 0, -1, "x", "nan", float("inf"), True, [], 10**400]),
    (partial(parsing.parse_seconds, zero=True), "a number of seconds of at least 0", [-0.1, -1, "nan", None]),
    (parsing.parse_restart_on, "no class of failures .*Metaflow's @retry", ["often", "user,store", "before_run"]),
    (parsing.parse_restart_on, "a list", [3, ["user", 3]]),
    (parsing.parse_outputs, "a list of files", [3, {"a": "b"}, [3], [["a"]], ["a", None], b"a", True]),
    (
        parsing.parse_outputs,
        "no file below the workers' working directory",
        ["", ["a", " "], "a\0b", "/etc", "..", "a/../b"],
    ),
    (parsing.parse_outputs, "as a part of its own", ["**.json", "a/x**"]),
    (parsing.parse_outputs_from, "'control', 'all'", ["", "every", 0, True, ["all"]]),
    (parsing.parse_signal, "a signal", ["SIGNOPE", "0", 999, True, -15, "SIG_IGN", "BLOCK", "_BLOCK"]),
    (parsing.parse_flag, "True or False", ["yes", "no", 1, 0, None]),
    (parsing.parse_signal, "heed", ["KILL", "STOP"]),
]


@pytest.mark.parametrize(("parse", "value", "parsed"), [(parse, *row) for parse, rows in READ for row in rows])
def test_what_is_written_is_read(parse, value, parsed):
    assert parse(value, "here") == parsed


@pytest.mark.parametrize(("parse", "why", "wrong"), [(*row, wrong) for *row, values in REFUSED for wrong in values])
def test_a_wrong_value_is_refused_with_the_settings_name_and_the_reason(parse, why, wrong):
    with pytest.raises(TorchrunConfigError, match=f"(?s)here (is|has|names) ?.*{why}"):
        parse(wrong, "here")
