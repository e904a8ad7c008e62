"""`Runner.run` and its calling convention: some arguments may be positional, as in metaflow-torchrun 0.2.

`settings.SETTINGS` has the arguments. Metaflow imports this module whenever it is imported itself.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints, overload

from .errors import TorchrunConfigError
from .parsing import did_you_mean
from .result import TorchrunResult
from .settings import ARGUMENTS, DEFAULTS, SETTINGS, RunOptions, with_parameters

if TYPE_CHECKING:
    from typing_extensions import Unpack  # in typing since Python 3.11

    from .show.gang_part import GangPart

T = TypeVar("T")
# Arguments of metaflow-torchrun 0.2, in its order. They are accepted and have no effect.
LEGACY = ("push_results_dir_to_cloud", "local_output_dir", "cloud_output_dir")
KNOWN = frozenset({*ARGUMENTS, *LEGACY})
_BY_POSITION = ("entrypoint", "entrypoint_args")  # these need no name
_AS_IN_0_2 = ("torchrun_args", *_BY_POSITION, "nproc_per_node", *LEGACY)


def instead_of(name: str) -> str:
    """Return a hint what to write instead of an unknown argument of `run`."""
    hint = " It is an attribute of @torchrun." if name in DEFAULTS else did_you_mean(name, list(ARGUMENTS))
    return f"{hint} It has {', '.join(ARGUMENTS)}."


def _named(args: Sequence[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return all arguments by name. In metaflow-torchrun 0.2, torchrun_args came first.

    A list alone is a command; a list before an entrypoint is torchrun_args.
    """
    for name in options.keys() - KNOWN:
        raise TorchrunConfigError(f"run() has no argument {name}.{instead_of(name)}")
    second = args[1] if len(args) > 1 else options.get("entrypoint")
    names_entrypoint = isinstance(second, str | os.PathLike) or callable(second)
    is_old = args and (isinstance(args[0], Mapping) or (isinstance(args[0], list | tuple | None) and names_entrypoint))
    names = _AS_IN_0_2 if is_old else _BY_POSITION
    if len(args) > len(names):
        raise TorchrunConfigError(
            "run() takes two positional arguments, the entrypoint and its arguments. "
            f"Name the others, as in nproc_per_node={args[2]!r}."
        )
    named = dict(zip(names, args, strict=False))
    if twice := sorted(named.keys() & options.keys()):
        raise TypeError(f"run() got two values for {twice[0]}: one by its place, and one by its name.")
    return {**named, **options}


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

    def run(self, *args: Any, **options: Any) -> TorchrunResult[Any]:
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
        try:
            return self.launched(_named(args, options))
        except BaseException as error:
            from .tracebacks import cut_frames_around

            cut_frames_around(error)
            raise

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


def _signature() -> inspect.Signature:
    """Return the signature of `run` as its users see it, and Metaflow's generator of stubs."""
    types = get_type_hints(RunOptions)
    # The generator (2.19) takes "all" for the function, but shows a text that it can't evaluate as it is.
    types["outputs_from"] = "typing.Literal['control', 'all'] | None"
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    for name, default in ARGUMENTS.items():
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD if name in _BY_POSITION else inspect.Parameter.KEYWORD_ONLY
        kind_of_value = types.get(name, SETTINGS[name].kind)
        parameters.append(inspect.Parameter(name, kind, default=default, annotation=kind_of_value))
    return inspect.signature(Runner.run).replace(parameters=parameters)


Runner.run.__signature__ = _signature()  # type: ignore[attr-defined]
Runner.run.__doc__ = with_parameters(Runner.run.__doc__, ARGUMENTS)
