"""The calling convention of `run`: types of its arguments, and which may be positional.

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
from .settings import ARGUMENTS, DEFAULTS, SETTINGS

F = TypeVar("F", bound=Callable[..., Any])
# Arguments of metaflow-torchrun 0.2, in its order. They are accepted and have no effect.
LEGACY = ("push_results_dir_to_cloud", "local_output_dir", "cloud_output_dir")
KNOWN = frozenset({*ARGUMENTS, *LEGACY})

# Arguments, and attributes of ``@torchrun``, that mean nothing where a feature is taken out: -> its name. Of the entrypoint
# that holds for a function.
_FEATURES = ("functions", "outputs", "hangs")  # by the names of their pages, too
FEATURE_OF = {"entrypoint": "functions"} | {
    name: feature for name, each in SETTINGS.items() if (feature := each.page.replace("-", "_")) in _FEATURES
}


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

    @functools.wraps(run)
    def either(self: Any, *args: Any, **options: Any) -> Any:
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

    return cast("F", either)


def spelled_out(run: F) -> F:
    """Replace ``**options`` in the signature of `run` by the arguments, with types and defaults."""
    types = get_type_hints(RunOptions)
    signature = inspect.signature(run)
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=ARGUMENTS[name], annotation=types[name])
        for name in [*ARGUMENTS][_BY_POSITION:]
    ]
    own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    run.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
    return run


def _is_torchrun_args(args: Sequence[Any], options: Mapping[str, Any]) -> bool:
    entrypoint = args[1] if len(args) > 1 else options.get("entrypoint")
    names_entrypoint = isinstance(entrypoint, str | os.PathLike) or callable(entrypoint)
    return isinstance(args[0], Mapping) or (isinstance(args[0], list | tuple | None) and names_entrypoint)
