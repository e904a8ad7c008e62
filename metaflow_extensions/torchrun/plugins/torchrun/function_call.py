"""A Python function as entrypoint, seen from the task: how it gets to the workers and what comes back.

Everything travels through files in a folder of this call: the function and its arguments to the workers
(`function_worker`), and what each returned or raised back. To other nodes it travels through
Metaflow's datastore; the gang's channel carries keys only.
"""

from __future__ import annotations

import functools
import importlib
import operator
import os
import pickle
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import FunctionType, TracebackType
from typing import Any

from .errors import EntrypointError, LaunchFailed, TorchrunConfigError, WorkerFailed
from .launch_spec import FUNCTION_WORKER, LaunchSpec, Request
from .launch_state import CONTROL
from .transfer import (
    PATIENCE_S,
    RAISED_PATIENCE_S,
    Step,
    Transfer,
    TransferFailed,
    ValueStore,
    patience_for,
    size_text,
)
from .values import ValuesOnDisk

INITS = ("gloo", "nccl", "auto")
# The names are agreed with function_worker.py.
_CALL, _VALUES = "call.pkl", "values"
_RETURNED, _RAISED = "returned-{}.pkl", "raised-{}.pkl"
# Values that a store may load at the same time; all at once would need disk space for all twice.
_LOADED_AT_ONCE = 64
# How a worker ends that has raised: by its traceback, or by whatever spoilt the words or the exit after it.
_RAISING = frozenset({"exception", "exit", "signal"})


class FunctionCall:
    """One function launched on all nodes; a context manager, at whose end its files are gone.

    Parameters
    ----------
    function : callable
        What every rank calls.
    arguments : mapping, sequence or None
        Its keyword arguments, or its positional ones.
    init : {"gloo", "nccl", "auto"} or None
        Which process group the workers make before the call; None makes none.
    gather : bool
        Whether the control node gets the values of all ranks.
    store : ValueStore or None
        Carries values between nodes; None for a gang of one.

    Raises
    ------
    EntrypointError
        If function or arguments can't be pickled.
    TorchrunConfigError
        If an argument is of the wrong kind.
    LaunchFailed
        If the folder for temporary files can't take it.
    """

    def __init__(
        self, function: Callable[..., Any], arguments: Any, init: str | None, gather: bool, store: ValueStore | None
    ) -> None:
        if init is not None and init not in INITS:
            raise TorchrunConfigError(f"run(init={init!r}) must be one of {', '.join(INITS)}, or left out.")
        args, kwargs = _as_call(arguments)
        self.gather = gather
        self._store = store
        self.name = _name_of(function)
        self.source = _source_of(function)
        self.folder = ""
        try:
            self.folder = os.path.abspath(tempfile.mkdtemp(prefix="torchrun-call-"))
            with open(os.path.join(self.folder, _CALL), "wb") as file:
                pickle.dump({"path": _search_path(), "init": init, **_program()}, file)
                _dump_call((function, args, kwargs), self.name, file)
        except OSError as error:
            self.close()
            raise _no_place(self.name, error) from error
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> FunctionCall:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove the files."""
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def command(self) -> tuple[str, list[str]]:
        """The script that makes the call in a worker, and its arguments."""
        return FUNCTION_WORKER, [self.folder]

    def fit(self, spec: LaunchSpec) -> LaunchSpec:
        """Return `spec` as the launch of this function.

        Raises
        ------
        TorchrunConfigError
            If it is torchrun's own elasticity that is asked for.
        """
        if spec.min_nodes is not None:
            raise TorchrunConfigError(
                "torchrun's own elasticity (nnodes='MIN:MAX') gives ranks out anew while it runs, so a function's values "
                "would be nobody's. Launch a script with it, or the function with max_restarts."
            )
        return replace(spec, function=self.name, source=self.source)

    # --- called around each generation of workers -------------------------------------------------

    def begin(self) -> None:
        """Forget what workers of a former generation have left."""
        shutil.rmtree(os.path.join(self.folder, _VALUES), ignore_errors=True)
        os.makedirs(os.path.join(self.folder, _VALUES))

    def upload(self, ranks: Sequence[int], node: int, ok: bool) -> Transfer | None:
        """Return what stores what other nodes need of `ranks`; None if there is nothing to store.

        After a failure that is what they raised, with `gather` what they returned. Its results are a key for each
        global rank, which is text as in all messages.
        """
        store = self._store
        if store is None or (ok and (node == CONTROL or not self.gather)):
            return None
        sizes = {}
        for rank in ranks:
            with suppress(FileNotFoundError):
                sizes[rank] = os.path.getsize(self._path(_RETURNED if ok else _RAISED, rank))
        if not sizes:
            return None

        def save(rank: int) -> dict[str, str]:
            with open(self._path(_RETURNED if ok else _RAISED, rank), "rb") as file:
                return {str(rank): store.save(file.read())}

        def save_all() -> dict[str, str]:
            return {name: key for rank in sizes for name, key in save(rank).items()}

        steps = [Step(f"what its ranks raised ({size_text(sum(sizes.values()))})", save_all, RAISED_PATIENCE_S)]
        if ok:
            steps = [
                Step(f"rank {rank}'s value ({size_text(size)})", partial(save, rank), patience_for(size), rank)
                for rank, size in sizes.items()
            ]
        return Transfer(store, "stores", steps, vital=ok)

    # --- called at the end ------------------------------------------------------------------------

    def returned(
        self, ranks: Sequence[int], uploaded: Mapping[str, str], note: Callable[[str], None]
    ) -> Mapping[int, bytes]:
        """Return the pickled values of this node's `ranks` and of those that were uploaded for this node.

        Raises
        ------
        TransferFailed
            If they can't be had from the datastore; `note` is told what takes long.
        """
        values = ValuesOnDisk()
        for rank in ranks:
            values.take(rank, self._path(_RETURNED, rank))
        store, ranks_of = self._store, dict[str, list[int]]()
        for name, key in uploaded.items():
            ranks_of.setdefault(key, []).append(int(name))
        if store is None or not ranks_of:
            return values

        def load(keys: Sequence[str]) -> dict[str, str]:
            for key, data in store.load(keys):
                values.add(ranks_of[key], data)
            return {}

        keys = list(ranks_of)
        lists = [keys[start : start + _LOADED_AT_ONCE] for start in range(0, len(keys), _LOADED_AT_ONCE)]
        what = f"the values of {len(uploaded)} ranks" if len(uploaded) > 1 else f"rank {next(iter(uploaded))}'s value"
        steps = [Step(what, partial(load, some), len(some) * PATIENCE_S) for some in lists]
        Transfer(store, "loads", steps).wait(note)
        return values

    def original(self, error: LaunchFailed, deposited: Mapping[str, str]) -> BaseException:
        """Return what the failed worker has raised, as it was, or the reason why that can't be had.

        Parameters
        ----------
        error : LaunchFailed
            The gang's verdict.
        deposited : mapping
            Where the failed ranks' exceptions were deposited.

        Returns
        -------
        BaseException
            The worker's exception with rank and node in its notes; `WorkerFailed` if it can't be pickled or
            unpickled; `error` itself if the failure was no exception.
        """
        cause = error.cause or {}
        if type(error) is not LaunchFailed or cause.get("kind") not in _RAISING or cause.get("rank") is None:
            return error
        data, key = self._read(_RAISED, cause["rank"]), deposited.get(str(cause["rank"]))
        if data is None and key is not None and self._store is not None:
            data = self._loaded(key)
        if data is None:
            return WorkerFailed(error.message, error.cause) if cause["kind"] == "exception" else error
        report = pickle.loads(data)  # noqa: S301 - our own workers', through the run's datastore
        exception, why = _unpickled(report)
        if exception is None:
            because = f"\nIt is told in words because {why}." if why else ""
            return WorkerFailed(f"{report['text']}\n{error.message}{because}", error.cause)
        note = f"raised by rank {cause['rank']} on node {cause['node']} (host {cause['host']})"
        # add_note() came with Python 3.11, and an exception may forbid to set attributes (frozen dataclasses).
        vars(exception)["__notes__"] = [*getattr(exception, "__notes__", ()), note]
        return exception

    def _loaded(self, key: str) -> bytes | None:
        """Return what was stored under `key`, unless the store takes long."""
        store = self._store
        assert store is not None
        step = Step("what a rank raised", lambda: dict(store.load([key])), RAISED_PATIENCE_S)
        with suppress(TransferFailed):
            return bytes(Transfer(store, "loads", [step]).wait(lambda line: None)[key])
        return None

    def _path(self, name: str, rank: int) -> str:
        return os.path.join(self.folder, _VALUES, name.format(rank))

    def _read(self, name: str, rank: int) -> bytes | None:
        with suppress(OSError), open(self._path(name, rank), "rb") as file:
            return file.read()
        return None


def refuse_for_scripts(init: str | None, gather: bool) -> None:
    """Raise for arguments that only a function can be launched with.

    Raises
    ------
    TorchrunConfigError
        If there is any.
    """
    for name, value in (("init", init), ("gather", gather)):
        if value:
            raise TorchrunConfigError(
                f"run({name}={value!r}) is for functions; a script makes its process group and stores its results itself."
            )


def refuse_for_functions(request: Request) -> None:
    """Raise for arguments that only a script can be launched with.

    Raises
    ------
    TorchrunConfigError
        If there is any.
    """
    for name in ("module", "no-python", "run-path"):
        if name in request.options or (name == "module" and request.module):
            raise TorchrunConfigError(f"{name} says how to run a script, but the entrypoint is a function; remove it.")


def _no_place(name: str, error: OSError) -> LaunchFailed:
    host = socket.gethostname()
    return LaunchFailed(
        f"{name} and its arguments could not be written on host {host}: {error}. They go to the folder for temporary files, "
        "which must exist, be writable and have room for them; TMPDIR says where it is."
    )


def _as_call(arguments: Any) -> tuple[list[Any], dict[str, Any]]:
    if arguments is None:
        return [], {}
    if isinstance(arguments, Mapping):
        wrong = [key for key in arguments if not isinstance(key, str)]
        if wrong:
            raise TorchrunConfigError(
                f"entrypoint_args of a function are its keyword arguments, but {wrong[0]!r} is no name."
            )
        return [], dict(arguments)
    if isinstance(arguments, Sequence) and not isinstance(arguments, (str, bytes)):
        return list(arguments), {}
    raise TorchrunConfigError(
        f"entrypoint_args is a {type(arguments).__name__}, but for a function it must be a dict (keyword arguments) or a "
        "list (positional ones)."
    )


def _inner(function: Callable[..., Any]) -> Any:
    return function.func if isinstance(function, functools.partial) else function


def _name_of(function: Callable[..., Any]) -> str:
    inner = _inner(function)
    return str(getattr(inner, "__qualname__", type(inner).__qualname__))


def _source_of(function: Callable[..., Any]) -> str | None:
    """Return the file with the function's code; nodes whose files differ are refused."""
    inner = _inner(function)
    module = sys.modules.get(getattr(inner, "__module__", None) or type(inner).__module__)
    path = getattr(module, "__file__", None)
    return path if path is not None and os.path.isfile(path) else None


def _search_path() -> list[str]:
    """Return where this task looks for modules, so that workers find the same.

    Not every entry is a file or folder: editable installations have markers there for their import hooks.
    """
    return [os.path.abspath(entry) if os.path.exists(entry or os.curdir) else entry for entry in sys.path]


def _program() -> dict[str, str | None]:
    """Return the file of this program, the flow, and its package; None in a notebook or a shell."""
    main = sys.modules.get("__main__")
    path: str | None = getattr(main, "__file__", None)
    file = os.path.abspath(path) if path is not None and os.path.isfile(path) else None
    return {"main": file, "package": getattr(main, "__package__", None)}


def _dump_call(call: tuple[Any, ...], name: str, file: Any) -> None:
    """Pickle the call, by reference where that goes: a worker then imports what the task has imported."""
    start = file.tell()
    try:
        _ByReference(file, protocol=pickle.HIGHEST_PROTOCOL).dump(call)
        return
    except OSError:
        raise  # the disk's failure, not the function's
    except Exception as error:
        problem = error
        file.seek(start)
        file.truncate()
    _refuse_flow(call[0], problem)
    try:
        pickler = _cloud_pickler()
    except ImportError:
        raise EntrypointError(
            f"{name} and its arguments can't be pickled ({type(problem).__name__}: {problem}). Define the function at the "
            "top level of the flow file or of a module beside it and pass it data, or install cloudpickle in the step's "
            "environment: it can carry lambdas and closures."
        ) from problem
    try:
        pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(call)
    except OSError:
        raise
    except Exception as error:
        raise EntrypointError(
            f"{name} and its arguments can't be pickled, with cloudpickle neither ({type(error).__name__}: {error}). Pass "
            "data instead of open files, locks, connections, or the flow itself (self)."
        ) from error


def _refuse_flow(function: Callable[..., Any], problem: Exception) -> None:
    """Raise for a method of the flow object, which nothing can carry.

    Raises
    ------
    EntrypointError
        If it is one.
    """
    owner = getattr(_inner(function), "__self__", None)
    if any(base.__module__ == "metaflow.flowspec" for base in type(owner).__mro__):
        raise EntrypointError(
            f"{_name_of(function)} is a method of the flow, and a flow can't be sent to the workers. Make it a function at "
            "the top level of the flow file, or a @staticmethod, and pass what it needs of self as arguments."
        ) from problem


class _ByReference(pickle.Pickler):
    """Names functions and classes; refuses those of a program that has no file to import them from."""

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, (type, FunctionType)) and thing.__module__ == "__main__" and _program()["main"] is None:
            raise pickle.PicklingError(f"{thing.__qualname__} is of this program, which has no file to import it from")
        return NotImplemented


def _cloud_pickler() -> Any:
    """Return cloudpickle's pickler, save that what stands in the program's file goes by name.

    So that it is the same in a worker as here: cloudpickle itself would take a copy of it along.
    """
    cloudpickle = importlib.import_module("cloudpickle")

    class CloudPickler(cloudpickle.Pickler):  # type: ignore[misc, name-defined]
        def reducer_override(self, thing: Any) -> Any:
            return thing.__qualname__ if _is_of_file(thing) else super().reducer_override(thing)

    return CloudPickler


def _is_of_file(thing: Any) -> bool:
    """Tell whether `thing` is a function or class that importing this program's file would give."""
    is_of_main = isinstance(thing, (type, FunctionType)) and thing.__module__ == "__main__"
    if not is_of_main or _program()["main"] is None:
        return False
    try:
        return operator.attrgetter(thing.__qualname__)(sys.modules["__main__"]) is thing
    except AttributeError:
        return False


def _unpickled(report: Mapping[str, Any]) -> tuple[BaseException | None, str]:
    """Return the exception that a worker has left, or None and why it can't be had."""
    if report["exception"] is None:
        return None, report.get("why", "")
    try:
        exception = pickle.loads(report["exception"])  # noqa: S301 - as above
    except Exception as problem:
        return None, (
            f"the exception can't be unpickled ({type(problem).__name__}: {problem}). What its __init__ takes must go to "
            "super().__init__(), too, or into a __reduce__; and its class must be importable in the task"
        )
    return (exception, "") if isinstance(exception, BaseException) else (None, "its __reduce__ makes no exception")
