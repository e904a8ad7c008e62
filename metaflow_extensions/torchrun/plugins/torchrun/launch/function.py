"""A Python function as entrypoint, seen from the task: how it gets to the workers and what comes back.

The function and its arguments go to the workers (`worker/function_worker`) through files in a folder of this call, and
what each worker has returned or raised comes back through others. Between nodes, values go through Metaflow's datastore;
the gang's channel carries their keys only.
"""

from __future__ import annotations

import os
import pickle
import shutil
import socket
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import EntrypointError, LaunchFailed, TorchrunConfigError, TorchrunError, WorkerFailed
from ..gang.cause import cause_of, retold
from ..gang.protocol import CONTROL
from ..gang.texts import size_text
from ..worker.function_worker import (
    CALL,
    RAISED,
    RETURNED,
    VALUES,
    dump,
    find_cloud_pickler,
    main_file,
    path_of,
    words_of,
)
from .arguments import dict_or_list, torchrun_options
from .command import SCRIPTS
from .spec import FunctionSpec
from .transfer import (
    PATIENCE_S,
    RAISED_PATIENCE_S,
    Step,
    Transfer,
    TransferFailed,
    ValueStore,
    patience_for,
)
from .values import ValuesOnDisk, make_folder

# What torchrun runs where the entrypoint is a function.
FUNCTION_WORKER = os.path.join(SCRIPTS, "function_worker.py")
INITS = ("gloo", "nccl", "auto")  # which process group the workers make before the call; None makes none
# How many values a store may load at once. All at once would need twice the disk space.
_LOADED_AT_ONCE = 64
# How the end of a worker that has raised may look: if something disturbs its exit, as an exit code or a signal.
_RAISING = frozenset({"exception", "exit", "signal"})


class FunctionCall:
    """One function launched on all nodes; `close` removes its files."""

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Any,
        init: str | None,
        gather: bool,
        store: ValueStore | None,
        current: bytes | None = None,
    ) -> None:
        if init is not None and init not in INITS:
            raise TorchrunConfigError(f"run(init={init!r}) must be one of {', '.join(INITS)}, or left out.")
        args, kwargs = _as_call(arguments)
        self.gather = gather  # whether the control node gets the values of all ranks
        self._store = store  # carries values between nodes; None for a gang of one
        inner = function.func if isinstance(function, partial) else function
        name = str(getattr(inner, "__qualname__", type(inner).__qualname__))
        self.folder = ""
        self._has_result = False  # which keeps the folder, with the values in it
        try:
            self.folder = make_folder()
            with open(os.path.join(self.folder, CALL), "wb") as file:
                package = getattr(sys.modules.get("__main__"), "__package__", None)
                header = {"path": _search_path(), "init": init, "main": main_file(), "package": package}
                pickle.dump({**header, "current": current}, file)
                _dump_call((function, args, kwargs), getattr(inner, "__self__", None), name, file)
        except BaseException as error:
            self.close()
            if not isinstance(error, OSError):
                raise
            raise LaunchFailed(
                f"{name} and its arguments could not be written on host {socket.gethostname()}: {error}. They go to "
                "the folder for temporary files, which must exist, be writable and have room for them; TMPDIR says where "
                "it is."
            ) from error

        self.spec = FunctionSpec(name, FUNCTION_WORKER, self.folder, _source_of(inner))

    def close(self) -> None:
        """Remove the files, but for the values that a result has."""
        if not self._has_result:
            shutil.rmtree(self.folder, ignore_errors=True)
            return
        with suppress(OSError):
            os.unlink(os.path.join(self.folder, CALL))

    # --- called around each generation of workers -------------------------------------------------

    def begin(self) -> None:
        """Forget what workers of a former generation have left."""
        shutil.rmtree(os.path.join(self.folder, VALUES), ignore_errors=True)
        os.makedirs(os.path.join(self.folder, VALUES))

    def upload(self, ranks: Sequence[int], node: int, ok: bool) -> list[Step]:
        """Return the steps that store what other nodes need of `ranks` (rank -> key); none if that is nothing."""
        store = self._store
        if store is None or (ok and (node == CONTROL or not self.gather)):
            return []
        paths = {rank: path_of(self.folder, RETURNED if ok else RAISED, rank) for rank in ranks}
        sizes = {rank: os.path.getsize(path) for rank, path in paths.items() if os.path.exists(path)}
        if not sizes:
            return []

        def save(some: Iterable[int]) -> dict[int, str]:
            return {rank: store.save(Path(paths[rank]).read_bytes()) for rank in some}

        if not ok:
            what = f"what its ranks raised ({size_text(sum(sizes.values()))})"
            return [Step(what, partial(save, sizes), RAISED_PATIENCE_S)]
        return [
            Step(f"rank {rank}'s value ({size_text(size)})", partial(save, [rank]), patience_for(size), rank)
            for rank, size in sizes.items()
        ]

    # --- called at the end ------------------------------------------------------------------------

    def returned(
        self, ranks: Sequence[int], uploaded: Mapping[int, str], note: Callable[[str], None]
    ) -> Mapping[int, bytes]:
        """Return the pickled values of this node's `ranks` and of those `uploaded` for it, or raise TransferFailed.

        The folder is the result's then.
        """
        values = ValuesOnDisk(self.folder)
        for rank in ranks:
            values.take(rank, path_of(self.folder, RETURNED, rank))
        self._load(values, uploaded, note)
        self._has_result = True
        return values

    def _load(self, values: ValuesOnDisk, uploaded: Mapping[int, str], note: Callable[[str], None]) -> None:
        store, ranks_of = self._store, dict[str, list[int]]()
        for rank, key in uploaded.items():
            ranks_of.setdefault(key, []).append(rank)
        if store is None or not ranks_of:
            return

        def load(keys: Sequence[str]) -> dict[str, str]:
            for key, data in store.load(keys):
                values.add(ranks_of[key], data)
            return {}

        keys = list(ranks_of)
        lists = [keys[start : start + _LOADED_AT_ONCE] for start in range(0, len(keys), _LOADED_AT_ONCE)]
        what = f"the values of {len(uploaded)} ranks" if len(uploaded) > 1 else f"rank {next(iter(uploaded))}'s value"
        steps = [Step(what, partial(load, some), len(some) * PATIENCE_S) for some in lists]
        Transfer(store, "loads", steps).wait(note)

    def original(self, error: LaunchFailed, stored: Mapping[int, str]) -> BaseException:
        """Return what `run` raises: the worker's exception, `WorkerFailed` if it can't be had, or `error` itself."""
        cause = cause_of(error)
        if type(error) is not LaunchFailed or cause is None or cause.kind not in _RAISING or cause.rank is None:
            return error
        data = self._raised(cause.rank, stored.get(cause.rank))
        if data is None:
            return retold(error, WorkerFailed) if cause.kind == "exception" else error
        report = pickle.loads(data)  # noqa: S301 - our own workers', through the run's datastore
        exception, why = _unpickled(report)
        if exception is None:
            because = f"\nIt is told in words because {why}." if why else ""
            return retold(error, WorkerFailed, f"{report['text']}\n", because)
        _add_note(exception, f"raised by rank {cause.rank} on node {cause.node} (host {cause.host})")
        return exception

    def _raised(self, rank: int, key: str | None) -> bytes | None:
        """Return what a rank has left of what it raised: on this node, or in the store, unless that takes long."""
        with suppress(OSError):
            return Path(path_of(self.folder, RAISED, rank)).read_bytes()
        store = self._store
        if store is None or key is None:
            return None
        step = Step("what a rank raised", lambda: dict(store.load([key])), RAISED_PATIENCE_S)
        with suppress(TransferFailed):
            return bytes(Transfer(store, "loads", [step]).wait(lambda line: None)[key])
        return None


def refuse_for_scripts(given: Mapping[str, Any]) -> None:
    """Raise for arguments that only a function can be launched with."""
    for name in ("init", "gather"):
        if value := given.get(name):
            raise TorchrunConfigError(
                f"run({name}={value!r}) is for functions; a script makes its process group and stores its results itself."
            )


def refuse_for_functions(given: Mapping[str, Any]) -> None:
    """Raise for arguments that only a script can be launched with."""
    options = torchrun_options(given.get("torchrun_args"))
    for name in ("module", "no-python", "run-path"):
        if name in options or given.get(name):
            raise TorchrunConfigError(f"{name} says how to run a script, but the entrypoint is a function; remove it.")


def _as_call(arguments: Any) -> tuple[list[Any], dict[str, Any]]:
    forms = "for a function it must be a dict (keyword arguments) or a list (positional ones)"
    given = dict_or_list(arguments, "entrypoint_args", forms)
    if not isinstance(given, Mapping):
        return given, {}
    for key in given:
        if not isinstance(key, str):
            raise TorchrunConfigError(
                f"entrypoint_args of a function are its keyword arguments, but {key!r} is no name."
            )
    return [], dict(given)


def _source_of(inner: Any) -> str | None:
    """Return the file with a function's code; nodes whose files differ are refused."""
    module = sys.modules.get(getattr(inner, "__module__", None) or type(inner).__module__)
    path = getattr(module, "__file__", None)
    return path if path is not None and os.path.isfile(path) else None


def _search_path() -> list[str]:
    """Return where this task looks for modules, so that workers find the same.

    Not every entry is a file or folder: editable installations have markers there for their import hooks.
    """
    return [os.path.abspath(entry) if os.path.exists(entry or os.curdir) else entry for entry in sys.path]


def _dump_call(call: tuple[Any, ...], owner: Any, name: str, file: Any) -> None:
    """Pickle the call, by reference where that goes: a worker then imports what the task has imported."""
    is_flow = any(base.__module__ == "metaflow.flowspec" for base in type(owner).__mro__)
    if is_flow and not isinstance(owner, type):
        raise EntrypointError(
            f"{name} is a method of the flow, and a flow can't be sent to the workers. Make it a function at "
            "the top level of the flow file, or a @staticmethod, and pass what it needs of self as arguments."
        )
    try:
        dump(call, file)
    except (OSError, KeyboardInterrupt, TorchrunError):
        raise  # the disk's failure, the user's wish, or news of the gang, and not the function's fault
    except BaseException as error:  # also an exit, in a __reduce__
        problem = words_of(error)
        if find_cloud_pickler() is None:
            raise EntrypointError(
                f"{name} and its arguments can't be pickled ({problem}). Define the function at the top level of the flow "
                "file or of a module beside it and pass it data, or install cloudpickle in the step's environment: it can "
                "carry lambdas and closures."
            ) from error
        raise EntrypointError(
            f"{name} and its arguments can't be pickled, with cloudpickle neither ({problem}). Pass data instead of open "
            "files, locks, connections, or the flow itself (self)."
        ) from error


def _add_note(exception: BaseException, note: str) -> None:
    """Do as `add_note` does, which came with Python 3.11, also where a class forbids to set attributes or hides them."""
    attributes = vars(BaseException)["__dict__"].__get__(exception)
    notes = attributes.get("__notes__", [])
    if isinstance(notes, list):
        attributes["__notes__"] = [*notes, note]


def _unpickled(report: Mapping[str, Any]) -> tuple[BaseException | None, str]:
    """Return the exception that a worker has left, or None and why it can't be had."""
    if report["exception"] is None:
        return None, report.get("why", "")
    try:
        exception = pickle.loads(report["exception"])  # noqa: S301 - as above
    except KeyboardInterrupt:
        raise  # somebody has pressed Ctrl-C
    except BaseException as problem:  # also an exit, in what its __reduce__ asks for
        return None, (
            f"the exception can't be unpickled ({words_of(problem)}). What its __init__ takes must go to "
            "super().__init__(), too, or into a __reduce__; and its class must be importable in the task"
        )
    return (exception, "") if isinstance(exception, BaseException) else (None, "its __reduce__ makes no exception")
