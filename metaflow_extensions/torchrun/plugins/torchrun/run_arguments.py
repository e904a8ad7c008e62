"""`Runner.run` and its calling convention: some arguments may be positional, as in metaflow-torchrun 0.2.

`settings.SETTINGS` has the arguments. Metaflow imports this module whenever it is imported itself.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_type_hints, overload

from .errors import TorchrunConfigError
from .parsing import did_you_mean
from .result import TorchrunResult
from .settings import ARGUMENTS, DEFAULTS, RunOptions, with_parameters

if TYPE_CHECKING:
    from typing_extensions import Unpack  # in typing since Python 3.11

    from .show.gang_part import GangPart

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
# Arguments of metaflow-torchrun 0.2, in its order. They are accepted and have no effect.
LEGACY = ("push_results_dir_to_cloud", "local_output_dir", "cloud_output_dir")
KNOWN = frozenset({*ARGUMENTS, *LEGACY})


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
    run.__doc__ = with_parameters(run.__doc__, ARGUMENTS)
    return run


def _is_torchrun_args(args: Sequence[Any], options: Mapping[str, Any]) -> bool:
    entrypoint = args[1] if len(args) > 1 else options.get("entrypoint")
    names_entrypoint = isinstance(entrypoint, str | os.PathLike) or callable(entrypoint)
    return isinstance(args[0], Mapping) or (isinstance(args[0], list | tuple | None) and names_entrypoint)


class Runner:
    """What starts launches: ``current.torch`` and `TorchrunSingleNodeMultiGPU`."""

    @overload
    def run(
        self,
        entrypoint: Callable[..., T],
        entrypoint_args: Mapping[str, Any] | Sequence[Any] | None = None,
        **options: Unpack[RunOptions],
    ) -> TorchrunResult[T]: ...

    @overload
    def run(
        self,
        entrypoint: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
        entrypoint_args: Mapping[str, Any] | Sequence[Any] | None = None,
        **options: Unpack[RunOptions],
    ) -> TorchrunResult[None]: ...

    @spelled_out  # describes the arguments, too
    @checked
    def run(
        self,
        entrypoint: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Callable[..., Any] | None = None,
        entrypoint_args: Mapping[str, Any] | Sequence[Any] | None = None,
        **options: Any,
    ) -> TorchrunResult[Any]:
        """Run a script or a function under torchrun on all nodes and wait until all of them have ended.

        Every node must call it, in the same order, with settings that agree. An argument that is also an attribute of
        ``@torchrun`` overrides the attribute for this launch; without either, the stated default counts.

        Returns
        -------
        TorchrunResult
            Facts of the launch, and what a function has returned on this node's ranks. On a node without ranks, as a
            spare that was not needed, the step's code ends here.

        Raises
        ------
        Exception
            Of a function: the exception of the first rank that failed, unchanged, on every node. The gang's verdict is
            its cause, and its notes name rank and node.
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
        return self.launched({**options, "entrypoint": entrypoint, "entrypoint_args": entrypoint_args})

    def card(self, *parts: str) -> GangPart:
        """Return parts of the gang's card as a component, for a card of the step's own.

        It is renewed while `run` waits, also without ``current.card.refresh``, and shows the end of it afterwards. On
        another node than the control node it names the control node's task.

        Parameters
        ----------
        *parts : str
            Which ones: ``"outcome"``, ``"hangs"``, ``"progress"``, ``"ranks"``, ``"timeline"``, ``"usage"``, ``"nodes"``,
            ``"outputs"``, ``"launch"``. Default: all.

        Returns
        -------
        GangPart
            A component for ``current.card.append``.

        Raises
        ------
        TorchrunConfigError
            If there is no such part.
        """
        return self._part(parts)

    def launched(self, given: dict[str, Any]) -> TorchrunResult[Any]:
        """Run a launch to its end; `given` has the arguments."""
        raise NotImplementedError

    def _part(self, names: tuple[str, ...]) -> GangPart:
        raise NotImplementedError
