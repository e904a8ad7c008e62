"""One tree of exceptions that travels: over the wire, through pickle."""

import json
import pickle
import subprocess
import sys
from dataclasses import replace

import pytest
from metaflow.exception import MetaflowException

from metaflow_extensions.torchrun.plugins.torchrun.errors import (
    CLASSES,
    LaunchFailed,
    WorkerFailed,
    chain,
)
from metaflow_extensions.torchrun.plugins.torchrun.gang.cause import (
    Cause,
    FailureText,
    cause_of,
    failed,
    failure_of,
    retold,
)
from metaflow_extensions.torchrun.plugins.torchrun.gang.messages import Abort
from metaflow_extensions.torchrun.plugins.torchrun.gang.wire import from_plain, to_plain


def sent(error):
    """Return an error as another node gets it."""
    return from_plain(Abort, json.loads(json.dumps(to_plain(Abort(error)))), "abort").error


TEXT = 'größe\n  "quoted" \\ 🙂 %s {x}'
CAUSE = {"kind": "signal", "node": 1, "exit_code": -9, "detail": TEXT}


@pytest.mark.parametrize("cls", CLASSES.values())
def test_every_error_is_one_of_metaflows_and_survives_the_wire_and_pickle(cls):
    made = cls(TEXT, CAUSE)
    assert (issubclass(cls, MetaflowException), made.headline, TEXT in str(made)) == (True, cls.__name__, True)
    for error in (sent(made), pickle.loads(pickle.dumps(made))):
        assert type(error) is cls
        assert (str(error), error.message, error.cause) == (str(made), TEXT, CAUSE)


def test_a_circle_of_causes_has_an_end():
    first, second = ValueError("first"), KeyError("second")
    first.__cause__, second.__context__ = second, first
    assert list(chain(first)) == [first, second]
    assert list(chain(None)) == []
    false = type("False", (ValueError,), {"__len__": lambda self: 0})()
    second.__cause__, false.__context__ = false, first
    assert list(chain(first)) == [first, second, false]


FAILURE = FailureText(Cause("exit", 0, "a", 3, 1, 7, detail=TEXT), before="vörher\n", after="\nafter")


@pytest.mark.parametrize("failure", [FAILURE, replace(FAILURE, instead="other words")])
def test_a_failure_travels_as_data_and_can_still_be_changed(failure):
    error = sent(failed(LaunchFailed, failure))
    assert (error.message, error.cause) == (failure.text, failure.cause.as_dict())
    assert failure_of(error) == failure
    assert cause_of(error).rank == 3
    told = retold(error, WorkerFailed, "\nIt ended.")
    assert str(told) == f"{error.message}\nIt ended."
    assert told.cause == error.cause


def test_a_stored_error_can_be_loaded_in_a_fresh_python():
    """Its module is then the first import of the program."""
    script = "import pickle, sys; print(pickle.load(sys.stdin.buffer).message)"
    data = pickle.dumps(LaunchFailed("Rank 3 failed", CAUSE))
    done = subprocess.run([sys.executable, "-c", script], input=data, capture_output=True, check=False)
    assert done.stdout == b"Rank 3 failed\n", done.stderr.decode()[-500:]
