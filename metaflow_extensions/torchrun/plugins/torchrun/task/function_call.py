"""The task's side of a function as entrypoint: sends the call to the workers and collects their results.

The function and its arguments go to the workers (`function_worker`) as a file in a folder of this call. Each worker writes
what it returned or raised into a file there. Between nodes, values go through Metaflow's datastore; the gang's channel
carries only their keys.
"""

from __future__ import annotations

import inspect
import os
import pickle
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

from ..compat.datastore import DatastoreValues
from ..errors import EntrypointError, LaunchFailed, TorchrunConfigError, TorchrunError, WorkerFailed
from ..gang.cause import cause_of, failure_of, retold
from ..gang.messages import CONTROL
from ..gang.wire import Plain
from ..parsing import did_you_mean
from ..settings import RunSettings
from ..supervisor.call import Call, FunctionSpec
from ..texts import names, size_text
from ..worker import function_worker as worker
from .arguments import dict_or_list
from .transfer import PATIENCE_S, Begin, ToTell, Transfer, TransferFailed, do_within

FUNCTION_WORKER = os.path.abspath(worker.__file__)
# How long storing or loading a raised exception may take. Without it there is still its text, so the limit is short.
RAISED_PATIENCE_S = 10.0
# The causes with which a worker that has raised may end: also an exit code or a signal, if something disturbs its exit.
_RAISING = frozenset({"exception", "exit", "signal"})


class FunctionCall:
    """The function of a call of `run`, launched on all nodes; `store` carries values between them, None in a gang of one.

    Raises TorchrunConfigError for what does not go with a function.
    """

    def __init__(self, run: RunSettings, store: DatastoreValues | None) -> None:
        for name, is_set in (("module", run.module), ("no-python", "no-python" in run.options)):
            if is_set:
                raise TorchrunConfigError(
                    f"{name} says how to run a script, but the entrypoint is a function; remove it."
                )
        forms = "for a function it must be a dict (keyword arguments) or a list (positional ones)"
        given = dict_or_list(run.entrypoint_args, "entrypoint_args", forms)
        function: Any = run.entrypoint
        call = (function, [], dict(given)) if isinstance(given, Mapping) else (function, given, {})
        inner = function.func if isinstance(function, partial) else function
        _check_call(inner, *call)
        name = str(getattr(inner, "__qualname__", type(inner).__qualname__))
        self._gather = run.gather  # the control node gets the values of all ranks
        self._store, self.stores = store, store is not None
        self.folder = _written(call, inner, name, run.process_group)
        # What torchrun runs, as fields of `Call`; the nodes compare the file with the function's code.
        spec = FunctionSpec(name, os.path.join(self.folder, worker.VALUES), run.gather)
        self.program: dict[str, Any] = {"entrypoint": FUNCTION_WORKER, "args": (self.folder,), "function": spec}
        self.program["source"] = _source_of(inner)

    @classmethod
    def of(cls, run: RunSettings, store: DatastoreValues | None) -> FunctionCall | None:
        """Return the call, where the entrypoint is a function; raises TorchrunConfigError for what a script does itself."""
        if callable(run.entrypoint):
            return cls(run, store)
        if run.process_group or run.gather:
            said = f"process_group={run.process_group!r}" if run.process_group else f"gather={run.gather!r}"
            raise TorchrunConfigError(
                f"run({said}) is for functions; a script makes its process group and stores its results itself."
            )
        return None

    def close(self) -> None:
        """Remove the files."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def to_store(self, call: Call, error: TorchrunError | None) -> Callable[[Begin], ToTell] | None:
        """Return what stores the values for the control node, or what the rank that is the cause has raised, for all."""
        store, cause = self._store, cause_of(error)
        if store is None or (error is None and (call.node_index == CONTROL or not self._gather)):
            return None
        kind, name = ("value", worker.RETURNED) if error is None else ("exception", worker.RAISED)
        wanted = [rank for rank in call.ranks if error is None or (cause is not None and rank == cause.rank)]
        paths = {rank: path for rank in wanted if (path := self._path(name, rank)).exists()}

        def do(begin: Begin) -> ToTell:
            keys = {}
            for rank, path in paths.items():
                size = path.stat().st_size
                patience_s = PATIENCE_S if error is None else RAISED_PATIENCE_S
                begin(f"rank {rank}'s {kind} ({size_text(size)})", size, patience_s)
                keys[str(rank)] = store.save(path.read_bytes())
            return keys, []

        return do if paths else None

    def _path(self, name: str, rank: int) -> Path:
        return Path(worker.path_of(self.folder, name, rank))

    # --- at the end -------------------------------------------------------------------------------

    def result(self, call: Call, told: Plain) -> Mapping[str, Any]:
        """Return the values of this node's ranks and of those stored for it."""
        values, is_control = {}, call.node_index == CONTROL
        for rank in call.ranks:
            with suppress(FileNotFoundError):  # it has ended by sys.exit()
                values[rank] = self._path(worker.RETURNED, rank).read_bytes()
        if not is_control:  # for a task that has come in the place of another, as in `outputs`
            told = {rank: key for rank, key in told.items() if int(rank) in call.ranks}
        if (store := self._store) is not None and told:
            found, keys = dict[str, bytes](), list(dict.fromkeys(told.values()))
            what = f"the value of {names(map(int, told), 'rank')}"

            def do(begin: Begin) -> None:
                begin(what, patience_s=len(keys) * PATIENCE_S)
                found.update(store.load(keys))

            load = Transfer(do)
            load.await_end()
            if (problem := load.problem()) is not None:
                raise TransferFailed(f"{what} could not be loaded from {store.where} {problem}")
            values |= {int(rank): found[key] for rank, key in told.items()}
        return {"values": dict(sorted(values.items())), "gathered": self._gather and is_control}

    def original(self, error: LaunchFailed, told: Plain) -> BaseException:
        """Return what `run` raises: the worker's exception, `WorkerFailed` if it can't be had, or `error` itself."""
        failure = failure_of(error)
        if type(error) is not LaunchFailed or failure is None:
            return error
        cause = failure.cause
        if cause.kind not in _RAISING or cause.rank is None:
            return error
        data = self._raised(cause.rank, told.get(str(cause.rank)))
        if data is None:
            return retold(error, WorkerFailed) if cause.kind == "exception" else error
        exception = _unpickled(data)
        if isinstance(exception, str):
            return retold(error, WorkerFailed, f"\n{exception}")
        place = f" at {cause.place}" if cause.place else ""
        with suppress(Exception):  # whatever its class does about attributes
            notes = getattr(exception, "__notes__", [])  # as `add_note` does (from Python 3.11)
            BaseException.__setattr__(exception, "__notes__", [*notes, f"raised{place} by {failure.who}"])
        return exception

    def _raised(self, rank: int, key: str | None) -> bytes | None:
        """Return what a rank raised, from this node's disk or from the store; None if there is nothing, or it takes long."""
        with suppress(OSError):
            return self._path(worker.RAISED, rank).read_bytes()
        store, found = self._store, list[bytes]()
        if store is not None and key is not None:
            do_within(lambda: found.extend(dict(store.load([key])).values()), RAISED_PATIENCE_S)
        return found[0] if found else None


def _check_call(inner: Any, function: Any, args: Any, kwargs: Any) -> None:
    """Refuse arguments that a function or method can't take, before any worker starts; a class shows it when it is called."""
    # A decorator may add arguments to those of what it wraps, whose `__signature__` it may have copied.
    if isinstance(inner, FunctionType | MethodType) and not hasattr(inner, "__signature__"):
        try:
            inspect.signature(function, follow_wrapped=False).bind(*args, **kwargs)
        except (TypeError, ValueError) as error:  # ValueError: a partial has arguments that the function can't take
            takes = list(inspect.signature(inner, follow_wrapped=False).parameters)
            hint = "".join(
                ("" if repr(name) in str(error) else f" It has no {name!r}.") + did_you_mean(name, takes)
                for name in kwargs
                if name not in takes
            )
            raise TorchrunConfigError(
                f"The function {inner.__qualname__} can't take these entrypoint_args: {error}.{hint} Its arguments: "
                f"{', '.join(takes) or 'none'}."
            ) from None


def _source_of(inner: Any) -> str | None:
    """Return the file with a function's code; nodes whose files differ are refused."""
    module = sys.modules.get(getattr(inner, "__module__", None) or type(inner).__module__)
    path = getattr(module, "__file__", None)
    return path if path is not None and os.path.isfile(path) else None


def _written(call: tuple[Any, ...], inner: Any, name: str, process_group: str | None) -> str:
    """Return the folder of a call, with the call in it."""
    owner = getattr(inner, "__self__", None)
    is_flow = any(base.__module__ == "metaflow.flowspec" for base in type(owner).__mro__)
    if is_flow and not isinstance(owner, type):
        raise EntrypointError(
            f"{name} is a method of the flow, and a flow can't be sent to the workers. Make it a function at "
            "the top level of the flow file, or a @staticmethod, and pass what it needs of self as arguments."
        )
    package = getattr(sys.modules.get("__main__"), "__package__", None)
    # Not every entry of the path is there: editable installations have markers for their import hooks.
    path = [os.path.abspath(each) if os.path.exists(each or os.curdir) else each for each in sys.path]
    header = {"path": path, "main": worker.main_file(), "package": package, "cells": worker.cells()}
    folder = ""
    try:
        folder = os.path.abspath(tempfile.mkdtemp(prefix="torchrun-call-"))
        with open(os.path.join(folder, worker.CALL), "wb") as file:
            pickle.dump({**header, "process_group": process_group}, file)
            _dump(call, name, file)
        return folder
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        raise LaunchFailed(
            f"{name} and its arguments could not be written on host {socket.gethostname()}: {error}. They go to the "
            "folder for temporary files, which must exist, be writable and have room for them; TMPDIR says where it is."
        ) from error


def _dump(call: tuple[Any, ...], name: str, file: Any) -> None:
    """Pickle the call, by reference where that goes: a worker then imports what the task has imported."""
    try:
        worker.dump(call, file)
    except (OSError, TorchrunError):
        raise  # a failure of the disk, or news of the gang: not the function's fault
    except Exception as error:
        what, problem, fails = _what_fails(call, name), worker.words_of(error), "can't be pickled"
        remedy = (
            "Define the function at the top level of the flow file or of a module beside it (from a notebook: of a module) "
            "and pass it data, or install cloudpickle in the step's environment: it can carry lambdas, closures and cells."
        )
        if worker.find_cloud_pickler() is not None:
            fails = "can't be pickled, with cloudpickle neither"
            remedy = "Pass data instead of open files, locks, connections, or the flow itself (self)."
        raise EntrypointError(f"{what} {fails} ({problem}). {remedy}") from error


def _what_fails(call: tuple[Any, ...], name: str) -> str:
    """Return the function or the argument that can't be pickled, with its type."""
    _, args, kwargs = call
    for key, value in (*enumerate(args), *kwargs.items()):
        try:
            with open(os.devnull, "wb") as nowhere:
                worker.dump(value, nowhere)
        except TorchrunError:
            raise  # as above
        except Exception:
            return f"entrypoint_args[{key!r}] of {name}, a {type(value).__module__}.{type(value).__qualname__},"
    return name


def _unpickled(data: bytes) -> BaseException | str:
    """Return a worker's exception, or a sentence why it can't be had."""
    try:
        found = pickle.loads(data)  # noqa: S301 - our own workers', through the run's datastore
    except Exception as problem:
        return (
            f"The exception itself can't be unpickled here ({worker.words_of(problem)}). What its __init__ takes must go to "
            "super().__init__(), too, or into a __reduce__; and its class must be importable in the task."
        )
    return found if isinstance(found, BaseException | str) else "The exception's __reduce__ makes no exception."
