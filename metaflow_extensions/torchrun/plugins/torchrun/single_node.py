"""`TorchrunSingleNodeMultiGPU`, the sibling of ``current.torch`` for steps of a single node.

Metaflow imports this module whenever it is imported itself, so all that does the work is imported when an object is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .result import TorchrunResult
from .run_arguments import Runner

if TYPE_CHECKING:
    from .show.gang_part import GangPart

# Metaflow's generator of stubs looks at what modules have imported, and at what they name here (2.19). This one is the
# type of `current.torch`.
_addl_stubgen_modules = [f"{__package__}.executor"]


class TorchrunSingleNodeMultiGPU(Runner):
    """Runs torchrun on this machine alone, in a step without ``num_parallel``.

    It is the same machinery as ``current.torch``, with a gang of one node. Its card shows the last launch of this object.
    """

    def __init__(self) -> None:
        from .machine.system import require_linux

        require_linux("TorchrunSingleNodeMultiGPU")
        from .gang_of_one import GangOfOne

        self._gang = GangOfOne()

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def launched(self, given: dict[str, Any]) -> TorchrunResult[Any]:
        """Run a launch in a gang of one node."""
        return self._gang.run(given)

    def _part(self, names: tuple[str, ...]) -> GangPart:
        return self._gang.card(names)
