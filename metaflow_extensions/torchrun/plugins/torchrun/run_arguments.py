"""The calling convention of `run`: types of its arguments, which may be positional, and what `help` says of them.

`settings.SETTINGS` has the arguments. Metaflow imports this module whenever it is imported itself.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar, cast, get_type_hints

from .errors import TorchrunConfigError
from .parsing import did_you_mean
from .settings import ARGUMENTS, DEFAULTS

F = TypeVar("F", bound=Callable[..., Any])
# Arguments of metaflow-torchrun 0.2, in its order. They are accepted and have no effect.
LEGACY = ("push_results_dir_to_cloud", "local_output_dir", "cloud_output_dir")
KNOWN = frozenset({*ARGUMENTS, *LEGACY})


class RunOptions(TypedDict, total=False):
    """The arguments of `run` that are given by name, for type checkers."""

    # What to run.
    module: bool
    process_group: Literal["gloo", "nccl", "auto"] | None
    # Processes.
    nproc_per_node: int | str | None
    warm: Literal["agent", "workers", False] | None
    # Environment.
    env: Mapping[str, Any] | None
    cwd: Path | str | None
    before_run: Sequence[str | Sequence[Path | str]] | None
    # Failures.
    timeout_s: float | None
    max_restarts: int | None
    restart_on: str | Iterable[str] | None
    hang_timeout_s: float | None
    preemption_signal: str | int | None
    # Results.
    gather: bool
    outputs: Path | str | Sequence[Path | str] | None
    outputs_from: Literal["control", "all"] | None
    # Expert.
    torchrun_args: Mapping[str, Any] | Sequence[Any] | None
    master_port: int | str | None


# What `run` says of its arguments, in its docstring.
_DOCUMENTED = """
Parameters
----------
entrypoint : Union[str, os.PathLike[str], Sequence[Union[str, os.PathLike[str]]], Callable[..., Any]]
    *What to run.* A script: a relative path is searched in `cwd` (or the working directory), then beside the
    flow file. With `module`, the name of a module. Or a command as a list, such as ``["python", "-O", "x.py"]``:
    every rank runs it, as with torchrun's ``--no-python``; its program is searched in the workers' PATH or, if
    it is a path, like a script. Or a function that every rank calls: one of the flow file or of a module, a
    method, a `functools.partial`; with cloudpickle installed also a lambda or a closure.
entrypoint_args : Union[Mapping[str, Any], Sequence[Any]], optional
    Arguments of the script or command. In a dict, None or ``""`` makes a bare flag, True and False become
    ``true`` and ``false``, lists and dicts become JSON, all else its `str`. A value that begins with a dash
    shares one word with its option (``--lr=-1``). A list is passed unchanged. For a function: a dict of keyword
    arguments or a list of positional ones, which must be picklable.
module : bool, default False
    Run `entrypoint` as ``python -m``.
process_group : Literal["gloo", "nccl", "auto"], optional
    For a function: make this process group before the call, and destroy it after. The rank's own device is
    set. ``"auto"`` is nccl where each rank has a CUDA device, else gloo. Default: none is made.
nproc_per_node : Union[int, str], optional
    *Processes.* Workers on each node: a number, ``"auto"``, ``"cpu"`` or ``"gpu"``. Default: `torchrun_args`,
    then the attribute.
warm : Literal["agent", "workers", False], optional
    Which spare processes are used. Default: the attribute.
env : Mapping[str, Any], optional
    *Environment.* Variables for the workers and for `before_run`. It replaces the attribute as a whole.
cwd : Union[Path, str], optional
    Working directory of the workers and of `before_run`. Default: the task's own.
before_run : Sequence[Union[str, Sequence[Union[Path, str]]]], optional
    Commands that run one after another, once on each node, before any worker starts. A list is run unchanged,
    a string by ``sh -ec``. If one fails on any node, nothing is launched. Restarts do not repeat them.
timeout_s : float, optional
    *Failures.* Seconds that the launch may take once all nodes are ready; each restart counts anew. Default:
    no limit. The step's ``@timeout`` always limits all launches together.
max_restarts, restart_on, preemption_signal : optional
    As the attributes. Default: for `max_restarts` `torchrun_args`, then the attributes.
hang_timeout_s : float, optional
    Seconds of silence of all ranks after which the launch fails. Default: the attribute, which is None: see
    there.
gather : bool, default False
    *Results.* For a function: send the values of all ranks to the control node's result, through Metaflow's
    datastore.
outputs : Union[Path, str, Sequence[Union[Path, str]]], optional
    Files, folders and patterns (``*``, ``**``) relative to `cwd`, as in ``["model/", "*.json"]``. They are
    stored in Metaflow's datastore when all workers have ended; the result's `outputs` has them. After a
    failure, existing files are stored, and the error's `outputs` has them. Default: none.
outputs_from : Literal["control", "all"], optional
    Whose outputs are stored: the control node's or every node's. Default: the control node's.
torchrun_args : Union[Mapping[str, Any], Sequence[Any]], optional
    *Expert.* Further options of torchrun, as in ``{"monitor_interval": 1}`` or ``["--monitor-interval=1"]``.
master_port : Union[int, str], optional
    Port of torch's rendezvous. Default: `torchrun_args`, then the attribute.

Returns
-------
TorchrunResult
    Facts of the launch, and what a function has returned on this node's ranks. On a node without ranks, as a spare
    that was not needed, the step's code ends here.

Raises
------
Exception
    Of a function: the exception of the first rank that failed, unchanged, on every node. The gang's
    verdict is its cause, and its notes name rank and node.
WorkerFailed
    If that exception can't be pickled, or a returned value can't.
TorchrunConfigError
    If an argument is wrong or contradicts another.
EntrypointError
    If there is no such script.
TorchNotFoundError
    If PyTorch is not installed.
LaunchFailed
    If any worker, agent or node failed: the same error on every node, naming the first.
GangError
    If the nodes could not agree or not all of them came.
"""
_BY_POSITION = 2  # so many arguments need no name


def instead_of(name: str) -> str:
    """Return a hint what to write instead of an unknown argument of `run`."""
    hint = " It is an attribute of @torchrun." if name in DEFAULTS else did_you_mean(name, list(ARGUMENTS))
    return f"{hint} It has {', '.join(ARGUMENTS)}."


def checked(run: F) -> F:
    """Refuse unknown arguments of `run`, and also accept positional arguments in the order of metaflow-torchrun 0.2.

    There torchrun_args came first. A list alone is a command; a list before an entrypoint is torchrun_args.
    """
    names = ("torchrun_args", "entrypoint", "entrypoint_args", "nproc_per_node", *LEGACY)

    def called(self: Any, *args: Any, **options: Any) -> Any:
        for name in options.keys() - KNOWN:
            raise TorchrunConfigError(f"run() has no argument {name}.{instead_of(name)}")
        if args and _is_torchrun_args(args, options) and len(args) <= len(names):
            return run(self, **dict(zip(names, args, strict=False)), **options)
        if len(args) > _BY_POSITION:
            raise TorchrunConfigError(
                "run() takes two positional arguments, the entrypoint and its arguments. "
                f"Name the others, as in nproc_per_node={args[_BY_POSITION]!r}."
            )
        return run(self, *args, **options)

    @functools.wraps(run)
    def either(self: Any, *args: Any, **options: Any) -> Any:
        try:
            return called(self, *args, **options)
        except BaseException as error:
            from .tracebacks import cut_frames_around

            cut_frames_around(error)
            raise

    return cast("F", either)


def spelled_out(run: F) -> F:
    """Replace ``**options`` in the signature of `run` by the arguments, and describe all of them in its docstring."""
    types = get_type_hints(RunOptions)
    # Metaflow's generator of stubs (2.19) takes "all" for the function, but shows a text that it can't evaluate as it is.
    types["outputs_from"] = "typing.Literal['control', 'all'] | None"
    signature = inspect.signature(run)
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=ARGUMENTS[name], annotation=types[name])
        for name in [*ARGUMENTS][_BY_POSITION:]
    ]
    own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    run.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
    if run.__doc__ is not None:  # as it is with `python -OO`
        run.__doc__ = f"{inspect.cleandoc(run.__doc__)}\n{_DOCUMENTED}"
    return run


def _is_torchrun_args(args: Sequence[Any], options: Mapping[str, Any]) -> bool:
    entrypoint = args[1] if len(args) > 1 else options.get("entrypoint")
    names_entrypoint = isinstance(entrypoint, str | os.PathLike) or callable(entrypoint)
    return isinstance(args[0], Mapping) or (isinstance(args[0], list | tuple | None) and names_entrypoint)
