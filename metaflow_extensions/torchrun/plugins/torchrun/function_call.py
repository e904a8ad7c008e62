"""A Python function as entrypoint, seen from the task: how it gets to the workers and what comes back.

Everything travels through files in a folder of this call: the function and its arguments to the workers
(`function_worker`), and what each returned or raised back. To other nodes it travels through
Metaflow's datastore; the gang's channel carries keys only.
"""

from __future__ import annotations

import functools
import importlib
import io
import os
import pickle
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Protocol

from .errors import EntrypointError, LaunchFailed, TorchrunConfigError, WorkerFailed
from .launch_spec import FUNCTION_WORKER, Request
from .launch_state import CONTROL

INITS = ("gloo", "nccl", "auto")
# The names are agreed with function_worker.py.
_CALL, _VALUES = "call.pkl", "values"
_RETURNED, _RAISED = "returned-{}.pkl", "raised-{}.pkl"


class ValueStore(Protocol):
    """What carries values from node to node."""

    def save(self, data: bytes) -> str:
        """Store `data` and return its key."""

    def load(self, key: str) -> bytes:
        """Return what was stored under `key`."""


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
    """

    def __init__(
        self, function: Callable[..., Any], arguments: Any, init: str | None, gather: bool, store: ValueStore | None
    ) -> None:
        if init is not None and init not in INITS:
            raise TorchrunConfigError(f"run(init={init!r}) must be one of {', '.join(INITS)}, or left out.")
        args, kwargs = _as_call(arguments)
        self._gather = gather
        self._store = store
        self.name = _name_of(function)
        self.source = _source_of(function)
        self.folder = tempfile.mkdtemp(prefix="torchrun-call-")
        try:
            with open(os.path.join(self.folder, _CALL), "wb") as file:
                pickle.dump({"path": _search_path(), "main": _main_file(), "init": init}, file)
                _dump_call((function, args, kwargs), self.name, file)
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

    # --- called around each generation of workers -------------------------------------------------

    def begin(self) -> None:
        """Forget what workers of a former generation have left."""
        shutil.rmtree(os.path.join(self.folder, _VALUES), ignore_errors=True)
        os.makedirs(os.path.join(self.folder, _VALUES))

    def deposit(self, ranks: Sequence[int], node: int, ok: bool) -> dict[str, dict[str, str]]:
        """Store what other nodes need: after a failure what was raised, with `gather` what was returned.

        Returns
        -------
        dict
            ``"raised"`` or ``"returned"``: global rank, as text -> key.
        """
        if self._store is None or (ok and (node == CONTROL or not self._gather)):
            return {}
        keys = {}
        for rank in ranks:
            data = self._read(_RETURNED if ok else _RAISED, rank)
            if data is None:
                continue
            try:
                keys[str(rank)] = self._store.save(data)
            except Exception:
                if ok:
                    raise  # values would be missing; of a failure there are words enough
        return {"returned" if ok else "raised": keys}

    # --- called at the end ------------------------------------------------------------------------

    def returned(self, ranks: Sequence[int], deposited: Mapping[str, str], is_control: bool) -> dict[int, bytes]:
        """Return the pickled values: those of this node's `ranks`, and on the control node the gathered ones."""
        values = {rank: self._read(_RETURNED, rank) for rank in ranks}
        if is_control and self._gather and self._store is not None:
            values.update({int(rank): self._store.load(key) for rank, key in deposited.items()})
        return {rank: value for rank, value in sorted(values.items()) if value is not None}

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
        if cause.get("kind") != "exception" or cause.get("rank") is None:
            return error
        data, key = self._read(_RAISED, cause["rank"]), deposited.get(str(cause["rank"]))
        if data is None and key is not None and self._store is not None:
            with suppress(Exception):
                data = self._store.load(key)
        if data is None:
            return WorkerFailed(error.message, error.cause)
        report = pickle.loads(data)  # noqa: S301 - our own workers', through the run's datastore
        exception = _loaded(report["exception"])
        if exception is None:
            return WorkerFailed(f"{report['text']}\n{error.message}", error.cause)
        notes = [
            *getattr(exception, "__notes__", ()),
            f"raised by rank {cause['rank']} on node {cause['node']} (host {cause['host']})",
        ]
        exception.__notes__ = notes  # add_note() came with Python 3.11
        return exception

    def _read(self, name: str, rank: int) -> bytes | None:
        with suppress(OSError), open(os.path.join(self.folder, _VALUES, name.format(rank)), "rb") as file:
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


def _name_of(function: Callable[..., Any]) -> str:
    inner = function.func if isinstance(function, functools.partial) else function
    return str(getattr(inner, "__qualname__", type(inner).__qualname__))


def _source_of(function: Callable[..., Any]) -> str | None:
    """Return the file with the function's code; nodes whose files differ are refused."""
    inner = function.func if isinstance(function, functools.partial) else function
    module = sys.modules.get(getattr(inner, "__module__", None) or type(inner).__module__)
    path = getattr(module, "__file__", None)
    return path if path is not None and os.path.isfile(path) else None


def _search_path() -> list[str]:
    """Return where this task looks for modules, so that workers find the same.

    Not every entry is a folder: editable installations have markers there for their import hooks.
    """
    return [os.path.abspath(entry) if os.path.isdir(entry or os.curdir) else entry for entry in sys.path]


def _main_file() -> str | None:
    """Return the file of this program, the flow; None in a notebook or a shell."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    return os.path.abspath(path) if path is not None and os.path.isfile(path) else None


def _dump_call(call: tuple[Any, ...], name: str, file: Any) -> None:
    """Pickle the call, by reference where that goes: a worker then imports what the task has imported."""
    start = file.tell()
    problem: Exception | None = None
    if _main_file() is not None or not _is_of_main(call[0]):
        try:
            pickle.dump(call, file, protocol=pickle.HIGHEST_PROTOCOL)
            return
        except Exception as error:
            problem = error
            file.seek(start)
            file.truncate()
    try:
        importlib.import_module("cloudpickle").dump(call, file)
    except ImportError:
        reason = (
            f"{type(problem).__name__}: {problem}"
            if problem is not None
            else "this program has no file to import it from"
        )
        raise EntrypointError(
            f"{name} and its arguments can't be pickled ({reason}). Define the function at the top level of the flow file or "
            "of a module beside it, or install cloudpickle in the step's environment: it can carry lambdas and closures."
        ) from problem
    except Exception as error:
        raise EntrypointError(
            f"{name} and its arguments can't be pickled, with cloudpickle neither ({type(error).__name__}: {error}). Pass "
            "data instead of open files, locks, connections, or the flow itself (self)."
        ) from error


def _is_of_main(function: Any) -> bool:
    inner = function.func if isinstance(function, functools.partial) else function
    return getattr(inner, "__module__", None) == "__main__"


def _loaded(data: bytes | None) -> BaseException | None:
    if data is None:
        return None
    with suppress(Exception):
        exception = pickle.Unpickler(io.BytesIO(data)).load()  # noqa: S301 - as above
        return exception if isinstance(exception, BaseException) else None
    return None
