"""A function's call in the task: what is refused, stored for other nodes, and kept of it; what an error becomes."""

import functools
import inspect
import pickle
import tempfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from unit_helpers import MemoryStore, settings_of_run, write

from metaflow_extensions.torchrun.plugins.torchrun.errors import (
    LaunchFailed,
    LaunchHung,
    LaunchTimeout,
    TorchrunConfigError,
    TorchrunPreempted,
    WorkerFailed,
)
from metaflow_extensions.torchrun.plugins.torchrun.gang.cause import Cause, FailureText, failed
from metaflow_extensions.torchrun.plugins.torchrun.outputs import Outputs
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.call import Call
from metaflow_extensions.torchrun.plugins.torchrun.task.arguments import Position
from metaflow_extensions.torchrun.plugins.torchrun.task.facts import contents_digest
from metaflow_extensions.torchrun.plugins.torchrun.task.function_call import FUNCTION_WORKER, FunctionCall
from metaflow_extensions.torchrun.plugins.torchrun.task.make_call import make_call

CALL = Call(FUNCTION_WORKER, ("folder",), False, nproc=2, num_nodes=2, node_index=1, python="python3")
CAUSE = Cause("exception", 1, "host-1", 2, 0)


def train(epochs=1):
    return epochs


class Trainer:
    def fit(self):
        pass

    def __call__(self):
        pass


@pytest.fixture
def make(monkeypatch, tmp_path):
    """Return a function that makes a call; at the end none of its files may be left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    calls = []

    def make(function=train, arguments=None, process_group=None, gather=False, store=None):
        given = {"entrypoint_args": arguments, "process_group": process_group, "gather": gather}
        call = FunctionCall(settings_of_run(entrypoint=function, **given), store)
        calls.append(call)
        return call

    yield make
    for call in calls:
        call.close()
    assert not list(tmp_path.glob("torchrun-call-*"))


def leave(call, name, thing):
    """Leave a file as a worker does."""
    path = Path(call.folder, "values", name)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(pickle.dumps(thing))
    return path.read_bytes()


# --- what is refused --------------------------------------------------------------------------------


def more(*args, **kwargs):
    return args, kwargs


@functools.wraps(more)
def wrapper(lr):
    return lr


def signed(lr, **more):
    """Stand for a decorator that adds an argument, and has copied the signature of what it wraps."""


signed.__signature__ = inspect.Signature([inspect.Parameter("lr", inspect.Parameter.POSITIONAL_OR_KEYWORD)])


@pytest.mark.parametrize(
    ("function", "arguments", "why"),
    [
        (train, {"epoch": 1}, r"train can't take .* argument 'epoch'. Did you mean epochs\? Its arguments: epochs\."),
        (wrapper, {"lrr": 1}, r"required argument: 'lr'. It has no 'lrr'. Did you mean lr\?"),
        (train, [1, 2], "too many positional arguments"),
        (train, "--epochs 3", r"dict \(keyword arguments\) or a list"),
        (functools.partial(train, 1), [2], "too many positional arguments"),
        (wrapper, {}, "missing a required argument: 'lr'"),
        (lambda: 1, [1], "Its arguments: none"),
        (functools.partial(train, bogus=1), [], "has incorrect arguments. Its arguments: epochs"),
        (signed, {"lr": 1, "verbose": True}, None),
        (Trainer().fit, {"x": 1}, "Trainer.fit can't take"),
        *((each, {"x": 1}, None) for each in (more, int, Trainer(), functools.partial(print, 1))),
        (functools.partial(train, epochs=1), {"epochs": 2}, None),
        (wrapper, [1], None),
    ],
)
def test_arguments_that_a_plain_function_can_not_take_are_refused_before_any_worker(function, arguments, why, make):
    with nullcontext() if why is None else pytest.raises(TorchrunConfigError, match=why):
        make(function, arguments=arguments)


@pytest.mark.parametrize(
    ("entrypoint", "given", "why"),
    [
        ("x.py", {"process_group": "gloo"}, r"run\(process_group='gloo'\) is for functions"),
        ("x.py", {"gather": True}, r"run\(gather=True\) is for functions"),
        (train, {"module": True}, "module says how to run a script"),
        (train, {"torchrun_args": ["--module"]}, "module says how to run a script"),
        (train, {"torchrun_args": {"no_python": None}}, "no-python says how to run a script"),
    ],
)
def test_what_is_for_functions_is_refused_for_scripts_and_the_reverse(entrypoint, given, why):
    with pytest.raises(TorchrunConfigError, match=why):
        FunctionCall.of(settings_of_run(entrypoint=entrypoint, **given), None)


def made_of(call, **given):
    """Return the launch of a function whose own arguments no script could be given."""
    run = settings_of_run(**given, entrypoint=train, entrypoint_args={"net": object()})
    return make_call(run, Position(2, 1, "10.0.0.7"), call.program, nproc=2)


# --- what the nodes compare -------------------------------------------------------------------------


def test_functions_are_told_apart_by_name_and_source_and_not_by_their_folders(make, tmp_path):
    functions = (train, functools.partial(train, 3), functools.partial(functools.partial(Trainer().fit)), Trainer())
    calls = [make(function) for function in functions]
    one, again, other, called = map(made_of, calls)
    assert (one.function.name, other.function.name, called.function.name) == ("train", "Trainer.fit", "Trainer")
    assert (one.entrypoint, one.args, one.source, one.bools) == (FUNCTION_WORKER, (calls[0].folder,), __file__, ())
    assert one.digest() == replace(again, entrypoint="/elsewhere/worker.py").digest() != other.digest()
    sources = [str(write(tmp_path / name / "flow.py", name)) for name in ("a", "b")]
    assert len({contents_digest(replace(one, source=source)) for source in sources}) == 2
    assert contents_digest(made_of(make(len))) == contents_digest(CALL) != "unknown", "that of the worker's script"


# --- what goes to other nodes -------------------------------------------------------------------------


def test_a_task_that_has_come_in_the_place_of_another_loads_the_values_of_its_ranks(make):
    store = MemoryStore()
    keys = {str(rank): store.save(bytes([rank])) for rank in range(150)}
    assert dict(make(store=store).result(CALL, keys)["values"]) == {2: bytes([2]), 3: bytes([3])}


# --- what an error becomes ------------------------------------------------------------------------------


def verdict_of(cls=LaunchFailed, text="the gang's words", **cause):
    return failed(cls, FailureText(replace(CAUSE, **cause), instead=text))


def knowing(error):
    """Return an error with all that the gang knows of a failure."""
    error.events, error.outputs = [{"kind": "failed"}], Outputs({}, {})
    return error


@pytest.mark.parametrize("stored", [{"2": "0"}, {}, {"2": "no such key"}, {"3": "0"}])
def test_the_exception_of_another_nodes_rank_comes_through_the_store(stored, make):
    store = MemoryStore()
    store.save(pickle.dumps(KeyError("lr")))
    verdict = knowing(verdict_of())
    error = make(store=store).original(verdict, stored)
    if stored == {"2": "0"}:
        assert (type(error), error.args) == (KeyError, ("lr",))
    else:
        assert (type(error), error.message, error.cause) == (WorkerFailed, "the gang's words", verdict.cause)
        assert (error.events, error.outputs) == (verdict.events, verdict.outputs)


# How the gang has seen the end of the worker, and whether that may have been the exception that it has left.
SEEN = [
    *((verdict_of(kind=kind), True) for kind in ("exception", "exit", "signal")),
    (verdict_of(text="out of memory", kind="oom"), False),
    (verdict_of(text="the node vanished", kind="lost", rank=None), False),
    (LaunchFailed("nobody knows"), False),
    *((verdict_of(cls), False) for cls in (LaunchTimeout, LaunchHung, TorchrunPreempted)),
]


@pytest.mark.parametrize(("verdict", "raises"), SEEN)
def test_the_exception_of_the_cause_replaces_the_verdict_and_nothing_else_does(verdict, raises, make):
    call = make()
    if verdict.cause and verdict.cause["kind"] != "exception":
        assert call.original(verdict, {}) is verdict
    leave(call, "raised-2.pkl", KeyError("lr"))
    error = call.original(verdict, {})
    if raises:
        assert (type(error), error.__notes__) == (KeyError, ["raised by rank 2 on node 1 (host host-1)"])
    else:
        assert error is verdict
