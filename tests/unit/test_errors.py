"""One tree of exceptions that travels: over the wire, through pickle."""

import json
import pickle
import subprocess
import sys

import pytest
from metaflow.exception import MetaflowException

from metaflow_extensions.torchrun.plugins.torchrun.errors import CLASSES, LaunchFailed, TorchrunError
from metaflow_extensions.torchrun.plugins.torchrun.gang.protocol import Abort
from metaflow_extensions.torchrun.plugins.torchrun.gang.wire import from_plain, to_plain

TEXT = 'größe\n  "quoted" \\ 🙂 %s {x}'
CAUSE = {"kind": "signal", "node": 1, "exit_code": -9, "detail": TEXT}


@pytest.mark.parametrize("cls", CLASSES.values())
def test_every_error_survives_the_wire(cls):
    error = from_plain(Abort, json.loads(json.dumps(to_plain(Abort(cls(TEXT, CAUSE))))), "abort").error
    assert type(error) is cls
    assert (str(error), error.cause) == (str(cls(TEXT, CAUSE)), CAUSE)


@pytest.mark.parametrize("cls", CLASSES.values())
def test_every_error_survives_pickle(cls):
    error = pickle.loads(pickle.dumps(cls(TEXT, CAUSE)))
    assert type(error) is cls
    assert (error.message, error.cause, error.headline) == (TEXT, CAUSE, cls.headline)


@pytest.mark.parametrize("cls", CLASSES.values())
def test_every_error_is_caught_as_one_and_as_metaflows(cls):
    assert issubclass(cls, MetaflowException)
    assert cls.headline.startswith("@torchrun")
    assert TEXT in str(cls(TEXT))


@pytest.mark.parametrize(
    "data", [{}, {"class": "SystemExit", "message": "x"}, {"class": None}, {"class": "__import__"}]
)
def test_an_unknown_class_on_the_wire_becomes_the_base_class(data):
    assert type(from_plain(Abort, {"error": data}, "abort").error) is TorchrunError


def test_the_tree_is_the_one_drawn():
    tree = {cls.__name__: cls.__bases__[0].__name__ for cls in CLASSES.values() if cls is not TorchrunError}
    assert tree == {
        "TorchrunConfigError": "TorchrunError",
        "EntrypointError": "TorchrunError",
        "TorchNotFoundError": "TorchrunError",
        "GangError": "TorchrunError",
        "GangStartTimeout": "GangError",
        "LaunchFailed": "TorchrunError",
        "LaunchTimeout": "LaunchFailed",
        "WorkerFailed": "LaunchFailed",
        "LaunchHung": "LaunchFailed",
        "TorchrunPreempted": "LaunchFailed",
    }


def test_a_stored_error_can_be_loaded_in_a_fresh_python():
    """Its module is then the first import of the program."""
    script = "import pickle, sys; print(pickle.load(sys.stdin.buffer).message)"
    data = pickle.dumps(LaunchFailed("Rank 3 failed", CAUSE))
    done = subprocess.run([sys.executable, "-c", script], input=data, capture_output=True, check=False)
    assert done.stdout == b"Rank 3 failed\n", done.stderr.decode()[-500:]
