"""`TorchrunSingleNodeMultiGPU`, the sibling of ``current.torch`` for steps of a single node.

Metaflow imports this module whenever it is imported itself, so all that does the work is imported when an object is made.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

from .result import TorchrunResult
from .run_arguments import checked, spelled_out

if TYPE_CHECKING:
    from typing_extensions import Unpack  # in typing since Python 3.11

    from .run_arguments import RunOptions
    from .show.gang_part import GangPart

T = TypeVar("T")
# Metaflow's generator of stubs looks at what modules have imported, and at what they name here (2.19). This one is the
# type of `current.torch`.
_addl_stubgen_modules = [f"{__package__}.executor"]


class TorchrunSingleNodeMultiGPU:
    """Runs torchrun on this machine alone, in a step without ``num_parallel``.

    It is the same machinery as ``current.torch``, with a gang of one node.
    """

    def __init__(self) -> None:
        from .machine.system import require_linux

        require_linux("TorchrunSingleNodeMultiGPU")
        from .gang_of_one import GangOfOne

        self._gang = GangOfOne()

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def card(self, *parts: str) -> GangPart:
        """Return parts of the gang's card as a component, for a card of the step's own.

        It shows the last launch of this object.

        Parameters
        ----------
        *parts : str
            As for `TorchrunExecutor.card`.

        Returns
        -------
        GangPart
            A component for ``current.card.append``.

        Raises
        ------
        TorchrunConfigError
            If there is no such part.
        """
        return self._gang.card(parts)

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

    @spelled_out
    @checked
    def run(
        self,
        entrypoint: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Callable[..., Any] | None = None,
        entrypoint_args: Mapping[str, Any] | Sequence[Any] | None = None,
        **options: Any,
    ) -> TorchrunResult[Any]:
        """Run a script or a function under torchrun on this machine and wait for its end.

        The arguments are those of `current.torch.run`; this machine is the only node.
        """
        return self._gang.run(entrypoint=entrypoint, entrypoint_args=entrypoint_args, **options)
